"""Whether all values of a tensor on a CPU are numbers. Weights of gigabytes are asked at every load: the C library reads them once, with no copy."""

import torch

from kernels.cpu import library


def are_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point():
        return True
    loaded = library.loaded
    if loaded is not None and values.dtype in loaded.are_finite and values.is_contiguous():
        return bool(loaded.are_finite[values.dtype](values.data_ptr(), values.numel()))
    # The sum is finite when every value is, or nearly always. bf16 has fp32's range, and its sum needs no fp32 copy of the tensor.
    total = values.sum() if values.dtype == torch.bfloat16 else values.sum(dtype=torch.float32)
    return bool(total.isfinite()) or bool(values.isfinite().all())
