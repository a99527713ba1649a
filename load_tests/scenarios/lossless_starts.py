"""The effect of lossless compression of weights on fetched bytes, the first load, and every wake.

It is compared with plain weights, in turns:

    python -m load_tests.scenarios.lossless_starts                 50 million random weights
    python -m load_tests.scenarios.lossless_starts --shape 3b      six gigabytes of them

Plain: `pilotlight pack`, and bf16 weights in memory. Lossless: `pack --lossless`, and matrices in 12 bits in memory. `pilotlight pull` fetches both
over loopback into an empty store; they are loaded from there, and woken from memory that outlives an engine host. Files are in the page cache.
"""

import argparse
import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from load_tests import random_checkpoint
from load_tests.records import spread, write_record
from pilotlight.engine.api.protocol import HostConfig, Lossless, ModelSpec
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.kernels.cpu import library

SUBJECT = "lossless-starts"
_MODES: dict[str, Lossless] = {"plain": "off", "lossless": "always"}
_CONFIG = HostConfig(device="cpu", kv_bytes=256 << 20)
_PILOTLIGHT = (sys.executable, "-m", "pilotlight.runtime.cli.commands")
_MOVE_S = 600.0
_LISTING = "pilotlight-files.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES), default="50m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="folder for checkpoints, with space for five times the largest")
    options = parser.parse_args()
    library.start(wait=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        work = Path(name)
        checkpoint = random_checkpoint.write(work / "random", random_checkpoint.SHAPES[options.shape])
        packed = {mode: _packed(checkpoint, work / mode, mode) for mode in _MODES}
        found: dict[str, dict[str, list[float]]] = {mode: {} for mode in _MODES}
        memory = make_kv_memory(_CONFIG)
        for _ in range(options.rounds):
            for mode in _MODES:
                for key, value in _one_round(packed[mode], mode, memory, work).items():
                    found[mode].setdefault(key, []).append(value)
    results = {
        "shape": options.shape,
        "threads": os.cpu_count(),
        "modes": {mode: {key: spread(values) for key, values in of.items()} for mode, of in found.items()},
    }
    for key in results["modes"]["plain"]:
        plain, lossless = (results["modes"][mode][key]["median"] for mode in _MODES)
        print(f"  {key:<16} plain {plain:>14,.3f}  lossless {lossless:>14,.3f}  {lossless / plain:.3f} of it")
    print(f"Record: {write_record(SUBJECT, results)}")
    return 0


def _packed(checkpoint: Path, into: Path, mode: str) -> Path:
    how = ["--lossless"] if mode == "lossless" else []
    command = [*_PILOTLIGHT, "pack", str(checkpoint), "--dtype", "bfloat16", "--out", str(into), *how]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return into


def _one_round(packed: Path, mode: str, memory: KvMemory, work: Path) -> dict[str, float]:
    store, kept = work / "store", work / "memory"
    kept.mkdir()
    try:
        fetched, wire_bytes, fetch_s = asyncio.run(_fetched(packed, store))
        spec = ModelSpec("m", str(fetched), "bfloat16", weights_file=str(kept / "m.weights"), lossless=_MODES[mode])
        first_s, _ = _loaded(spec, memory)
        wake_s, weights_bytes = _loaded(spec, memory)
    finally:
        shutil.rmtree(store, ignore_errors=True)
        shutil.rmtree(kept)
    return {
        "wire_bytes": wire_bytes, "fetch_s": fetch_s, "first_load_s": first_s, "wake_s": wake_s, "weights_bytes": weights_bytes,
    }  # fmt: skip


def _loaded(spec: ModelSpec, memory: KvMemory) -> tuple[float, float]:
    """Load a model, wait until its weights are kept for the next wake, and close.

    Return the seconds until it could answer, and the bytes of its weights.
    """
    began = time.perf_counter()
    loaded = load_model(spec, _CONFIG, memory)
    took_s = time.perf_counter() - began
    if loaded.under_weights is not None and not loaded.under_weights.wait(_MOVE_S):
        raise RuntimeError("the weights have not moved")
    weights_bytes = loaded.engine.info.weights_bytes
    loaded.close()
    return took_s, weights_bytes


async def _fetched(packed: Path, store: Path) -> tuple[Path, float, float]:
    """Fetch a packed model from a server on loopback.

    Return its folder, the bytes of response bodies, and the seconds, including the command's start.
    """
    digest = hashlib.sha256((packed / _LISTING).read_bytes()).hexdigest()
    async with _serving(packed) as (url, sent):
        began = time.perf_counter()
        command = await asyncio.create_subprocess_exec(
            *_PILOTLIGHT, "pull", f"{url}#sha256={digest}",
            env=os.environ | {"PILOTLIGHT_MODELS": str(store)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        said, _ = await command.communicate()
        if command.returncode:
            raise RuntimeError(f"pilotlight pull ended with {command.returncode}")
        return Path(said.decode().strip()), float(sum(sent)), time.perf_counter() - began


@asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[tuple[str, list[int]]]:
    sent: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.FileResponse(folder / request.match_info["name"])
        await response.prepare(request)
        sent.append(response.content_length or 0)
        return response

    app = web.Application()
    app.router.add_get("/m/{name:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/m", sent
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
