"""The sizes of launches, and their limits."""

from functools import cache

import torch
import triton

from pilotlight.kernels.checks import ArgumentError

_MOST = 65535  # most programs in a grid's second or third dimension; the first takes 2**31 - 1
_OF_H100 = 132  # streaming multiprocessors of an H100 or an H200
LONGEST_ROW = 1 << 16  # most values in a row that one program keeps in registers: 128 for each of 512 threads


def check_launch(operation: str, argument: str, count: int, things: str, most: int = _MOST) -> None:
    if count > most:
        raise ArgumentError(operation, argument, f"has {count} {things}, and a launch takes at most {most}")


def warps_for(block: int) -> int:
    """Return the warps for a row of `block` values in one program: 8 values per thread, 1 to 16 warps."""
    return min(16, max(1, block // 256))


def heads_per_program(heads: int, pairs: int) -> int:
    """Return the number of heads for a program of two warps, over rows of `pairs` pairs of values.

    A thread has 8 pairs: 16 bytes of each half.
    """
    return max(1, min(triton.next_power_of_2(heads), 512 // max(1, pairs)))


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors.

    Under the interpreter, return a number that leads to several splits. For meta tensors, return the number of the device that they represent, since
    splits determine which variants are needed.
    """
    if device.type == "cpu":
        return 8
    if device.type == "meta" and not torch.cuda.is_available():
        return _OF_H100
    return torch.cuda.get_device_properties(None if device.type == "meta" else device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    """True if the device has the tensor cores of Hopper, as the H100 and H200 do, or is the interpreter."""
    if device.type == "cpu" or (device.type == "meta" and not torch.cuda.is_available()):
        return True
    return torch.cuda.get_device_capability(None if device.type == "meta" else device)[0] == 9


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, columns], copied if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()
