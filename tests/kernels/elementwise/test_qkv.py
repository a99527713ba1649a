"""The step between projection and attention equals its parts, also with a norm in a wider type; the catalogue tests the rest."""

import pytest
import torch

from pilotlight.kernels.elementwise.kv_write import kv_write
from pilotlight.kernels.elementwise.norm import head_rms_norm
from pilotlight.kernels.elementwise.qkv import rotate_and_cache
from pilotlight.kernels.elementwise.rotary import rotary
from tests.closeness import assert_close


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 64, 16), (6, 3, 10, 5), (5, 1, 42, 4)]
)
def test_queries_turn_and_keys_and_values_reach_their_slots(
    heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    tokens, dtype = 23, torch.bfloat16
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.rand(tokens, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    norm = torch.randn(heads + kv_heads, head_dim)
    arena = torch.zeros(8, 2, 2, block_size, kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(8 * block_size)[:tokens]

    qk = qkv[:, : heads + kv_heads]
    expected_qk = rotary(head_rms_norm(qk, norm, 1e-5), cos, sin)
    assert expected_qk.dtype == dtype
    expected = arena.clone()
    kv_write(expected_qk[:, heads:], qkv[:, heads + kv_heads :], expected[:, 1, 0], expected[:, 1, 1], slots)

    q = rotate_and_cache(qkv.clone(), norm, 1e-5, cos, sin, arena[:, 1, 0], arena[:, 1, 1], slots)
    assert_close("queries", expected_qk[:, :heads], q, 4e-3)
    assert_close("cache", expected, arena, 4e-3)
    assert torch.equal(arena == 0, expected == 0), "only the slots are written"
