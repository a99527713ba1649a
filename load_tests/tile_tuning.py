"""Measure the tables of kernels/tuning.py.

A table has the fastest tile for each product of a few rows that beats cuBLAS.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.kernels.dispatch import triton_form
from pilotlight.kernels.tuning import MOST_TOKENS, Sizes, SplitKTile, Table, run
from pilotlight.kernels.warm_up import compile_launches, fake_tensor, trace_launches

log = logging.getLogger(__name__)

_LEAST_GAIN = 1.03  # a smaller gain may be noise
_L2_BYTES = 256 << 20  # total size of copies of a weight, larger than any cache

# Returns the seconds of one of several equal calls, each on different memory.
Clock = Callable[[Sequence[Callable[[], object]]], float]
Product = Callable[[SplitKTile, torch.Tensor, torch.Tensor], torch.Tensor]  # computes x times the weight by a tile


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
    most_tokens: int = MOST_TOKENS,
    run: Product = run,
) -> Iterator[TunedProduct]:
    """Measure every (rows, columns) of a weight with every number of tokens.

    No measurement starts at or after `until`, a time of time.monotonic().
    """
    form = triton_form("matrices.linear")
    if form is None and device.type == "cuda":
        raise RuntimeError("tuning needs Triton: install pilotlight-inference[gpu]")
    wanted = list(shapes)
    if device.type == "cuda":
        compile_launches(trace_launches(lambda: _run_all(wanted, dtype, run)), device)
    for rows, columns in wanted:
        weights = _weights(rows, columns, device, dtype)
        tokens = 1
        while tokens <= most_tokens and time.monotonic() < until:
            yield _fastest(Sizes(tokens, rows, columns), weights, clock or _cuda_seconds, run)
            tokens *= 2


def chosen(measured: Iterable[TunedProduct]) -> Table:
    return {one.sizes: one.tile for one in measured if one.tile is not None}


def candidates(sizes: Sizes) -> list[SplitKTile]:
    """Return the tiles to try.

    For up to 4 tokens they include tiles without tensor cores, in which a thread has 8 to 64 elements. Tiles with tensor cores have 16 token rows.
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


def _fastest(sizes: Sizes, weights: list[torch.Tensor], clock: Clock, run: Product) -> TunedProduct:
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


def _run_all(shapes: Iterable[tuple[int, int]], dtype: torch.dtype, run: Product) -> None:
    """Launch every candidate once, for a trace."""
    for rows, columns in shapes:
        weight = fake_tensor((rows, columns), dtype)
        for tokens in (1, 2, 4, 8):
            for candidate in candidates(Sizes(tokens, rows, columns)):
                run(candidate, fake_tensor((tokens, columns), dtype), weight)


def _weights(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return so many copies of a weight that a copy is no longer in a cache at its next use."""
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
    times: list[float] = []
    for _ in range(12):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3 / len(calls))
    return statistics.median(times[2:])
