"""The compared routers, each a process in front of the same trivial site.

Routers of other projects run from separate environments (`make peers`). A router that is not installed is skipped, with a message. Independent of the
measurements.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import orjson
import psutil

from load_tests.local_network import DOOR, free_ports
from load_tests.overhead.trivial_site import MODEL, NAME
from pilotlight.wire.hop.headers import HOP_SECRET_ENV

KEY = "sk-overhead"  # LiteLLM's proxy requires a key; all routers get the same request
SECRET = "the secret of a measurement"
START_S = 90.0
ROOT = Path(__file__).parents[2]
OURS, NOBODY = "pilotlight", "no router"
BEFORE = "before"  # ours from an older checkout
METERED = "pilotlight, metered"  # with all features for paying clients
SHARED = "pilotlight, shared limits"  # METERED, and its limits are shared with other routers
TWO_WORKERS = "pilotlight, 2 workers"


class Running(NamedTuple):
    """A running router, or the site itself."""

    name: str
    url: str
    process: psutil.Process
    version: str

    def cpu_s(self) -> float:
        """Sum the processor time of all its processes so far."""
        family = [self.process, *self.process.children(recursive=True)]
        times = [member.cpu_times() for member in family]
        return float(sum(used.user + used.system for used in times))


class Peer(NamedTuple):
    package: str
    command: Callable[[Path, str, int, Path], list[str]]  # (environment, URL of the site, port, folder for files)


def _rust_router(module: str) -> Callable[[Path, str, int, Path], list[str]]:
    def command(environment: Path, site: str, port: int, folder: Path) -> list[str]:
        router = [str(environment / "bin" / "python"), "-m", module, "--worker-urls", site, "--policy", "round_robin"]
        return [*router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_ports(1)[0])]

    return command


def _litellm(environment: Path, site: str, port: int, folder: Path) -> list[str]:
    config = folder / "litellm.yaml"
    model = f"{{model: openai/{MODEL}, api_base: {site}/v1, api_key: none}}"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params: {model}\n"
        f"general_settings: {{master_key: {KEY}}}\nlitellm_settings: {{telemetry: false}}\n"
    )
    return [str(environment / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


PEERS = {
    "vllm-router": Peer("vllm-router", _rust_router("vllm_router.launch_router")),
    "sglang-router": Peer("sglang-router", _rust_router("sglang_router.launch_router")),
    "litellm": Peer("litellm", _litellm),
}


@contextmanager
def running(names: list[str], peers: Path, quotas: str = "", before: Path | None = None) -> Iterator[list[Running]]:
    """Run those of `names` that are installed, the trivial site first.

    `quotas`: the database of shared limits. `before`: an older checkout, whose router runs, too."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotlight-overhead-")))
        started = [stack.enter_context(trivial_site(folder))]
        site = started[0].url
        if before is not None:
            started.append(stack.enter_context(our_router(BEFORE, folder, site, tree=before)))
        for name in names:
            if name == TWO_WORKERS:
                started.append(stack.enter_context(our_router(name, folder, site, arguments=("--workers", "2"))))
                continue
            if (found := _command(name, peers, site, folder, quotas)) is None:
                print(f"{name} is left out: {peers / name} has no such environment (make peers)", file=sys.stderr)
                continue
            command, port, version = found
            started.append(stack.enter_context(_process(name, command, f"http://127.0.0.1:{port}", folder, version)))
        yield started


