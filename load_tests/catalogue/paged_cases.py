"""Sequences scattered over a paged cache, for the cases of every attention.

Memory that must not affect a result is poisoned: unused blocks and other layers hold NaN, and the rest of a sequence's last block holds numbers far
larger than any key (these are finite, as in the real arena, because torch multiplies before it masks).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pilotlight.kernels.attention.fp8_cache import FP8
from pilotlight.kernels.attention.varlen import VarlenBatch

_LOUD = 300.0  # size of the numbers that must not affect a result: below FP8's largest value


class Paged(NamedTuple):
    k_cache: Tensor  # [num_blocks, block_size, kv_heads, head_dim], strided
    v_cache: Tensor
    block_tables: Tensor  # [seqs, max_blocks] int64, padded with each sequence's own first block
    context_lens: Tensor  # [seqs] int64


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    by_token: bool = False  # all heads of a token are adjacent in a block; else all tokens of a head are

    def __str__(self) -> str:
        order = ", by token" if self.by_token else ""
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, blocks of {self.block_size}{order}"


def paged(lens: tuple[int, ...], heads: Heads, dtype: torch.dtype, layers: int = 2, in_order: bool = False) -> Paged:
    """Return views of the last of `layers` layers. For an FP8 cache pass FP8 as `dtype`."""
    tables, num_blocks = block_tables(lens, heads.block_size, in_order)
    arena = empty_arena(num_blocks, layers, heads, dtype).fill_(torch.nan)
    written = arena.view(torch.uint8) if dtype == FP8 else arena  # torch cannot index FP8 tensors, but bytes
    for table, length in zip(tables, lens, strict=True):
        used = table[: -(-length // heads.block_size)]
        content = torch.randn(len(used), *arena.shape[2:])
        content[-1, :, length - (len(used) - 1) * heads.block_size :] = _LOUD
        written[used, -1] = content.to(dtype).view(written.dtype)
    return Paged(arena[:, -1, 0], arena[:, -1, 1], tables, torch.tensor(lens, dtype=torch.int64))


def empty_arena(num_blocks: int, layers: int, heads: Heads, dtype: torch.dtype) -> Tensor:
    """Return [num_blocks, layers, 2, block_size, kv_heads, head_dim] in the memory order of `heads`."""
    _, kv_heads, head_dim, block_size, by_token = heads
    if by_token:
        return torch.empty((num_blocks, layers, 2, block_size, kv_heads, head_dim), dtype=dtype)
    return torch.empty((num_blocks, layers, 2, kv_heads, block_size, head_dim), dtype=dtype).transpose(3, 4)


def block_tables(lens: tuple[int, ...], block_size: int, in_order: bool = False) -> tuple[Tensor, int]:
    """Return the tables and the number of blocks, three of them unused."""
    counts = [-(-length // block_size) for length in lens]
    num_blocks = sum(counts) + 3
    order = torch.arange(num_blocks) if in_order else torch.randperm(num_blocks)
    tables = order.new_empty((len(lens), max(counts, default=0)))
    for row, own in zip(tables, torch.split(order[: sum(counts)], counts), strict=True):
        row[: len(own)] = own
        row[len(own) :] = own[0]
    return tables, num_blocks


def varlen(
    tables: Tensor, q_lens: tuple[int, ...], lens: tuple[int, ...], images: tuple[tuple[int, int, int], ...] = ()
) -> VarlenBatch:
    """`images`: (sequence, start, end) of the images whose tokens see each other."""
    starts = torch.tensor((0, *q_lens)).cumsum(0).int()
    batch = VarlenBatch(tables, starts, torch.tensor(lens, dtype=torch.int32), q_lens, lens)
    if not images:
        return batch
    ahead = [torch.arange(n - m, n, dtype=torch.int32) for m, n in zip(q_lens, lens, strict=True)]
    for i, start, end in images:
        ahead[i][(ahead[i] >= start) & (ahead[i] < end)] = end - 1
    return batch._replace(last_visible=torch.cat(ahead))


def gathered(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the cached values [length, ...] of one sequence."""
    return cache[table[: -(-length // cache.shape[1])]].flatten(0, 1)[:length]
