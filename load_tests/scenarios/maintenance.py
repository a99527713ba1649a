"""Upgrade a network under load, and replace each of its secrets and certificates.

python -m load_tests.scenarios.maintenance [upgrade | rotation] [--streams 64] [--old COMMIT] [--no-record]

A network is made by the commands of operators, `pilotlight network init` and `join`: a router with two workers and two sites, TLS everywhere, on this
machine. Clients keep 64 streams open, call a function that returns its secret, and open new connections. Meanwhile the wheel of another commit is
installed and all processes are replaced (upgrade), or each secret and certificate is replaced as docs/operating.md describes (rotation). The record
counts, by phase, answers, refusals (no connection, or another status than 200) and lost streams (an error event, or no end). Clients retry nothing.

The sites share this machine's cores with the clients, so probes and new connections get PATIENCE_S instead of one and two seconds.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from cryptography.x509 import load_der_x509_certificate, load_pem_x509_certificate
from rich.console import Console
from rich.table import Table

from load_tests.local_network import free_ports
from load_tests.records import write_record
from load_tests.scenarios.site_death import SUBJECTS, Heard, hear

ROOT = Path(__file__).parents[2]
SITES = ("ams1", "iad1")
FUNCTION = """
from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(self.env.TOKEN)
"""
STEP_LIMIT_S = 600.0
PATIENCE_S = 20.0
REPLACED = re.compile(r"worker \d+ was replaced")
SECRET_STEPS = ("accepted", "signing", "alone")
AUTHORITY_STEPS = ("trusted", "issuing", "alone")


class Installation:
    """A virtual environment with a wheel of this project and this Python's dependencies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        (packages,) = (folder / "venv").glob("lib/python3*/site-packages")
        (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
        self.bin = folder / "venv" / "bin"

    def install(self, commit: str) -> None:
        """Build the wheel of a commit, and install it in place of the one that is there."""
        wheels = self._folder / commit
        (tree := wheels / "tree").mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
        pip = [str(self.bin / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(tree)], check=True)
        (wheel,) = wheels.glob("*.whl")
        subprocess.run([*pip, "install", "--no-deps", "--force-reinstall", str(wheel)], check=True)


class Network:
    """A router with workers and two sites, made by the commands of an installation in a folder."""

    def __init__(self, bin: Path, folder: Path) -> None:
        self.bin, self.folder, self.net = bin, folder, folder / "net"
        self.port, *ports = free_ports(1 + len(SITES))
        self.ports = dict(zip(SITES, ports, strict=True))
        self.url = f"https://127.0.0.1:{self.port}"
        self.admin_key = ""
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        left_out = ("PYTHONPATH", "PILOTLIGHT_HOP_SECRET")
        self._environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._environment |= {
            "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": cache, "PILOTLIGHT_URL": self.url,
            "SSL_CERT_FILE": str(self.net / "authority.pem"), "NO_COLOR": "1",
        }  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        made = await self.command("network", "init", str(self.net), "--host", "127.0.0.1", "--port", str(self.port))
        self.admin_key, line = made.split("\n")[0], made.strip().split("\n")[-1]
        self._environment["PILOTLIGHT_API_KEY"] = self.admin_key
        with (self.net / "network.toml").open("a") as file:
            file.write(f"\n[health]\ntimeout_s = {PATIENCE_S}\n[relay]\nconnect_timeout_s = {PATIENCE_S}\n")
        try:
            await self.start("router", "--workers", "2")
            await self._listens()
            for name in SITES:
                token = line.split()[-1]
                options = ("--dir", str(self.folder / name), "--name", name, "--port", str(self.ports[name]))
                await self.command("join", self.url, token, *options, "--no-start")
                with self.site_file(name).open("a") as file:
                    file.write(f'\n[functions]\ndeployments = "{self.url}"\n')
                line = (await self.command("network", "token", str(self.net))).strip()
            await asyncio.gather(*(self.start(name) for name in SITES))
            await self.until(lambda: self.serves(*SITES))
            yield
        finally:
            for process in self._processes.values():
                if process.returncode is None:
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in self._processes.values()))

    async def command(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command of the installation; return its output. Raises RuntimeError if it fails."""
        process = await asyncio.create_subprocess_exec(
            self.bin / "pilotlight", *arguments, cwd=self.folder, env=self._environment,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, errors = await process.communicate(stdin)
        if process.returncode:
            raise RuntimeError(f"pilotlight {' '.join(arguments)}: {errors.decode()[-1000:]}{self.last_words()}")
        return output.decode()

    async def start(self, name: str, *options: str) -> None:
        """Start the router or a site."""
        arguments = (
            ("router", str(self.net / "network.toml"), *options)
            if name == "router"
            else ("site", str(self.site_file(name)))
        )
        with self.log(name).open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                self.bin / "pilotlight", *arguments, cwd=self.folder, env=self._environment, stdout=log, stderr=log
            )

    async def restart_sites(self) -> None:
        """Restart the sites one after the other: each drains, and the next one follows when it serves again."""
        for name in SITES:
            process = self._processes[name]
            process.terminate()
            await process.wait()
            await self.start(name)
            await self.until(lambda name=name: self.serves(name))  # type: ignore[misc]
        await self.until(lambda: self.serves(*SITES))

    async def replace_workers(self) -> None:
        """Replace the router's workers, one by one."""
        before = len(REPLACED.findall(self.log("router").read_text()))
        self._processes["router"].send_signal(signal.SIGUSR2)
        await self.until(lambda: self._has_replaced(before + 2))

    async def restart_all(self) -> None:
        await self.restart_sites()
        await self.replace_workers()

    def reload_router(self) -> None:
        self._processes["router"].send_signal(signal.SIGHUP)

    async def serves(self, *names: str) -> bool:
        """Tell whether the router takes these sites' present processes for healthy and ready."""
        views = {view["site"]: view for view in json.loads(await self.read("/status"))["sites"]}
        for name in names:
            view = views.get(name)
            if view is None or view["state"] != "healthy" or not view.get("status"):
                return False
            pids = [each["pid"] for each in view["status"]["processes"] if each["role"] == "site"]
            if pids != [self._processes[name].pid]:
                return False
        return True

    async def read(self, path: str) -> str:
        """Return the body of an answer to the operator, on a new connection."""
        async with self.session(self.admin_key) as session, session.get(self.url + path) as answer:
            return await answer.text()

    async def until(self, is_reached: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a condition. Raises RuntimeError if a process ends or the time limit passes."""
        try:
            async with asyncio.timeout(STEP_LIMIT_S):
                while not await is_reached():
                    ended = [name for name, each in self._processes.items() if each.returncode is not None]
                    if ended:
                        raise RuntimeError(f"{', '.join(ended)} ended: {self.last_words()}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise RuntimeError(f"not reached within {STEP_LIMIT_S:g} s: {self.last_words()}") from None

    def last_words(self) -> str:
        return "".join(f"\n{path}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def site_file(self, name: str) -> Path:
        return self.folder / name / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def copy_to_sites(self, file: str) -> None:
        """Copy a file of the network's folder to each site, as the operator of several machines does."""
        for name in SITES:
            shutil.copy(self.net / file, self.folder / name / file)

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.net / "authority.pem"))

    def session(self, key: str, *, is_new: bool = False) -> aiohttp.ClientSession:
        """Return a client with a key; `is_new`: each request has a new connection."""
        connector = aiohttp.TCPConnector(limit=0, ssl=self.trust(), force_close=is_new)
        headers, timeout = {"authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=STEP_LIMIT_S)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)

    async def presents(self, port: int, certificate: Path) -> bool:
        """Tell whether the listener at a port presents the certificate of a file."""
        expected = load_pem_x509_certificate(await asyncio.to_thread(certificate.read_bytes))
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=self.trust())
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        await writer.wait_closed()
        return load_der_x509_certificate(found) == expected

    async def _has_replaced(self, count: int) -> bool:
        return len(REPLACED.findall(self.log("router").read_text())) >= count

    async def _listens(self) -> None:
        async def is_listening() -> bool:
            return "with 2 workers" in self.log("router").read_text()

        await self.until(is_listening)