@contextmanager
def running_features() -> Iterator[list[Running]]:
    """Run a router without settings, and one with each feature."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotlight-features-")))
        site = stack.enter_context(trivial_site(folder)).url
        yield [
            stack.enter_context(our_router(name, folder, site, tables, secret=secret))
            for name, tables, secret in _features(folder, site)
        ]


@contextmanager
def trivial_site(folder: Path) -> Iterator[Running]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "load_tests.overhead.trivial_site", str(port)]
    with _process(NOBODY, command, f"http://127.0.0.1:{port}", folder, "") as site:
        yield site


@contextmanager
def our_router(
    name: str,
    folder: Path,
    site: str,
    tables: str = "",
    tree: Path = ROOT,
    arguments: Sequence[str] = (),
    secret: str = SECRET,
) -> Iterator[Running]:
    """Run a router of ours. `tables`: TOML after [door]; KEY must be accepted. `tree`: the checkout."""
    (port,) = free_ports(1)
    command = [*_our_command(port, folder, site, tables), *arguments]
    with _process(name, command, f"http://127.0.0.1:{port}", folder, "", tree, secret) as router:
        yield router


def _our_command(port: int, folder: Path, site: str, tables: str) -> list[str]:
    place = '{ city = "Amsterdam", latitude = 52.31, longitude = 4.76 }'
    listed = f'place = {place}\n[listen]\nport = 0\n[[sites]]\nname = "{NAME}"\nurl = "{site}"\nplace = {place}\n'
    file = folder / f"{port}.toml"
    file.write_text(f"{listed}{DOOR}{tables}")
    return [sys.executable, "-m", "pilotlight.edge_router", str(file), "--port", str(port)]


def _command(name: str, peers: Path, site: str, folder: Path, quotas: str) -> tuple[list[str], int, str] | None:
    (port,) = free_ports(1)
    if name in (OURS, METERED, SHARED):
        tables = "" if name == OURS else _metering(folder / f"{port}", quotas if name == SHARED else "")
        return _our_command(port, folder, site, tables), port, ""
    peer, environment = PEERS[name], peers / name
    python = environment / "bin" / "python"
    if not python.exists():
        return None
    script = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
    asked = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    return peer.command(environment, site, port, folder), port, asked.stdout.strip()


# No limit is reached.
_LIMITS = "requests_per_min = 1e9\ntokens_per_min = 1e12\nmax_open = 100_000\n"
_QUOTAS = "tokens_per_day = 1_000_000_000_000\ncost_per_day = 1e9\n"


def _metering(ledger: Path, quotas: str) -> str:
    """Return settings of a metered router, which follow [door].

    They require a key, and have an account with every kind of limit, prices and a ledger.
    """
    return _account(_LIMITS + _QUOTAS) + _ledger(ledger) + (f'[quotas]\nstore = "{quotas}"\n' if quotas else "")


def _account(limits: str = "") -> str:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    key = f'require_key = true\n[[keys]]\nname = "load"\nkey_sha256 = "{digest}"\naccount = "acme"\n'
    return f'{key}[[accounts]]\nname = "acme"\n{limits}'


def _ledger(directory: Path) -> str:
    return f'[ledger]\ndirectory = "{directory}"\n[[prices]]\nmodel = "*"\ninput = 1.0\noutput = 2.0\n'


def _features(folder: Path, site: str) -> Iterator[tuple[str, str, str]]:
    """Yield each feature's name, settings and network secret.
    Traces are sent to the site, which ignores them."""
    yield "no network secret", "", ""
    yield "nothing but the secret", "", SECRET
    yield "keys", _account(), SECRET
    yield "keys, limits", _account(_LIMITS), SECRET
    yield "ledger", _ledger(folder / "ledger"), SECRET
    yield "keys, ledger, daily quotas", _account(_QUOTAS) + _ledger(folder / "quotas"), SECRET
    yield "objectives", '[[objectives]]\nmodel = "*"\nanswered = 0.999\n', SECRET
    yield "traces", f'[telemetry]\notlp = "{site}"\n', SECRET
    yield "access log", "[telemetry]\naccess_log = true\n", SECRET


@contextmanager
def _process(
    name: str, command: list[str], url: str, folder: Path, version: str, tree: Path = ROOT, secret: str = SECRET
) -> Iterator[Running]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        HOP_SECRET_ENV: secret,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    if command[0] != sys.executable:
        del environment["PYTHONPATH"]  # another project's environment must not use our modules
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=tree if command[0] == sys.executable else folder
        )
        try:
            _wait_until_it_answers(name, process, url, folder / f"{name}.log")
            yield Running(name, url, psutil.Process(process.pid), version)
        finally:
            family = (
                [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                if process.poll() is None
                else []
            )
            for member in family:
                member.kill()
            process.wait()


def _wait_until_it_answers(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    body = orjson.dumps({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]})
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                if b"It is done" in answer.read():
                    return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not answer: {error}\n{log.read_text()[-3000:]}") from None
        time.sleep(0.1)
