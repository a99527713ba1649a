"""Compilation of a model's kernels before their first launch, in threads, while its weights load.

A trace runs code with meta tensors that claim to be on CUDA, so that operations take the form for GPUs: it needs no GPU, and does not touch an
existing one. Compiled code is in Triton's cache on disk (TRITON_CACHE_DIR, by default in the user's cache folder), keyed by source, signature and
architecture: the next start finds it there. This module knows launches, and is independent of models.
"""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from pilotlight.kernels.triton.jit import Launch

# Most threads that compile. More gain little: half of the time is the assembler, a separate process, and the rest shares one interpreter.
_MAX_THREADS = 16


class WarmUp(NamedTuple):
    num_variants: int
    took_s: float


def trace_launches(run: Callable[[], object]) -> "list[Launch]":
    """Return the launches that `run` makes with fake tensors."""
    from pilotlight.kernels.triton.jit import tracing

    with torch.inference_mode(), tracing() as launches, _FakingMeta():
        run()
    return launches


def fake_tensor(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory that operations treat as one on a CUDA device."""
    return _faked(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def distinct(launches: "Iterable[Launch]") -> "list[Launch]":
    """Return one launch of each variant."""
    return list({launch.variant: launch for launch in launches}.values())


def compile_launches(launches: "Iterable[Launch]", device: torch.device | None = None) -> WarmUp:
    """Compile the launches and load them onto `device`, a CUDA device.

    With None, compile for Triton's default target.
    """
    began = time.perf_counter()
    variants = distinct(launches)
    # One launch of each function is compiled before the other launches: Triton creates its tables for a function at the first launch, and two threads
    # would create them twice.
    firsts = {id(launch.function): launch for launch in reversed(variants)}.values()
    others = [launch for launch in variants if all(launch is not first for first in firsts)]

    def compile_one(launch: "Launch") -> None:
        if device is not None:
            torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
        kernel = launch.function.warmup(*launch.arguments, grid=(1, 1, 1), **launch.options)
        if device is not None:
            assert kernel.run is not None  # this access loads the kernel onto the device and builds its launcher

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="triton") as pool:
        for some in (firsts, others):
            for _ in pool.map(compile_one, some):
                pass
    return WarmUp(len(variants), time.perf_counter() - began)


class _FakeCudaTensor(torch.Tensor):
    """A tensor on the meta device, with shape, strides and type only, that claims to be on CUDA."""

    is_cuda = True
    # The mode below handles all calls; a handler of the class would double the cost.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _FakingMeta(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _faked(function(*args, **(kwargs or {})))


def _faked(result: Any) -> Any:
    """Return `result` with its meta tensors replaced by fake CUDA tensors."""
    if isinstance(result, torch.Tensor):
        return result.as_subclass(_FakeCudaTensor) if result.device.type == "meta" else result
    if type(result) in (tuple, list):
        return type(result)(map(_faked, result))
    return result
