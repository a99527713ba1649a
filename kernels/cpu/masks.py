"""The C library's token mask (masks.c) on tensors; returns None as in ops.py."""

from torch import Tensor, float32, get_num_threads, int32, int64

from pilotlight.kernels.cpu.c_library import Library


def mask_(library: Library, logits: Tensor, rows: Tensor, bits: Tensor) -> bool | None:
    """Forbid tokens as kernels/sampling/masks.py does; return True when done."""
    if not (
        logits.ndim == bits.ndim == 2
        and rows.ndim == 1
        and bits.shape[0] == rows.shape[0]
        and (logits.dtype, rows.dtype, bits.dtype) == (float32, int64, int32)
        and logits.is_contiguous()
        and rows.is_contiguous()
        and bits.is_contiguous()
        and rows.is_cpu
        and bits.is_cpu
        and all(0 <= row < len(logits) for row in rows.tolist())
    ):
        return None
    library.mask_logits(
        logits.data_ptr(), rows.data_ptr(), bits.data_ptr(), len(rows), logits.shape[1], bits.shape[1], get_num_threads()
    )  # fmt: skip
    return True
