"""The step between projection and attention, against its parts."""

import pytest
import torch

from kernels.kv_write import kv_write
from kernels.norm import head_rms_norm
from kernels.qkv import rotate_and_cache
from kernels.rotary import rotary
from tests.closeness import assert_close


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 64, 16), (6, 3, 10, 5), (5, 1, 42, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 23])
def test_queries_turn_and_keys_and_values_reach_their_slots(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None,
) -> None:
    if norm_dtype is torch.bfloat16 and dtype is torch.float32:
        pytest.skip("weights are never narrower than what they multiply")
    ratio = 1e-6 if dtype is torch.float32 else 4e-3
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.rand(tokens, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    norm = None if norm_dtype is None else torch.randn(heads + kv_heads, head_dim).to(norm_dtype)
    arena = torch.zeros(8, 2, 2, block_size, kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(8 * block_size)[:tokens]

    qk = qkv[:, : heads + kv_heads]
    expected_qk = rotary(qk if norm is None else head_rms_norm(qk, norm, 1e-5), cos, sin)
    expected = arena.clone()
    kv_write(expected_qk[:, heads:], qkv[:, heads + kv_heads :], expected[:, 1, 0], expected[:, 1, 1], slots)

    q = rotate_and_cache(qkv.clone(), norm, 1e-5, cos, sin, arena[:, 1, 0], arena[:, 1, 1], slots)
    assert_close("queries", expected_qk[:, :heads], q, ratio)
    assert_close("cache", expected, arena, ratio)
    assert torch.equal(arena == 0, expected == 0), "only the slots are written"
