"""Runs code that computes with tensors without tensors: on the meta device, pretending to be on CUDA, so that operations take the form that a GPU
gets and their launches are noted. Needs no GPU, and the GPU that is there learns nothing of it.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from kernels.triton.jit import Launch


class PretendTensor(torch.Tensor):
    """Shape, strides and type alone."""

    is_cuda = True


class _Pretending(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _pretending(function(*args, **(kwargs or {})))


def pretend(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    return _pretending(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def rehearse(run: Callable[[], object]) -> "list[Launch]":
    """The launches that `run` makes with tensors that are pretended."""
    from kernels.triton.jit import noting

    with torch.inference_mode(), noting() as launches, _Pretending():
        run()
    return launches


def _pretending(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.as_subclass(PretendTensor) if result.device.type == "meta" else result
    if type(result) in (tuple, list):
        return type(result)(map(_pretending, result))
    return result
