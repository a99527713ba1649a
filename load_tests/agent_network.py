"""A router and sites for coding agents.

Their engines are real, or write the answers of a script (tests/scripted_site.py).
"""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, Self

from load_tests.agents import MODEL
from load_tests.local_network import ROOT, free_ports
from load_tests.random_checkpoint import EMBER
from load_tests.site_process import site_file
from pilotlight.wire.hop.headers import HOP_SECRET_ENV

STARTS_WITHIN_S = 300.0  # on a busy machine a real model takes minutes
SCRIPTED_ENGINE = {"standby": False, "weights_host_gib": 0.0}


class Answered(NamedTuple):
    """A request as the router logs it when it has ended."""

    method: str
    path: str
    status: int  # 0 if the agent disconnected before an answer started


class AgentNetwork:
    """A router, and sites that serve one model as `agent`; a context manager."""

    def __init__(self, folder: Path, sites: tuple[str, ...], source: Path, engine: dict[str, Any]) -> None:
        self._folder, self._sites = folder, sites
        self._source, self._engine = source, engine
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ, HOP_SECRET_ENV: secrets.token_hex(32), "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def __enter__(self) -> Self:
        router, *ports = free_ports(1 + len(self._sites))
        self.url = f"http://127.0.0.1:{router}"
        place = 'place = { city = "here", latitude = 0.0, longitude = 0.0 }\n'
        network = f"listen = {{ port = {router} }}\n{place}[telemetry]\nlog_format = 'json'\naccess_log = true\n"
        for name, port in zip(self._sites, ports, strict=True):
            network += f'\n[[sites]]\nname = "{name}"\nurl = "http://127.0.0.1:{port}"\n{place}'
            model = {"name": MODEL, "source": str(self._source)}
            (self._folder / f"{name}.toml").write_text(site_file(name, port, self._engine, [model]))
        (self._folder / "network.toml").write_text(network)
        self._start("router", "pilotlight.edge_router", self._folder / "network.toml")
        try:
            self.mend()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def mend(self) -> None:
        """Start the sites that are not running, and wait until the router uses all of them."""
        for name in self._sites:
            if name not in self._processes or self._processes[name].poll() is not None:
                self._start_site(name, self._folder / f"{name}.toml")
        deadline = time.monotonic() + STARTS_WITHIN_S
        while self._healthy() < len(self._sites):
            if time.monotonic() > deadline:
                raise RuntimeError("the sites did not become healthy; their logs are in " + str(self._folder))
            time.sleep(0.1)

    def answered(self) -> list[Answered]:
        """Return the requests that have ended, from the router's log."""
        lines = (self._folder / "router.log").read_text(errors="replace").splitlines()
        logged = [json.loads(line) for line in lines if '"pilotlight.access"' in line]
        return [Answered(line["method"], line["path"], line["status"]) for line in logged]

    def _start_site(self, name: str, file: Path) -> None:
        self._start(name, "pilotlight.runtime", file)

    def _healthy(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return len(json.load(answer)["healthy"])
        except OSError:
            return 0

    def _start(self, name: str, module: str, *arguments: Path) -> None:
        with (self._folder / f"{name}.log").open("ab") as sink:
            command = [sys.executable, "-m", module, *map(str, arguments)]
            self._processes[name] = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=sink, stderr=sink)


class ScriptedNetwork(AgentNetwork):
    """A router and two sites whose engines write the answers of a script."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ("ams1", "iad1"), EMBER, SCRIPTED_ENGINE)
        self._log, self._script = folder / "log", folder / "script.json"
        self._log.touch()
        self.say(["Hello."])

    def say(self, answers: list[str], *, needs_tools: bool = True, token_s: float = 0.0) -> None:
        """Write the script of the answers from now on."""
        script = {"answers": answers, "aside": "Mending a line", "needs_tools": needs_tools, "token_s": token_s}
        self._script.write_text(json.dumps(script))

    def kill(self, site: str) -> None:
        self._processes[site].kill()
        self._processes[site].wait()

    def noted(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the lines of the engines' log, from number `since`."""
        lines = self._log.read_text().splitlines()[since:]
        return [json.loads(line) for line in lines]

    @property
    def num_noted(self) -> int:
        return len(self._log.read_text().splitlines())

    def _start_site(self, name: str, file: Path) -> None:
        self._start(name, "tests.scripted_site", file, self._script, self._log)
