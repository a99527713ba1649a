"""Tables of the fastest form of a product on a device, by its sizes, and their measurement.

A device's table is shipped in kernels/tuned/, or is in the user's cache, which takes precedence. cuBLAS computes sizes that no table has. `tune` runs
in a command: no request waits for a measurement.
"""

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.kernels.dispatch import triton_form
from pilotlight.kernels.matrices.weight import plain_operands
from pilotlight.kernels.warm_up import compile_launches, fake_tensor, trace_launches

log = logging.getLogger(__name__)

MOST_TOKENS = 8  # rows of x; with more, cuBLAS's tiles are full enough
_VERSION = 1  # version of a choice's meaning
_SHIPPED = Path(__file__).parent / "tuned"
_LEAST_GAIN = 1.03  # below it a choice is noise
_L2_BYTES = 256 << 20  # total size of copies of a weight, larger than any cache


class Sizes(NamedTuple):
    """The sizes of a product x [tokens, columns] with a weight [rows, columns].

    `tokens` is a class, as returned by `tokens_class`.
    """

    tokens: int
    rows: int
    columns: int


class SplitKTile(NamedTuple):
    """A tile of the split-K product in kernels/triton/matrices/linear.py."""

    tokens: int
    rows: int
    half: int
    warps: int
    splits: int


Table = dict[Sizes, SplitKTile]
# Seconds of one of several equal calls, each on other memory.
Clock = Callable[[Sequence[Callable[[], object]]], float]


def best_tile(tokens: int, rows: int, columns: int, device: torch.device) -> SplitKTile | None:
    """Return the measured tile for a product, or None to use cuBLAS."""
    if tokens > MOST_TOKENS:
        return None
    return _table_of(device).get(Sizes(tokens_class(tokens), rows, columns))


def tokens_class(tokens: int) -> int:
    """Return the number of tokens rounded up to 1, 2, 4 or 8."""
    return 1 << (tokens - 1).bit_length()


@cache
def _table_of(device: torch.device) -> Table:
    name = device_name(device)
    for folder in (_user_folder(), _SHIPPED):
        file = folder / f"{name}.json"
        if file.exists():
            return read_table(file)
    return {}


def device_name(device: torch.device) -> str:
    """Return the name of a device for its file, such as nvidia-h200."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def read_table(file: Path) -> Table:
    """Read a table. An unreadable one counts as empty, with a warning: that only costs speed."""
    try:
        content = json.loads(file.read_bytes())
        if content["version"] != _VERSION:
            log.warning("%s is of another version (%s) and is not used; tune again", file, content["version"])
            return {}
        return {Sizes(*map(int, key.split())): SplitKTile(*map(int, value)) for key, value in content["gemv"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is not a table of measurements and is not used: %r", file, error)
        return {}


def write_table(file: Path, table: Table, facts: dict[str, Any]) -> None:
    """Write a table. `facts` are the machine and the time of the measurement."""
    rows = {" ".join(map(str, sizes)): list(chosen) for sizes, chosen in sorted(table.items())}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"version": _VERSION, **facts, "gemv": rows}, indent=1) + "\n")
    unfinished.replace(file)


class TunedProduct(NamedTuple):
    sizes: Sizes
    cublas_s: float
    tile: SplitKTile | None  # the fastest correct tile that beats cuBLAS, if any
    tile_s: float


def tune(
    shapes: Iterable[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock | None = None,
    until: float = math.inf,
) -> Iterator[TunedProduct]:
    """Measure every (rows, columns) of a weight with every number of tokens.

    No measurement starts at or after `until`, in time.monotonic's seconds.
    """
    form = triton_form("matrices.linear")
    if form is None and device.type == "cuda":
        raise RuntimeError("tuning needs Triton: install pilotlight-inference[gpu]")
    wanted = list(shapes)
    if device.type == "cuda":
        compile_launches(trace_launches(lambda: _run_all(wanted, dtype)), device)
    for rows, columns in wanted:
        weights = _weights(rows, columns, device, dtype)
        tokens = 1
        while tokens <= MOST_TOKENS and time.monotonic() < until:
            yield _fastest(Sizes(tokens, rows, columns), weights, clock or _cuda_seconds)
            tokens *= 2


def chosen(measured: Iterable[TunedProduct]) -> Table:
    return {one.sizes: one.tile for one in measured if one.tile is not None}


def save(table: Table, device: torch.device, facts: dict[str, Any]) -> Path:
    """Add `table` to the one in the user's cache, for the next process, and return its file."""
    file = _user_folder() / f"{device_name(device)}.json"
    write_table(file, (read_table(file) if file.exists() else {}) | table, facts)
    return file


