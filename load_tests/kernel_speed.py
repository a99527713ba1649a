"""The speed of one call of an operation, after its result is checked against its formula in fp64.

It is timed beside torch's own functions and compared with its floor: the time for the bytes that the call must read and write and the products it
must compute, at the ceilings that this device reached in the same run. Arguments exist in several copies, so that no call finds its own in the cache.
Independent of the operation.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from load_tests.catalogue.operation import (
    Arguments,
    Case,
    Cost,
    Operation,
    Target,
    copied,
    in_double,
    tensors,
)
from load_tests.ceilings import NAMES
from load_tests.tables.kernels import OURS
from load_tests.timing import Contender, Work, take_turns

_MOST_ROUNDS = 50
_MOST_COPIES = 64
_GPU_CALLS = 20  # fewest calls in one graph: events have a resolution of 0.5 us, and some kernels take 5 us
# Assumed size of the last cache if the system reports none. Copies must be at least twice as large.
CPU_CACHE = 32 << 20
# Elements checked at once. With a formula's fp64 intermediate results, each element takes about 80 bytes.
PART = {"cpu": 1 << 22, "cuda": 1 << 28}
Limits = dict[str, float]


class WrongError(Exception):
    """Raised if a result differs from its formula: a wrong operation is not timed."""


def measure(
    operation: Operation,
    case: Case,
    device: torch.device,
    limits: Limits,
    share_s: float,
    most_copies: int = _MOST_COPIES,
) -> dict[str, Any]:
    dtype = storage_type(operation, device)
    torch.manual_seed(0)
    # The CPU is torch's default device, and torch.device's context would add a measurable microsecond to each of torch's calls.
    with torch.device(device) if device.type == "cuda" else nullcontext():
        arguments = case.make(dtype)
        cost = operation.cost(arguments)
        error = checked(operation, copied(arguments), dtype)
        copies = [copied(arguments) for _ in range(min(most_copies, num_copies(arguments, device)))]
        contenders, absent = {OURS: Contender(device, calls(operation.function, copies, device))}, {}
        for name, rival in operation.rivals.items():
            try:
                contenders[name] = Contender(device, calls(rival, copies, device))
            except Exception as refusal:  # the rival cannot do this call on this device; the table shows the reason
                absent[name] = f"{type(refusal).__name__}: {refusal}".splitlines()[0][:150]
        timed = take_turns(contenders, share_s, _MOST_ROUNDS)
    medians_us = {name: 1e6 * statistics.median(times.times_s) for name, times in timed.items()}
    return {
        "operation": operation.name,
        "case": case.name,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": cost.bytes,
        "flops": cost.flops,
        "error_of_explained": error,
        "copies": len(copies),
        "forms": {
            name: {
                "us": medians_us[name], "min_us": 1e6 * min(times.times_s), "max_us": 1e6 * max(times.times_s), "n": len(times.times_s),
                "timed": times.how,
            }
            for name, times in timed.items()
        },
        "absent": absent,
        **held_against(cost, case.target, medians_us, limits, dtype),
    }  # fmt: skip


def storage_type(operation: Operation, device: torch.device) -> torch.dtype:
    """Return bf16 on a GPU, as models compute there, and fp32 on a CPU, if the operation takes it."""
    wanted = torch.bfloat16 if device.type == "cuda" else torch.float32
    return wanted if wanted in operation.dtypes else operation.dtypes[0]


def held_against(
    cost: Cost, target: Target | None, medians_us: dict[str, float], limits: Limits, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the floor, the rates, and whether the target is met."""
    of = target.of if target is not None else "copy"
    bandwidth = limits["read_gb_per_s" if of == "read" else "copy_gb_per_s"] * 1e3  # bytes per microsecond
    # a rehearsal measures only fp32
    matmul = limits.get(f"{NAMES[dtype]}_tflop_per_s", limits["fp32_tflop_per_s"]) * 1e6
    by_bytes, by_flops = cost.bytes / bandwidth, cost.flops / matmul
    ours, floor = medians_us[OURS], max(by_bytes, by_flops)
    result: dict[str, Any] = {
        "predicted_us": floor,
        "bound": "memory" if by_bytes >= by_flops else "matmul",
        "gb_per_s": cost.bytes / ours / 1e3,
        "tflop_per_s": cost.flops / ours / 1e6,
        "share_of_floor": floor / ours,
        "target": None,
    }
    if target is not None:
        result["target"] = target._asdict()
        rivals = [us for name, us in medians_us.items() if name != OURS]
        bounds = {"read": by_bytes, "copy": by_bytes, "matmul": by_flops, "rival": min(rivals, default=math.nan)}
        reached = bounds[of] / ours
        result["share_reached"] = None if target.us or math.isnan(reached) else reached
        result["met"] = ours <= target.us if target.us else None if math.isnan(reached) else reached >= target.share
    return result


