"""llama.cpp's server for a GGUF file, with its defaults, for the same requests as a site of ours."""

import http.client
import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from load_tests.local_network import free_ports

_STARTS_WITHIN_S = 120.0
_ANSWERS_WITHIN_S = 600.0


def find_program(peers: Path, name: str) -> Path | None:
    """Return a program of llama.cpp under the folder that `make peers` filled; None if it is not there."""
    return next(iter(peers.glob(f"llama/*/vendor/llama.cpp/build/bin/{name}")), None)


class LlamaServer:
    """A server in a `with` statement. Raises RuntimeError if it ends or does not answer in time."""

    def __init__(self, program: Path, model: Path, threads: int, log: Path, flags: Sequence[str] = ()) -> None:
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [str(program), "-m", str(model), "-t", str(threads), "--port", str(self._port), *flags]
        self._log = log

    def __enter__(self) -> "LlamaServer":
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(self._command, stdout=sink, stderr=sink)
        try:
            self._wait()
        except RuntimeError:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWERS_WITHIN_S)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
            return response.status, answer
        finally:
            connection.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._process.returncode}; its log is {self._log}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server is not ready after {_STARTS_WITHIN_S:g} s; its log is {self._log}")
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