def candidates(sizes: Sizes) -> list[SplitKTile]:
    """Return the tiles to try: up to 4 tokens without tensor cores, and with them 16 rows.

    Without tensor cores, a thread has sums of at most 64 values.
    """
    found = []
    for splits in (1, 2, 4, 8):
        if sizes.columns < 256 * splits:
            continue
        if sizes.tokens <= 4:
            for rows in (4, 8, 16, 32):
                for half in (128, 256, 512):
                    for warps in (2, 4, 8):
                        if 8 <= rows * half // (32 * warps) <= 64 and 2 * half * splits <= max(sizes.columns, 256):
                            found.append(SplitKTile(sizes.tokens, rows, half, warps, splits))
        found += [SplitKTile(16, rows, 64, 4, splits) for rows in (16, 32, 64)]
    return found


def run(chosen: SplitKTile, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    from pilotlight.kernels.triton.matrices import linear as form  # imported here, because Triton may be missing

    tile = form.Tile(chosen.tokens, chosen.rows, chosen.half, chosen.warps, 3)
    result: torch.Tensor = form.product(x, plain_operands(weight), bias, tile, chosen.splits)
    return result


def _fastest(sizes: Sizes, weights: list[torch.Tensor], clock: Clock) -> TunedProduct:
    x = torch.randn(sizes.tokens, sizes.columns, device=weights[0].device).to(weights[0].dtype)
    expected = F.linear(x.double(), weights[0].double())
    largest_error = 4 * torch.finfo(x.dtype).eps * expected.square().mean().sqrt()
    cublas_s = clock([partial(F.linear, x, weight) for weight in weights])
    best, best_s = None, cublas_s / _LEAST_GAIN
    for candidate in candidates(sizes):
        error = (run(candidate, x, weights[0]).double() - expected).square().mean().sqrt()
        if not bool(error <= largest_error):
            log.error("%s is wrong for %s: error %.3g", candidate, sizes, error.item())
            continue
        seconds = clock([partial(run, candidate, x, weight) for weight in weights])
        if seconds < best_s:
            best, best_s = candidate, seconds
    return TunedProduct(sizes, cublas_s, best, best_s if best is not None else cublas_s)


def _run_all(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
    """Launch every candidate once, for a trace."""
    for rows, columns in shapes:
        weight = fake_tensor((rows, columns), dtype)
        for tokens in (1, 2, 4, 8):
            for candidate in candidates(Sizes(tokens, rows, columns)):
                run(candidate, fake_tensor((tokens, columns), dtype), weight)


def _weights(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return enough copies of a weight that none is in a cache at its turn."""
    one = torch.randn(rows, columns, device=device).mul_(columns**-0.5).to(dtype)
    copies = 1 if device.type != "cuda" else max(2, -(-_L2_BYTES // max(1, one.numel() * one.element_size())))
    return [one, *(one.clone() for _ in range(copies - 1))]


def _cuda_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median time of many replays of a graph of all copies' calls.

    Launched one by one from Python, calls would take as long as their launches.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(12):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3 / len(calls))
    return statistics.median(times[2:])


def _user_folder() -> Path:
    try:
        cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return _SHIPPED
    return cached / "pilotlight" / "tuned"
