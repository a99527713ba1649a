"""What adapters cost: a decode step whose sequences have different ones beside one without, and a site with a thousand of them under Zipf's traffic.

    python -m load_tests.scenarios.adapters              some six minutes, with a record in load_tests/results/
    python -m load_tests.scenarios.adapters --rehearse   a small shape and a few seconds: shows that the command works; a record only under $OUT

Steps of all kinds take turns, so that each is compared with the one before it. The site's adapters share a few files of weights by links, and
differ by their scale: to the site they are a thousand, each with its own digest, and the disk has to hold a few.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch
from safetensors.torch import save_file

from load_tests.client import StreamTimes, stream_chat
from load_tests.engine_speed import BLOCK_SIZE, DECODE_CONTEXT, SHAPES, compute, decode_step, make_model
from load_tests.random_checkpoint import Shape, write
from load_tests.records import percentiles, spread, write_record
from load_tests.site_process import SiteProcess
from pilotlight.engine.adapters.bank import AdapterBank
from pilotlight.engine.adapters.content import SlotContent, make_content
from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS, AdaptedProjection, AdapterDescription, projection_key
from pilotlight.engine.core.step import StepInput
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.weights.shard import MatrixPart
from pilotlight.kernels.cpu import library

SUBJECT = "adapters"
BATCH, RANK, SLOTS = 16, 16, 16
ATTENTION = ("q_proj", "v_proj")
FILES = 20  # of weights
CLIENTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 16
CHECKPOINTS = {"0.5b": Shape(1024, 4096, 28, 16, 8, 64), "tiny": Shape(64, 128, 2, 4, 2, 16)}


class Kind(NamedTuple):
    """A kind of step: which of its sequences have adapters, and on which projections."""

    name: str
    slots: tuple[int, ...]  # of each sequence, -1: none
    targets: tuple[str, ...] | None = None  # None: all


KINDS = (
    Kind("none", (-1,) * BATCH),
    Kind("16 of all projections", tuple(range(BATCH))),
    Kind("16 of queries and values", tuple(range(BATCH)), ATTENTION),
    Kind("one for all, of all projections", (0,) * BATCH),
    Kind("8 of all projections, 8 without", tuple(i if i % 2 else -1 for i in range(BATCH))),
    Kind("1 of all projections, 15 without", (0,) + (-1,) * (BATCH - 1)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=90.0, help="of traffic, with adapters and without")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    shape = "tiny" if options.rehearse else "0.5b"
    rounds, seconds = (3, 3.0) if options.rehearse else (options.rounds, options.seconds)
    library.start(wait=True)
    results: dict[str, Any] = {"shape": shape, "batch": BATCH, "rank": RANK, "slots": SLOTS}
    results["decode"] = decode(SHAPES[shape], rounds)
    for row in results["decode"]:
        print(
            f"{row['kind']:36} {row['step_ms']['median']:8.2f} ms  {row['of_none']['median']:.3f} of the speed without"
        )
    results["site"] = asyncio.run(traffic(CHECKPOINTS[shape], 40 if options.rehearse else options.adapters, seconds))
    print(json.dumps(results["site"], indent=2))
    if not options.rehearse or os.environ.get("OUT"):
        print(f"Record: {write_record(SUBJECT, results)}")
    return 0 if results["site"]["with"]["failed"] == 0 else 1


@torch.inference_mode()
def decode(config: DenseConfig, rounds: int) -> list[dict[str, Any]]:
    """Time steps of each kind in turn; a ratio is of two steps of one round."""
    runner, projections = _runner(config)
    blocks = -(-(DECODE_CONTEXT + 1) // BLOCK_SIZE)
    plain = decode_step([list(range(i * blocks, (i + 1) * blocks)) for i in range(BATCH)], DECODE_CONTEXT + 1)
    times: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    for kind in KINDS:
        _place(runner, projections, kind.targets)
        for _ in range(6):
            compute(runner, _with(plain, kind.slots))  # recorded, and settled
    load_ms = []
    for _ in range(rounds):
        for targets in (None, ATTENTION):
            load_ms += _place(runner, projections, targets)
            for kind in KINDS:
                if kind.targets == targets or kind.name == "none":
                    compute(runner, _with(plain, kind.slots))
                    began = time.perf_counter()
                    compute(runner, _with(plain, kind.slots))
                    times[kind.name].append(time.perf_counter() - began)
    beside: dict[tuple[str, ...] | None, list[float]] = {
        None: times["none"][::2],
        ATTENTION: times["none"][1::2],
    }  # the steps without, by what the slots held
    rows = []
    for kind in KINDS:
        without = beside[kind.targets]
        taken = without if kind.name == "none" else times[kind.name]
        ratios = [a / b for a, b in zip(without, taken, strict=True)]
        rows.append({"kind": kind.name, "step_ms": spread([1e3 * s for s in taken]), "of_none": spread(ratios)})
    rows[0]["load_ms"] = spread(load_ms)  # from host memory to a slot
    return rows


def _runner(config: DenseConfig) -> tuple[ModelRunner, Sequence[MatrixPart]]:
    device, dtype = torch.device("cpu"), torch.bfloat16
    model, layout, kv_cache = make_model(config, device, dtype, BATCH * (DECODE_CONTEXT + 2 * BLOCK_SIZE))
    bank = AdapterBank(model.projections, dtype, device, SLOTS)
    return ModelRunner(model, layout, kv_cache, adapters=bank), model.projections


def _place(runner: ModelRunner, projections: Sequence[MatrixPart], targets: tuple[str, ...] | None) -> list[float]:
    """Fill all slots; return the milliseconds of each."""
    content = _content(projections, targets)
    taken = []
    for slot in range(SLOTS):
        began = time.perf_counter()
        runner.place_adapter(slot, content)
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


_contents: dict[tuple[str, ...] | None, SlotContent] = {}


def _content(projections: Sequence[MatrixPart], targets: tuple[str, ...] | None) -> SlotContent:
    if targets not in _contents:
        wanted = [part for part in projections if targets is None or part.name.endswith(targets)]
        tensors: dict[str, torch.Tensor] = {}
        described: dict[str, AdaptedProjection] = {}
        for part in wanted:
            rows, columns = part.rows.total, part.columns.total
            a, b = f"{part.name}.lora_A.weight", f"{part.name}.lora_B.weight"
            tensors |= {a: torch.randn(RANK, columns) * 0.02, b: torch.randn(rows, RANK) * 0.02}
            described[projection_key(part.name)] = AdaptedProjection(a, b, RANK, rows, columns, 1.0)
        _contents[targets] = make_content(AdapterDescription(RANK, 0, described), tensors, projections, torch.bfloat16)
    return _contents[targets]


def _with(step: StepInput, slots: tuple[int, ...]) -> StepInput:
    from array import array

    return step._replace(adapter_slots=array("q", slots) if max(slots) >= 0 else None)


async def traffic(shape: Shape, number: int, seconds: float) -> dict[str, Any]:
    """Ask a site for adapters by Zipf's law, and before that for the model itself."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-") as folder:
        model = {"name": "m", "source": str(write(Path(folder) / "model", shape)), "adapters_dir": f"{folder}/adapters"}
        write_adapters(Path(folder) / "adapters", shape, number)
        engine = {"device": "cpu", "kv_gib": 0.5, "adapter_slots": SLOTS, "standby": False}
        with SiteProcess("ams1", engine, [model]) as site:
            site.ask({"model": "m", "prompt": "Hello", "max_tokens": 4})
            url = f"http://127.0.0.1:{site.port}"
            without = await ask(url, ["m"], [1.0], seconds)
            before = counted(site)
            weights = [1 / (i + 1) for i in range(number)]
            found = await ask(url, [f"m:a{i}" for i in range(number)], weights, seconds)
            loads = counted(site) - before
    return {
        "adapters": number,
        "clients": CLIENTS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "without": without,
        "with": found | {"loads": loads, "loads_per_s": round(loads / found["seconds"], 2)},
    }


