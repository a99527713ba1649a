"""The routers that are compared, each as a process in front of the one trivial site; the others from environments of their own (`make peers`).

Knows their command lines; refuses to know what is measured. One that is not installed is left out by name.
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import orjson
import psutil

from load_tests.local_network import DOOR, free_ports
from load_tests.overhead.trivial_site import MODEL, NAME
from wire.headers import HOP_SECRET_ENV

KEY = "sk-overhead"  # LiteLLM's proxy refuses to be measured without one; all get the same request
START_S = 90.0
ROOT = Path(__file__).parents[2]
OURS, NOBODY = "pilotlight", "no router"


class Running(NamedTuple):
    """A router that answers, or the site itself."""

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
    command: Callable[[Path, str, int, Path], list[str]]  # environment, site's url, port, a folder for files


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
def running(names: list[str], peers: Path) -> Iterator[list[Running]]:
    """Run those of `names` that are installed, the trivial site first."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotlight-overhead-")))
        (port,) = free_ports(1)
        site = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "load_tests.overhead.trivial_site", str(port)]
        started = [stack.enter_context(_process(NOBODY, command, site, folder, ""))]
        for name in names:
            if (found := _command(name, peers, site, folder)) is None:
                print(f"{name} is left out: {peers / name} has no such environment (make peers)", file=sys.stderr)
                continue
            command, port, version = found
            started.append(stack.enter_context(_process(name, command, f"http://127.0.0.1:{port}", folder, version)))
        yield started


def _command(name: str, peers: Path, site: str, folder: Path) -> tuple[list[str], int, str] | None:
    (port,) = free_ports(1)
    if name == OURS:
        return (
            [sys.executable, "-m", "edge_router.serve", str(_network_file(folder, site)), "--port", str(port)],
            port,
            "",
        )
    peer, environment = PEERS[name], peers / name
    python = environment / "bin" / "python"
    if not python.exists():
        return None
    script = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
    asked = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    return peer.command(environment, site, port, folder), port, asked.stdout.strip()


def _network_file(folder: Path, site: str) -> Path:
    path = folder / "network.toml"
    place = '{ city = "Amsterdam", latitude = 52.31, longitude = 4.76 }'
    path.write_text(
        f'place = {place}\n[listen]\nport = 0\n[[sites]]\nname = "{NAME}"\nurl = "{site}"\nplace = {place}\n{DOOR}'
    )
    return path


@contextmanager
def _process(name: str, command: list[str], url: str, folder: Path, version: str) -> Iterator[Running]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        HOP_SECRET_ENV: "the secret of a measurement",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    if command[0] != sys.executable:
        del environment["PYTHONPATH"]  # another project's environment has no business with ours
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=ROOT if command[0] == sys.executable else folder
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
