"""Check that all values of a tensor are finite.

Every load checks gigabytes of weights; on a CPU the C library reads them once, without a copy.
"""

import torch

from pilotlight.kernels.cpu import library

# Eight-bit types have no infinity. For each type, a mask, and the value of a masked NaN.
_NAN_CODES = {torch.float8_e4m3fn: (0x7F, 0x7F), torch.float8_e8m0fnu: (0xFF, 0xFF)}


def is_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point():
        return True
    if values.dtype in _NAN_CODES:
        return bool(total_of(values).isfinite())
    loaded = library.loaded if values.is_cpu else None
    if loaded is not None and values.dtype in loaded.is_finite and values.is_contiguous():
        return bool(loaded.is_finite[values.dtype](values.data_ptr(), values.numel()))
    return bool(total_of(values).isfinite()) or bool(values.isfinite().all())


def total_of(values: torch.Tensor) -> torch.Tensor:
    """Return a sum that is NaN or infinite if any value is, without waiting for the device.

    A sum of finite values is finite unless it overflows. bf16 has fp32's range, so its sum needs no fp32 copy of the tensor.
    """
    if not values.is_floating_point():
        return values.new_zeros((), dtype=torch.float32)
    if values.dtype in _NAN_CODES:
        mask, code = _NAN_CODES[values.dtype]
        has_nan = (values.view(torch.uint8) & mask == code).any()
        return torch.zeros((), device=values.device).masked_fill_(has_nan, torch.nan)
    return values.sum() if values.dtype == torch.bfloat16 else values.sum(dtype=torch.float32)
