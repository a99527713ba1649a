"""Block copies as copies of words: a program moves some tokens of one head of a plane."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.jit import jit

_TOKENS = 16
_WORDS = 256  # of a token's head, a step
_WORD = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@jit(of_batch=("blocks", "num_tokens"))
def _copy(
    arena, blocks, buffer, num_tokens, words, block_size, its_size, its_heads,
    arena_block, arena_plane, arena_head, arena_token, buffer_block, buffer_head, buffer_token,
    INTO_ARENA: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1)  # a head of a plane: they are evenly spaced in the buffer
    from_plane = row // its_heads * arena_plane + row % its_heads * arena_head
    is_token = token < num_tokens
    block = tl.load(blocks + token // block_size, mask=is_token, other=0)
    there = block * arena_block + from_plane + token % block_size * arena_token
    here = token // its_size * buffer_block + row * buffer_head + token % its_size * buffer_token
    for start in range(0, words, WORDS):
        word = start + tl.arange(0, WORDS)
        both = is_token[:, None] & (word < words)[None, :]
        in_arena = arena + there[:, None] + word[None, :]
        in_buffer = buffer + here[:, None] + word[None, :]
        if INTO_ARENA:
            tl.store(in_arena, tl.load(in_buffer, mask=both), mask=both)
        else:
            tl.store(in_buffer, tl.load(in_arena, mask=both), mask=both)


def gather_blocks(arena: Tensor, blocks: Tensor, buffer: Tensor, first_head: int = 0) -> None:
    """Compute as kernels/block_copy.py."""
    _run(arena, blocks, buffer, first_head, into_arena=False)


def scatter_blocks(arena: Tensor, blocks: Tensor, buffer: Tensor, first_head: int = 0) -> None:
    _run(arena, blocks, buffer, first_head, into_arena=True)


def _run(arena: Tensor, blocks: Tensor, buffer: Tensor, first_head: int, into_arena: bool) -> None:
    planes, its_heads, block_size, its_size = arena.shape[1], buffer.shape[2], arena.shape[3], buffer.shape[3]
    num_tokens = min(len(blocks) * block_size, buffer.shape[0] * its_size)
    if not num_tokens:
        return
    head_bytes = arena.shape[4] * arena.element_size()
    word = next(size for size in _WORD if head_bytes % size == 0)
    there = arena[:, :, first_head:].view(_WORD[word])
    here = buffer.view(_WORD[word])
    _copy[(triton.cdiv(num_tokens, _TOKENS), planes * its_heads)](
        there, blocks, here, num_tokens, head_bytes // word, block_size, its_size, its_heads,
        there.stride(0), there.stride(1), there.stride(2), there.stride(3), here.stride(0), here.stride(2), here.stride(3),
        INTO_ARENA=into_arena, TOKENS=_TOKENS, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip
