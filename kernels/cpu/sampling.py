"""The C library's part in sampling (sample.c) as functions of tensors: each answers None where the call is not for it, and torch computes instead."""

import torch
from torch import Tensor, get_num_threads

from kernels.cpu import library as cpu


def highest(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """logits [rows, vocab] -> ids [rows] int64, the highest logit of each row [rows]"""
    if cpu.loaded is None or not logits.is_cpu or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    rows, vocab = logits.shape
    if not vocab:
        return None
    ids, tops = logits.new_empty((rows,), dtype=torch.int64), logits.new_empty((rows,))
    cpu.loaded.highest(
        logits.data_ptr(), ids.data_ptr(), tops.data_ptr(), rows, vocab, logits.stride(0), get_num_threads()
    )
    return ids, tops


def sampling_sums(logits: Tensor, tops: Tensor, scale: Tensor, floor: Tensor) -> Tensor | None:
    """logits [rows, vocab], tops [rows] fp32, scale [rows] float64, floor [rows] int64 -> int64 [rows, sums of 1,024]."""
    if (
        cpu.loaded is None
        or not logits.is_cpu
        or logits.dtype != torch.float32
        or logits.stride(1) != 1
        or tops.dtype != torch.float32
        or scale.dtype != torch.float64
        or floor.dtype != torch.int64
        or not (tops.is_contiguous() and scale.is_contiguous() and floor.is_contiguous())
    ):
        return None
    rows, vocab = logits.shape
    sums = logits.new_empty((rows, -(-vocab // 1024)), dtype=torch.int64)
    cpu.loaded.sampling_sums(
        logits.data_ptr(), tops.data_ptr(), scale.data_ptr(), floor.data_ptr(), sums.data_ptr(), rows, vocab, logits.stride(0), get_num_threads()
    )  # fmt: skip
    return sums


def philox_uniform(seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor | None:
    """int64 [rows] each -> float64 [rows]."""
    if cpu.loaded is None or not position.is_cpu:
        return None
    words = [part.contiguous() for part in (seed_low, seed_high, position)]
    numbers = position.new_empty(position.shape, dtype=torch.float64)
    cpu.loaded.philox_uniform(*(part.data_ptr() for part in words), numbers.data_ptr(), len(numbers))
    return numbers