def checked(operation: Operation, arguments: Arguments, dtype: torch.dtype) -> float:
    """Return the largest error among the results, as a share of the error that rounding explains.

    Raises WrongError if it is larger than 1.
    """
    kept = copied(arguments) if operation.changes or operation.scratch else arguments
    results = operation.results(operation.function, arguments)
    largest = 0.0
    for part, cut in _parts(operation, kept):
        wanted = operation.results(operation.reference, in_double(part))
        if wanted.keys() != results.keys():
            raise WrongError(f"gives {sorted(results)}, its formula {sorted(wanted)}")
        for name, expected in wanted.items():
            actual = cut(name, results[name])
            if not expected.is_floating_point():
                if not torch.equal(actual, expected):
                    raise WrongError(f"{name} differs from the result of its formula")
                continue
            error, explained = relative_error(expected, actual), operation.tolerance(dtype, actual.dtype)
            if not error <= explained:
                raise WrongError(f"{name} is {error:.3g} off, {explained:.3g} is explained")
            largest = max(largest, error / explained if explained else 0.0)
    return largest


def _parts(operation: Operation, arguments: Arguments) -> Iterator[tuple[Arguments, Callable[[str, Tensor], Tensor]]]:
    """Yield the call for the formula, in parts small enough for double precision if it can be cut.

    Each part comes with a function that cuts a result in the same way.
    """
    elements = sum(x.numel() for x in tensors(arguments))
    rows = arguments[operation.rows[0]].shape[0] if operation.rows else 0
    pieces = min(rows, -(-elements // PART[tensors(arguments)[0].device.type])) if rows else 1
    step = -(-rows // pieces) if rows else 0
    for piece in range(max(1, pieces)):
        mine = slice(piece * step, (piece + 1) * step) if pieces > 1 else slice(None)
        part = {name: value[mine] if name in operation.rows else value for name, value in arguments.items()}
        yield part, partial(_cut, mine, operation.changes)


def _cut(rows: slice, whole: tuple[str, ...], name: str, result: Tensor) -> Tensor:
    return result if name in whole or rows == slice(None) else result[rows]


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Return the root-mean-square error over the expected root mean square; NaN if the result has NaN."""
    if expected.shape != actual.shape:
        raise WrongError(f"has shape {tuple(actual.shape)}, its formula's result {tuple(expected.shape)}")
    if not expected.numel():
        return 0.0
    error = (expected - actual.double()).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt().clamp(min=1e-12))


def num_copies(arguments: Arguments, device: torch.device) -> int:
    num_bytes = max(1, sum(x.untyped_storage().nbytes() for x in tensors(arguments)))
    if device.type != "cuda":
        return max(2, min(_MOST_COPIES, -(-2 * CPU_CACHE // num_bytes)))
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free, _ = torch.cuda.mem_get_info(device)
    wanted = max(2, min(_MOST_COPIES, -(-2 * cache // num_bytes)))
    return max(1, min(wanted, int(free / 3 / num_bytes)))


def calls(form: Callable[..., Any], copies: list[Arguments], device: torch.device) -> list[Work]:
    """Return calls that use another copy each time.

    The first runs at once, so that a call that cannot run raises here.
    """
    form(**copies[0])
    rounds = -(-_GPU_CALLS // len(copies)) if device.type == "cuda" else 1
    return [partial(form, **arguments) for _ in range(rounds) for arguments in copies]
