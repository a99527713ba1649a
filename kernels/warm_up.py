"""What a model will launch, traced and compiled before it is launched, in threads, while its weights stream.

A trace runs code that computes with tensors on the meta device that claim to be on CUDA, so that operations take the form that a GPU gets: it needs
no GPU, and leaves one that is there alone. What is compiled lies in Triton's cache on disk (TRITON_CACHE_DIR, by default in the user's cache folder),
keyed by source, signature and architecture: the next start finds it there. Knows launches; refuses to know models.
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

_MAX_THREADS = 16  # the assembler, half of the time, is a process of its own; the rest shares one interpreter


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
    """A tensor without memory that operations take for one on a CUDA device."""
    return _faked(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def distinct(launches: "Iterable[Launch]") -> "list[Launch]":
    """One launch of each variant."""
    return list({launch.variant: launch for launch in launches}.values())


def compile_launches(launches: "Iterable[Launch]", device: torch.device | None = None) -> WarmUp:
    """Compile, and load onto `device`, a CUDA device; None: compile for whatever Triton's driver says."""
    began = time.perf_counter()
    variants = distinct(launches)
    # One of each function before the others: Triton makes its tables for a function at the first, and for two at once it would make them twice.
    firsts = {id(launch.function): launch for launch in reversed(variants)}.values()
    others = [launch for launch in variants if all(launch is not first for first in firsts)]

    def compile_one(launch: "Launch") -> None:
        if device is not None:
            torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
        kernel = launch.function.warmup(*launch.arguments, grid=(1, 1, 1), **launch.options)
        if device is not None:
            assert kernel.run is not None  # which loads it onto the device, and builds what launches it

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="triton") as pool:
        for some in (firsts, others):
            for _ in pool.map(compile_one, some):
                pass
    return WarmUp(len(variants), time.perf_counter() - began)


class _FakeCudaTensor(torch.Tensor):
    """Shape, strides and type alone."""

    is_cuda = True
    # The mode below is enough, at half the price.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _FakingMeta(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _faked(function(*args, **(kwargs or {})))


def _faked(result: Any) -> Any:
    """`result` with its tensors on the meta device made fake ones of CUDA."""
    if isinstance(result, torch.Tensor):
        return result.as_subclass(_FakeCudaTensor) if result.device.type == "meta" else result
    if type(result) in (tuple, list):
        return type(result)(map(_faked, result))
    return result