async def ask(url: str, models: list[str], weights: list[float], seconds: float) -> dict[str, Any]:
    """Let some clients ask, each its next question when the last is answered."""
    draw, answered, asked = random.Random(1), list[StreamTimes](), set[str]()
    began = time.monotonic()

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() - began < seconds:
            (model,) = draw.choices(models, weights)
            asked.add(model)
            text = " ".join(draw.choices(["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"], k=PROMPT_TOKENS // 2))
            body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
            answered.append(await stream_chat(session, url, body | {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    taken = time.monotonic() - began
    good = [times for times in answered if times.finished and times.error is None]
    return {
        "seconds": round(taken, 2),
        "requests": len(answered),
        "failed": len(answered) - len(good),
        "errors": sorted({str(times.error) for times in answered if times.error})[:3],
        "models": len(asked),
        "requests_per_s": round(len(good) / taken, 2),
        "ttft_ms": percentiles([1e3 * times.ttft_s for times in good if times.ttft_s is not None]),
        "tpot_ms": spread([_tpot_ms(times) for times in good]),
    }


def _tpot_ms(times: StreamTimes) -> float:
    return 1e3 * statistics.fmean([times.e2el_s - (times.ttft_s or 0.0)]) / (OUTPUT_TOKENS - 1)


def write_adapters(directory: Path, shape: Shape, number: int) -> None:
    """Write adapters of queries and values as PEFT does."""
    sizes = {"q_proj": shape.heads * shape.head_dim, "v_proj": shape.kv_heads * shape.head_dim}
    for i in range(number):
        folder = directory / f"a{i}"
        folder.mkdir(parents=True)
        if i < FILES:
            tensors = {}
            for layer in range(shape.layers):
                for name, rows in sizes.items():
                    prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                    tensors[f"{prefix}.lora_A.weight"] = (torch.randn(RANK, shape.hidden) * 0.02).bfloat16()
                    tensors[f"{prefix}.lora_B.weight"] = (torch.randn(rows, RANK) * 0.02).bfloat16()
            save_file(tensors, folder / WEIGHTS)
        else:
            os.link(directory / f"a{i % FILES}" / WEIGHTS, folder / WEIGHTS)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16 + i / 1000, "target_modules": list(sizes)}
        (folder / CONFIG).write_text(json.dumps(config))


def counted(site: SiteProcess) -> int:
    """Return how many adapters the site has put into slots."""
    lines = [line for line in site.text("/metrics").splitlines() if line.startswith("pilotlight_adapter_loads_total{")]
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
