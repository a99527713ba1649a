"""A model on a GPU: cold starts, a long prefix from host memory, many requests at once.

Measures the five cold-start clocks. The many requests also run with transformers' continuous batching:

    python -m load_tests.scenarios.gpu_serving --shape 8b
    python -m load_tests.scenarios.gpu_serving --rehearse    on a CPU, a small shape, and a record only under $OUT

Each row is written as soon as it is measured. Imports nothing that a bare GPU machine lacks; without transformers its row has the error.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from load_tests import page_cache
from load_tests.random_checkpoint import SHAPES, write
from load_tests.records import write_record

SUBJECT = "gpu-serving"  # the record's subject, to which the shape is appended
_IN_MEMORY = Path("/dev/shm")


class Child:
    """A model_process; use as a context manager."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.started = time.perf_counter()
        words = [sys.executable, "-m", "load_tests.model_process", str(directory), json.dumps(config)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()

    def wait_ready(self) -> Self:
        self.ready = self.ready or self._answer()
        return self

    def ask(self, name: str, *numbers: int) -> dict[str, Any]:
        """Send a command; return the answer and the seconds it took."""
        assert self._process.stdin is not None
        began = time.perf_counter()
        self._process.stdin.write(" ".join([name, *map(str, numbers)]) + "\n")
        self._process.stdin.flush()
        self.wait_ready()
        answer = self._answer()
        return {**answer, "waited_s": time.perf_counter() - began}

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with the model ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Serving:
    def __init__(self, directory: Path, device: str, sizes: dict[str, int], scratch: Path) -> None:
        self._directory = directory
        self._sizes = sizes
        self._scratch = scratch
        self._config = {"device": device, "kv_bytes": sizes["kv_bytes"], "max_num_seqs": sizes["sequences"]}
        self._files = sorted(directory.glob("*.safetensors"))

    def cold(self, in_page_cache: bool) -> dict[str, Any]:
        """Measure a start from nothing, up to a first token."""
        if in_page_cache:
            page_cache.warm(self._files)
        share = page_cache.cached_share(self._files) if in_page_cache else page_cache.drop(self._files)
        with Child(self._directory, self._config) as child:
            answer = child.ask("load")
            return {**answer, "ms": 1e3 * (time.perf_counter() - child.started), "cached_share": share, **child.ready}  # type: ignore[dict-item]

    def wake(self) -> dict[str, Any]:
        """Measure a wake in a standby that expects the model, from host memory, and again after an eviction."""
        weights_file = self._scratch / "weights"
        config = self._config | {"weights_file": str(weights_file)}
        with Child(self._directory, config) as writer:
            first = writer.ask("load")
        with Child(self._directory, config | {"is_standby": True}) as child:
            child.wait_ready()
            prewarm = child.ask("prewarm")
            registered = child.ask("registered")
            wake = child.ask("load")
            unload = child.ask("unload")
            again = child.ask("load")
        weights_file.unlink(missing_ok=True)
        rates = {"gb_per_s": wake["weights_bytes"] / wake["first_token_s"] / 1e9}
        return {
            "first": first,
            "prewarm": prewarm,
            "registered": registered,
            "wake": wake,
            "make_room": unload,
            "again": again,
            "ms": 1e3 * wake["waited_s"],
            **rates,
        }

    def failover(self) -> dict[str, Any]:
        """Kill a process that holds weights and cache, and measure the takeover by a standby.

        The driver may still be freeing the memory of the killed process.
        """
        page_cache.warm(self._files)
        weights_file = self._scratch / "weights"
        config = self._config | {"weights_file": str(weights_file)}
        with (
            Child(self._directory, config) as serving,
            Child(self._directory, config | {"is_standby": True}) as standby,
        ):
            serving.ask("load")
            standby.wait_ready()
            standby.ask("prewarm")
            standby.ask("registered")
            serving.kill()
            answer = standby.ask("load")
        weights_file.unlink(missing_ok=True)
        return {**answer, "ms": 1e3 * answer["waited_s"]}

    def prefix(self) -> dict[str, Any]:
        """Load a prompt's evicted blocks from host memory; compare with computing the prompt."""
        folder = self._scratch / "tier"
        tier = {"kv_host_dir": str(folder), "kv_host_bytes": self._sizes["kv_bytes"], "max_num_seqs": 4}
        length = self._sizes["prefix"]
        with Child(self._directory, self._config | tier) as child:
            child.ask("load")
            child.ask("generate", 1, length, 1, 1)
            computed = child.ask("generate", 1, length, 1, 2)
            stored = child.ask("store")
            child.ask("unload")
            child.ask("load")
            restored = child.ask("generate", 1, length, 1, 2)
            cached = child.ask("generate", 1, length, 1, 2)
        shutil.rmtree(folder, ignore_errors=True)
        return {"tokens": length, "computed": computed, "stored": stored, "restored": restored, "on_device": cached}

    def batching(self) -> dict[str, Any]:
        """Answer many requests at once, end to end."""
        number, length, tokens = self._sizes["sequences"], self._sizes["prompt"], self._sizes["answer"]
        with Child(self._directory, self._config) as child:
            child.ask("load")
            child.ask("generate", number, length, tokens, 1)  # a first run records the graphs
            answer = child.ask("generate", number, length, tokens, 2)
        return {"sequences": number, "prompt": length, **answer, "tokens_per_s": answer["tokens"] / answer["taken_s"]}

    def transformers(self) -> dict[str, Any]:
        """Measure the same requests with transformers' continuous batching, in a separate process."""
        numbers = [str(self._sizes[name]) for name in ("sequences", "prompt", "answer")]
        device = self._config["device"]
        words = [sys.executable, "-m", "load_tests.transformers_batching", str(self._directory), str(device), *numbers]
        done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
        if done.returncode:
            return {"absent": (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]}
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=None)
    parser.add_argument(
        "--budget-s", type=float, default=120.0, help="limit in seconds; later rows are recorded as not reached"
    )
    parser.add_argument("--folder", type=Path, help="folder on a disk for the checkpoint; a temporary one if unset")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("There is no CUDA device here; --rehearse tries the command on the CPU.", file=sys.stderr)
        return 3
    shape = options.shape or ("50m" if options.rehearse else "8b")
    sizes = {"kv_bytes": 16 << 30, "sequences": 64, "prompt": 512, "answer": 128, "prefix": 10_000}
    if options.rehearse:
        sizes = {"kv_bytes": 256 << 20, "sequences": 4, "prompt": 64, "answer": 8, "prefix": 1000}
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
        )
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory = write(folder / shape, SHAPES[shape])
        serving = Serving(directory, "cpu" if options.rehearse else "cuda", sizes, scratch)
        return run(shape, serving, options.budget_s if not options.rehearse else 1e9, options.rehearse)


