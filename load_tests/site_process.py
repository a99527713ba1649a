"""SiteProcess: one site as `pilotlight site` runs it, from a generated file, for scenarios.

Uses only the command, /status and /timeline, no internals.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from load_tests.local_network import free_ports, start_environment

ROOT = Path(__file__).parents[1]


class SiteProcess:
    """A site in a `with` statement. `began_s` is the Unix time of its start."""

    def __init__(
        self,
        name: str,
        engine: dict[str, Any],
        models: list[dict[str, Any]],
        *,
        more: str = "",
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """Describe a site without starting it.

        `more` is further text of its file. `host` is the address at which this process reaches it; a site elsewhere than on loopback listens on all
        addresses. `prefix` is a command that runs the site's command, such as nsenter.
        """
        self.name = name
        self.host = host
        self._engine, self._models, self._more = engine, models, more
        self._prefix = prefix
        self._added = environment or {}

    def __enter__(self) -> "SiteProcess":
        self._folder = tempfile.TemporaryDirectory(prefix="pilotlight-")
        folder = Path(self._folder.name)
        (self.port,) = free_ports(1)
        file = folder / f"{self.name}.toml"
        text = site_file(self.name, self.port, self._engine, self._models, self.host)
        file.write_text(text + self._more)
        self._log = folder / "log"
        with self._log.open("wb") as sink:
            self.began_s = time.time()
            command = [*self._prefix, sys.executable, "-m", "pilotlight.runtime", str(file)]
            self.process = subprocess.Popen(command, stderr=sink, cwd=ROOT, env=start_environment() | self._added)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log()[-3000:], file=sys.stderr)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(
        self, body: dict[str, Any], timeout_s: float = 300.0, path: str = "/v1/completions", tenant: str | None = None
    ) -> dict[str, Any]:
        """Send one request as soon as the site listens; return its answer.

        Raises for any status but 200. `tenant`: the client's key for the site.
        """
        status, raw = self._exchange("POST", path, body, timeout_s, tenant)
        if status != 200:
            raise RuntimeError(f"{status}: {raw.decode(errors='replace')[:500]}")
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an answer."""
        status, raw = self._exchange("POST", path, body, timeout_s)
        return status, json.loads(raw)

    def stream(self, body: dict[str, Any], timeout_s: float = 300.0) -> Iterator[float]:
        """Yield the Unix time of every event that carries a part of the answer."""
        connection = self._connected(timeout_s)
        try:
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), _JSON)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read()[:500]!r}")
            for line in answer:
                now = time.time()
                if line.startswith(b'data: {"error"'):
                    raise RuntimeError(line.decode())
                if line.startswith(b"data: {"):
                    yield now
        finally:
            connection.close()

    def get(self, path: str) -> dict[str, Any]:
        _, raw = self._exchange("GET", path, None, 30.0)
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def text(self, path: str) -> str:
        return self._exchange("GET", path, None, 30.0)[1].decode()

    def residency(self, model: str) -> str:
        return str(next(entry["residency"] for entry in self.get("/status")["models"] if entry["name"] == model))

    def pid(self, role: str) -> int | None:
        found = [process["pid"] for process in self.get("/status")["processes"] if process["role"] == role]
        return int(found[0]) if found else None

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {timeout_s:g} s this was still false: {what}:\n{self.log()[-2000:]}")
            time.sleep(0.02)

    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float, tenant: str | None = None
    ) -> tuple[int, bytes]:
        connection = self._connected(timeout_s)
        headers = _JSON if tenant is None else {**_JSON, "authorization": f"Bearer {tenant}"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        """Connect, retrying every few milliseconds until the site listens."""
        deadline = time.monotonic() + timeout_s
        while True:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
            try:
                connection.connect()
                return connection
            except OSError:
                connection.close()
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the site does not listen:\n{self.log()[-2000:]}") from None
                time.sleep(0.005)


_JSON = {"content-type": "application/json"}


def site_file(
    name: str, port: int, engine: dict[str, Any], models: list[dict[str, Any]], host: str = "127.0.0.1"
) -> str:
    lines = [f"name = {json.dumps(name)}", 'place = {city = "here", latitude = 0.0, longitude = 0.0}']
    lines += ["[listen]", f"port = {port}"]
    if host != "127.0.0.1":
        lines += ['host = "0.0.0.0"', "[door]", "open_to_all = true"]
    lines += ["[engine]", *_values({**engine, "hosts": None})]
    for table in engine.get("hosts", ()):
        lines += ["[[engine.hosts]]", *_values(table)]
    for model in models:
        lines += ["[[models]]", *_values(model)]
    return "\n".join(lines) + "\n"


def _values(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None]


def kill(pid: int) -> float:
    """Kill a process with SIGKILL, as the kernel's OOM killer does; return the Unix time."""
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now
