"""Start times of other servers with cached files, for comparison with clock (b) of cold.py.

Measured from the command to the first answer of one token, with the checkpoint's files in the page cache. A server that is not in the folder that
`make peers` filled is skipped, with a message. Uses only commands and OpenAI's chat path.
"""

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from load_tests.local_network import free_ports
from load_tests.peers.gguf_file import write_gguf
from load_tests.records import spread

GGUF = ".gguf"
_TIMEOUT_S = 600.0
_ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}


class Peer(NamedTuple):
    command: list[str]
    model: str  # the model's name in its requests
    environment: Mapping[str, str] = MappingProxyType({})


def measure_peers(
    folder: Path, checkpoint: Path, threads: int | None, rounds: int, llama_flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the start time of each peer in milliseconds; for a GGUF file, only of llama.cpp."""
    results: dict[str, Any] = {}
    peers: dict[str, Callable[[Path, Path, int | None], Peer]] = {"llama.cpp": partial(_llama, flags=llama_flags)}
    if checkpoint.suffix != GGUF:
        peers |= {"vllm": _vllm, "transformers": _transformers}
    for name, find in peers.items():
        try:
            results[name] = {
                "ms": spread(
                    [_start(find(folder, checkpoint, threads), folder / f"cold-{name}.log") for _ in range(rounds)], 1
                )
            }
        except RuntimeError as error:
            results[name] = {"absent": str(error)}
    return results


def _llama(folder: Path, checkpoint: Path, threads: int | None, flags: Sequence[str]) -> Peer:
    program = next(iter(folder.glob("llama/*/vendor/llama.cpp/build/bin/llama-server")), None)
    package = next(iter(folder.glob("llama/*/vendor/llama.cpp/gguf-py")), None)
    if program is None or package is None:
        raise RuntimeError("not set up; run: make peers")
    is_gguf = checkpoint.suffix == GGUF
    model = checkpoint if is_gguf else write_gguf(folder / "gguf" / checkpoint.name, package, checkpoint)
    limit = [] if threads is None else ["-t", str(threads)]
    return Peer([str(program), "-m", str(model), "--port", "PORT", *limit, *flags], "any")


def _vllm(folder: Path, checkpoint: Path, threads: int | None) -> Peer:
    python = folder / "vllm" / "bin" / "python"
    if not python.exists():
        raise RuntimeError("not set up; run: make peers")
    # vLLM's own command asks for package metadata that the CPU build has under another name.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--port", "PORT", "--max-model-len", "2048", "--enforce-eager"]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(threads or 2) - 1}", "VLLM_CPU_KVCACHE_SPACE": "2"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return Peer(command, str(checkpoint), environment)


def _transformers(folder: Path, checkpoint: Path, threads: int | None) -> Peer:
    program = folder / "transformers" / "bin" / "transformers"
    if not program.exists():
        raise RuntimeError("not set up; run: make peers")
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return Peer([str(program), "serve", "--port", "PORT"], str(checkpoint), limit)


def _start(peer: Peer, log: Path) -> float:
    """Start a server; return the milliseconds until its first answer.

    Raises RuntimeError if it exits, or does not answer in time.
    """
    (port,) = free_ports(1)
    command = [str(port) if part == "PORT" else part for part in peer.command]
    with log.open("wb") as sink:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env={**os.environ, **peer.environment}, start_new_session=True
        )
    try:
        while True:
            answer = _ask(port, {**_ASKED, "model": peer.model})
            if answer is not None and answer[0] == 200:
                return 1e3 * (time.perf_counter() - began)
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}; see {log.name}")
            if time.perf_counter() - began > _TIMEOUT_S:
                raise RuntimeError(f"no answer within {_TIMEOUT_S:g} s; see {log.name}")
            if answer is not None and answer[0] not in (404, 500, 503):
                raise RuntimeError(f"it answers {answer[0]}: {answer[1][:200]!r}")
            time.sleep(0.01)
    finally:
        _end(process)


def _ask(port: int, body: dict[str, Any]) -> tuple[int, bytes] | None:
    """Send a request; return status and body, or None if the server does not listen yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a server with the workers it has started: they are in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
