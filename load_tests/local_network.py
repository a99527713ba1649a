"""LocalNetwork: `pilotlight up` as a user runs it, on free ports, for scenarios and tests.

Uses only the command, its output and /status, no internals.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from types import TracebackType

import psutil

from pilotlight.wire.hop.status import SiteStatus, decode_status

ROOT = Path(__file__).parents[1]
READY = "Pilotlight is ready: "
# All clients of a measurement share one address, so its limits are raised.
DOOR = "\n[door]\nmax_connections_per_client = 20_000\nmax_open_per_client = 20_000\n"


class LocalNetwork:
    """A context manager around one `pilotlight up`.

    `ready_s` is the time from its start to its ready line.
    """

    def __init__(
        self,
        start_timeout_s: float = 120.0,
        environment: dict[str, str] | None = None,
        *,
        tree: Path = ROOT,
        num_sites: int | None = None,
        network_settings: str = "",
        site_settings: str = "",
        engine_settings: str = "",
        model: str | None = None,
    ) -> None:
        """Describe the network to run.

        `tree`: the checkout that is run. `num_sites`: how many of its shipped sites are used, all by default. `network_settings`: TOML that is
        appended to the network's file. `site_settings`: TOML that is appended to every site's file; ROUTER in it is replaced with the router's URL.
        `engine_settings`: lines for the engine table of every site's file; they replace those of the same keys. `model`: replaces the models in all
        sites' files.
        """
        self._model = model
        self._tree, self._num_sites = tree, num_sites
        self._network_settings, self._site_settings = network_settings, site_settings
        self._engine_settings = engine_settings
        self._start_timeout_s = start_timeout_s
        self._environment = environment or {}
        self.output: list[str] = []
        self.url = ""
        self.ready_s = 0.0
        self.site_urls: dict[str, str] = {}

    def __enter__(self) -> "LocalNetwork":
        self._folder = tempfile.TemporaryDirectory(prefix="pilotlight-")
        folder = Path(self._folder.name)
        router_port = self._write_files(folder)
        command = [
            sys.executable,
            "-m",
            "pilotlight.runtime.cli.commands",
            "up",
            "--network",
            str(folder / "network.toml"),
            "--sites",
            str(folder),
            *(() if self._model is None else ("--model", self._model)),
        ]
        started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._tree,
            env={**start_environment(), "XDG_STATE_HOME": str(folder), **self._environment},
        )  # fmt: skip
        try:
            self._wait_until_ready(router_port)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.ready_s = time.perf_counter() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._folder.cleanup()

    def site_status(self, name: str) -> SiteStatus:
        import urllib.request

        with urllib.request.urlopen(f"{self.site_urls[name]}/status", timeout=10) as answer:
            return decode_status(answer.read())

    def pid(self, name: str, role: str = "site") -> int:
        return next(process.pid for process in self.site_status(name).processes if process.role == role)

    def processes(self) -> list[psutil.Process]:
        """Return all processes that `pilotlight up` has started, engine hosts included."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def log_file(self, name: str) -> Path:
        return Path(self._folder.name) / "pilotlight" / "logs" / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text(errors="replace")

    def _write_files(self, folder: Path) -> int:
        """Write the shipped files with free ports; return the router's port."""
        sites_folder = self._tree / "sites"
        shipped = [sites_folder / "network.toml", *sorted((sites_folder / "local").glob("*.toml"))]
        texts = {path.name: path.read_text() for path in shipped}
        ports = [tomllib.loads(text)["listen"]["port"] for text in texts.values()]
        fresh = dict(zip(ports, free_ports(len(ports)), strict=True))
        for file_name, text in texts.items():
            for port, replacement in fresh.items():
                text = text.replace(f"port = {port}", f"port = {replacement}").replace(f":{port}", f":{replacement}")
            if file_name == "network.toml":
                head, *sites = text.split("\n[[sites]]\n")
                text = "\n[[sites]]\n".join([head, *sites[: self._num_sites]]) + DOOR + self._network_settings
            else:
                for key in tomllib.loads(self._engine_settings):
                    text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
                text = text.replace("[engine]\n", f"[engine]\n{self._engine_settings}\n")
                text += self._site_settings.replace("ROUTER", f"http://127.0.0.1:{fresh[ports[0]]}")
            (folder / file_name).write_text(text)
        network = tomllib.loads((folder / "network.toml").read_text())
        self.site_urls = {site["name"]: site["url"] for site in network["sites"]}
        return int(fresh[ports[0]])

    def _wait_until_ready(self, router_port: int) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + self._start_timeout_s
        for line in self.process.stdout:  # `up` has a time limit for starting, so this loop ends
            self.output.append(line.rstrip("\n"))
            if line.startswith(READY):
                self.url = line.removeprefix(READY).strip()
                assert self.url.endswith(f":{router_port}")
                return
            if time.monotonic() > deadline:
                break
        raise RuntimeError("pilotlight up did not become ready:\n" + "\n".join(self.output))


def start_environment() -> dict[str, str]:
    """Return this process's environment with bytecode files enabled.

    Installed packages, such as the peers', have them. Without them each start would compile the modules again.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def free_ports(count: int) -> list[int]:
    """Return ports that are free now; all are held until the last is found, so that they differ."""
    held = [socket.socket() for _ in range(count)]
    try:
        for probe in held:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in held]
    finally:
        for probe in held:
            probe.close()
