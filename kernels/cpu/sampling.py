"""The C library's operations of sampling (sample.c, masks.c) on tensors.

The operations have checked the arguments. As in ops.py, each returns None for those that C cannot take.
"""

from torch import Tensor, float32, float64, get_num_threads, int64

from pilotlight.kernels.cpu import library as cpu
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.sampling.sampling_scale import PIECE


def argmax(library: Library, logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the ids [rows] int64 and values [rows] of the highest logits of logits [rows, vocab] fp32."""
    if logits.dtype != float32 or logits.stride(1) != 1 or logits.data_ptr() & 3:
        return None
    rows, vocab = logits.shape
    ids, tops = logits.new_empty((rows,), dtype=int64), logits.new_empty((rows,))
    library.sampling.argmax(
        logits.data_ptr(), ids.data_ptr(), tops.data_ptr(), rows, vocab, logits.stride(0), get_num_threads()
    )
    return ids, tops


def sampling_sums(logits: Tensor, tops: Tensor, scale: Tensor, floor: Tensor) -> Tensor | None:
    """Return int64 sums of weights [rows, pieces], one per PIECE vocabulary entries.

    logits [rows, vocab] fp32, tops [rows] fp32, scale [rows] float64, floor [rows] int64, all contiguous.
    """
    if cpu.loaded is None or not logits.is_cpu or logits.data_ptr() & 3:
        return None
    rows, vocab = logits.shape
    sums = logits.new_empty((rows, -(-vocab // PIECE)), dtype=int64)
    cpu.loaded.sampling.sampling_sums(
        logits.data_ptr(), tops.data_ptr(), scale.data_ptr(), floor.data_ptr(), sums.data_ptr(), rows, vocab, logits.stride(0), get_num_threads()
    )  # fmt: skip
    return sums


def philox_uniform(library: Library, seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor:
    """Return float64 [rows] random numbers for int64 [rows] arguments."""
    words = [part.contiguous() for part in (seed_low, seed_high, position)]
    numbers = position.new_empty(position.shape, dtype=float64)
    library.sampling.philox_uniform(*(part.data_ptr() for part in words), numbers.data_ptr(), len(numbers))
    return numbers


def mask_(library: Library, logits: Tensor, rows: Tensor, bits: Tensor) -> bool | None:
    """Forbid tokens as kernels/sampling/masks.py does; return True when done."""
    if logits.dtype != float32 or not rows.is_contiguous() or not all(0 <= row < len(logits) for row in rows.tolist()):
        return None
    library.mask_logits(
        logits.data_ptr(), rows.data_ptr(), bits.data_ptr(), len(rows), logits.shape[1], bits.shape[1], get_num_threads()
    )  # fmt: skip
    return True