class Load:
    """Clients that ask without a pause, and the counts of their answers and failures by phase."""

    def __init__(self, network: Network, keys: list[str], num_streams: int) -> None:
        self._network, self._num_streams = network, num_streams
        self.keys = keys  # client number i uses key i modulo their number
        self.secrets = {"first"}  # values that the function may return
        self.counts: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        self._phase = ""
        self._rounds = [0] * (num_streams + 4)
        self._sessions: dict[tuple[str, bool], aiohttp.ClientSession] = {}
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [self._chat] * self._num_streams + [self._call] * 2 + [self._keep] + [self._connect]
        async with self._stack:
            tasks = [asyncio.create_task(self._ask_on(i, ask)) for i, ask in enumerate(clients)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase, self.counts[name], before = name, Counter(), len(self.failures)
        yield
        print(
            f"{name}: {dict(self.counts[name])}",
            *Counter(self.failures[before:]).most_common(5),
            sep="\n  ",
            flush=True,
        )

    async def go_round(self) -> None:
        """Wait until each client has got an answer to a request that it sent from now on."""
        marks = [done + 2 for done in self._rounds]  # the first may have been sent before

        async def is_round() -> bool:
            return all(done >= mark for done, mark in zip(self._rounds, marks, strict=True))

        await self._network.until(is_round)

    def trust_again(self) -> None:
        """Use new sessions from now on, which trust the file's present authorities.

        Open requests keep their session."""
        self._sessions = {}

    async def _ask_on(self, client: int, ask: Callable[[int], Awaitable[None]]) -> None:
        while True:
            await ask(client)
            self._rounds[client] += 1

    def _session(self, client: int, *, is_new: bool = False) -> aiohttp.ClientSession:
        key = self.keys[client % len(self.keys)]
        if (key, is_new) not in self._sessions:
            session = self._network.session(key, is_new=is_new)
            self._stack.push_async_callback(session.close)
            self._sessions[key, is_new] = session
        return self._sessions[key, is_new]

    async def _chat(self, client: int) -> None:
        told = f"Tell me a story about {SUBJECTS[client % len(SUBJECTS)]}."
        body: dict[str, Any] = {
            "model": "ember", "stream": True, "max_tokens": 48, "ignore_eos": True, "seed": client,
            "messages": [{"role": "user", "content": told}],
        }  # fmt: skip
        heard, phase = Heard(), self._phase
        await hear(self._session(client), self._network.url, body, heard, lambda: None)
        is_whole = heard.is_done and heard.error is None
        self._count(phase, "streams" if is_whole else "lost" if heard.arrivals_s else "refused", heard.error or "cut")

    async def _call(self, client: int) -> None:
        await self._get(client, "/fn/keeper/", "calls", is_new=False)

    async def _keep(self, client: int) -> None:
        """Store a response, and read it again: it is kept by one of the workers."""
        body, session, phase = (
            {"model": "ember", "input": "Hello", "max_output_tokens": 16},
            self._session(client),
            self._phase,
        )
        try:
            async with session.post(f"{self._network.url}/v1/responses", json=body) as answer:
                text = await answer.text()
            if answer.status == 200:
                await self._get(client, f"/v1/responses/{json.loads(text)['id']}", "kept", is_new=False)
            else:
                self._count(phase, "refused", f"kept: {answer.status} {text[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._count(phase, "refused", f"kept: {type(error).__name__}: {error}")

    async def _connect(self, client: int) -> None:
        await self._get(client, "/v1/models", "connections", is_new=True)

    async def _get(self, client: int, path: str, kind: str, *, is_new: bool) -> None:
        phase = self._phase
        try:
            async with self._session(client, is_new=is_new).get(self._network.url + path) as answer:
                text = await answer.text()
                is_right = answer.status == 200 and (kind != "calls" or text in self.secrets)
                self._count(phase, kind if is_right else "refused", f"{kind}: {answer.status} {text[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._count(phase, "refused", f"{kind}: {type(error).__name__}: {error}")
        await asyncio.sleep(0.05)

    def _count(self, phase: str, what: str, why: str) -> None:
        self.counts[phase][what] += 1
        if what in ("refused", "lost"):
            self.failures.append(f"{phase}: {what}: {why}")


async def upgrade(network: Network, load: Load, install: Callable[[], None]) -> None:
    """Install another version; replace the sites one after the other, then the router's workers."""
    with load.phase("upgrade"):
        await asyncio.to_thread(install)
        await network.restart_all()
        await load.go_round()


async def rotate(network: Network, load: Load) -> None:
    """Replace each secret and certificate of the network, one after the other."""
    net = str(network.net)
    for step in SECRET_STEPS:
        with load.phase(f"network's secret: new one {step}"):
            await network.command("network", "rotate-secret", net)
            network.copy_to_sites("secret")
            await network.restart_all()
            await load.go_round()
    with load.phase("router's certificate"):
        await network.command("network", "renew", net)
        await network.until(lambda: network.presents(network.port, network.net / "router.pem"))
        await load.go_round()
    with load.phase("sites' certificates"):
        await renew_sites(network)
        await load.go_round()
    for step in AUTHORITY_STEPS:
        with load.phase(f"authority: new one {step}"):
            await network.command("network", "rotate-authority", net)
            network.copy_to_sites("authority.pem")
            load.trust_again()
            if step == "issuing":
                await renew_sites(network)
            await network.restart_all()
            await load.go_round()
    with load.phase("key of a client"):
        file = str(network.net / "network.toml")
        new = (await network.command("keys", "rotate", "load", "--file", file, "--grace-hours", "1")).strip()
        network.reload_router()
        await network.until(lambda: accepts(network, new))
        load.keys = [*load.keys, new]  # half of the clients keep the old one
        await load.go_round()
    with load.phase("key of the sites' secrets"):
        for name in SITES:
            await network.command("secret", "rotate-key", "--site", str(network.site_file(name)))
        await network.restart_sites()  # a start decrypts the functions' secrets
        await load.go_round()
    with load.phase("secret of a function"):
        load.secrets.add("second")
        await network.command("secret", "put", "keeper", "TOKEN", "--remote", stdin=b"second")
        await network.until(lambda: returns(network, "second"))
        await load.go_round()
    with load.phase("all replaced"):
        load.secrets, load.keys = {"second"}, load.keys[1:]
        await load.go_round()


async def renew_sites(network: Network) -> None:
    for name in SITES:
        await network.command("network", "renew", str(network.net), "--site", name)
        for end in ("key", "pem"):
            (network.net / f"{name}.{end}").replace(network.folder / name / f"{name}.{end}")
        certificate = network.folder / name / f"{name}.pem"
        await network.until(lambda name=name, file=certificate: network.presents(network.ports[name], file))  # type: ignore[misc]


async def accepts(network: Network, key: str) -> bool:
    async with network.session(key, is_new=True) as session:
        statuses = []
        for _ in range(8):  # at each worker, most likely
            async with session.get(f"{network.url}/v1/models") as answer:
                statuses.append(answer.status)
    return set(statuses) == {200}


async def returns(network: Network, value: str) -> bool:
    return await network.read("/fn/keeper/") == value


async def run(part: str, old: str, new: str, num_streams: int) -> tuple[dict[str, Any], list[str]]:
    """Run one part, `upgrade` or `rotation`; return the counts by phase, and the failures."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-maintenance-") as path:
        folder = Path(path)
        installation = Installation(folder / "installed")
        installation.install(old if part == "upgrade" else new)
        network = Network(installation.bin, folder)
        async with network.running():
            key = (await network.command("keys", "create", "load", "--file", str(network.net / "network.toml"))).strip()
            network.reload_router()
            await network.until(lambda: accepts(network, key))
            await deploy(network)
            load = Load(network, [key], num_streams)
            with load.phase("undisturbed"):
                async with load.running():
                    await load.go_round()
                    if part == "upgrade":
                        await upgrade(network, load, lambda: installation.install(new))
                    else:
                        await rotate(network, load)
            return {name: dict(counts) for name, counts in load.counts.items()}, load.failures


async def deploy(network: Network) -> None:
    """Deploy the function to both sites, and give it its secret."""
    source = network.folder / "keeper"
    (source / "src").mkdir(parents=True)
    (source / "wrangler.toml").write_text(
        'name = "keeper"\nmain = "src/entry.py"\ncompatibility_date = "2026-01-01"\ncompatibility_flags = ["python_workers"]\n'
    )
    (source / "src" / "entry.py").write_text(FUNCTION)
    await network.command("secret", "put", "keeper", "TOKEN", "--remote", stdin=b"first")
    await network.command("deploy", str(source))
    await network.until(lambda: returns(network, "first"))


def show(console: Console, results: dict[str, dict[str, int]]) -> None:
    names = ("streams", "calls", "kept", "connections", "refused", "lost")
    table = Table("phase", *names, box=None, header_style="bold")
    for phase, counts in results.items():
        table.add_row(phase, *(str(counts.get(name, 0)) for name in names))
    console.print(table)


def commit_of(name: str) -> str:
    found = subprocess.run(["git", "rev-parse", name], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["upgrade", "rotation", []], help="both without one")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--old", default="HEAD~1", help="the commit that is upgraded")
    parser.add_argument("--new", default="HEAD", help="the commit to which it is upgraded, and that rotates")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    console, old, new = Console(), commit_of(options.old), commit_of(options.new)
    results: dict[str, Any] = {"streams": options.streams, "old": old, "new": new}
    noticed: list[str] = []
    for part in options.parts or ("upgrade", "rotation"):
        results[part], failures = asyncio.run(run(part, old, new, options.streams))
        show(console, results[part])
        noticed += failures
    for failure in noticed[:50]:
        console.print(failure, soft_wrap=True)
    if not options.no_record:
        console.print(f"Record: {write_record('maintenance', results)}", soft_wrap=True)
    if noticed:
        sys.exit(1)


if __name__ == "__main__":
    main()