def run(shape: str, serving: Serving, budget_s: float, rehearses: bool) -> int:
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "a: nothing runs, not in the page cache": lambda: serving.cold(in_page_cache=False),
        "b: nothing runs, in the page cache": lambda: serving.cold(in_page_cache=True),
        "c, d: asleep in host memory, and where another must make room": serving.wake,
        "e: killed, and a standby takes over": serving.failover,
        "a prefix out of host memory": serving.prefix,
        "many requests at once": serving.batching,
        "the same by transformers": serving.transformers,
    }
    results: dict[str, Any] = {"shape": shape, "rows": {}}
    end, failed, path = time.monotonic() + budget_s, False, None
    for name, measure in rows.items():
        try:
            row = measure() if time.monotonic() < end else {"absent": "not reached in time"}
        except Exception as error:  # any error: the other rows are measured all the same
            row, failed = {"failure": f"{type(error).__name__}: {error}"[:300]}, True
        results["rows"][name] = row
        print(f"{name:<62} {line(row)}", flush=True)
        if not rehearses or os.environ.get("OUT"):
            path = write_record(f"{SUBJECT}-{shape}", results, ("torch", "triton", "transformers"))
    if path is not None:
        print(f"Record: {path}")
    return int(failed)


def line(row: dict[str, Any]) -> str:
    if problem := row.get("failure") or row.get("absent"):
        return str(problem)
    if "ms" in row:
        return f"{row['ms']:10,.0f} ms" + (f"  {row['gb_per_s']:.1f} GB/s" if "gb_per_s" in row else "")
    if "restored" in row:
        parts = (f"{name} {1e3 * row[name]['first_token_s']:,.0f} ms" for name in ("computed", "restored", "on_device"))
        return "  ".join(parts)
    return f"{row['tokens_per_s']:10,.0f} tokens/s"


if __name__ == "__main__":
    sys.exit(main())
