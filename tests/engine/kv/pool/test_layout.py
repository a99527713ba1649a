"""The layout of a block: segments of any shape and type, one after another, and what distinguishes two layouts."""

import pytest
import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.kv.pool.layout import (
    STATE_WINDOW,
    CachedLayer,
    CacheLayout,
    CacheSegment,
    in_fp8,
    keys_and_values,
)
from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.decode_attention import decode_attention
from pilotlight.kernels.attention.fp8_cache import FP8
from pilotlight.kernels.elementwise.kv_write import kv_write
from tests.closeness import assert_close

CPU = torch.device("cpu")
GROUPED = CachedLayer(keys_and_values(2, 6))
LATENT = CachedLayer((CacheSegment("latent", 1, 576),))
IN_FP8 = CachedLayer((CacheSegment("k", 2, 6, FP8, 0.25), CacheSegment("v", 2, 6, FP8, 0.5)))
DRAFT = CachedLayer(keys_and_values(1, 4))


def test_layers_of_all_kinds_share_a_block_and_no_byte() -> None:
    layout = CacheLayout((GROUPED, LATENT, IN_FP8, DRAFT), 5, torch.float32)
    blocks = layout.new_blocks(3, CPU)
    views = [segment for layer in layout.views(blocks) for segment in layer.segments]
    assert [tuple(view.shape) for view in views] == [
        (3, 5, 2, 6), (3, 5, 2, 6), (3, 5, 1, 576), (3, 5, 2, 6), (3, 5, 2, 6), (3, 5, 1, 4), (3, 5, 1, 4),
    ]  # fmt: skip
    assert [view.dtype for view in views] == [torch.float32] * 3 + [FP8] * 2 + [torch.float32] * 2
    for number, view in enumerate(views, 1):
        view.fill_(number)
    assert all((view.float() == number).all() for number, view in enumerate(views, 1))
    least = 5 * 4 * (2 * 12 + 576 + 2 * 4) + 5 * 2 * 12
    assert least <= layout.block_bytes < least + 16 * len(views), "only alignment may add bytes"


def test_a_segment_in_fp8_is_written_and_read_with_its_scales() -> None:
    layout = CacheLayout((GROUPED, IN_FP8), 4, torch.float32)
    plain, packed = layout.views(layout.new_blocks(2, CPU))
    scales = torch.tensor([segment.scale for segment in IN_FP8.segments])
    k, v, q = torch.randn(7, 2, 6), torch.randn(7, 2, 6), torch.randn(1, 4, 6)
    slots = torch.arange(7)
    (k_plain, v_plain), (k_packed, v_packed) = plain.segments, packed.segments
    kv_write(k, v, k_plain, v_plain, slots)
    kv_write(k, v, k_packed, v_packed, slots, scales)
    tables, lens = torch.tensor([[0, 1]]), torch.tensor([7])
    expected = decode_attention(q, k_plain, v_plain, tables, lens, 7, AttentionRule(0.4, None))
    actual = decode_attention(q, k_packed, v_packed, tables, lens, 7, AttentionRule(0.4, None, kv_scales=scales))
    assert_close("o", expected, actual, 0.1)


def test_layouts_are_distinguished_by_all_that_their_bytes_depend_on() -> None:
    layouts = [
        CacheLayout((GROUPED,) * 2, 4, torch.float32),
        CacheLayout((GROUPED,) * 2, 4, torch.bfloat16),
        CacheLayout((GROUPED,) * 2, 8, torch.float32),
        CacheLayout((GROUPED,) * 3, 4, torch.float32),
        CacheLayout((GROUPED, DRAFT), 4, torch.float32),
        CacheLayout((GROUPED, IN_FP8), 4, torch.float32),
        CacheLayout((GROUPED, CachedLayer((CacheSegment("k", 2, 6, FP8, 0.5), IN_FP8.segments[1]))), 4, torch.float32),
    ]
    assert len({layout.identity for layout in layouts}) == len(layouts)
    assert CacheLayout((GROUPED,) * 2, 4, torch.float32).identity == layouts[0].identity


def test_each_stage_detects_stages_that_are_cut_elsewhere() -> None:
    cuts = ([range(2), range(2, 4), range(4, 5)], [range(2), range(2, 3), range(3, 5)])
    layouts = [
        CacheLayout((GROUPED,) * 5, 4, torch.float32, 64, stages, stage) for stages in cuts for stage in range(3)
    ]
    assert len({layout.identity for layout in layouts[:3]} & {layout.identity for layout in layouts[3:]}) == 0


def test_a_blocks_size_is_said_with_its_arithmetic() -> None:
    layout = CacheLayout((GROUPED,) * 3, 4, torch.float32)
    assert layout.block_bytes == 4 * 3 * 2 * 2 * 6 * 4
    assert layout.description == (
        "a block of 4 tokens takes 1152 bytes (3 layers of k 2 x 6 x 4 bytes + v 2 x 6 x 4 bytes)"
    )


def test_layers_that_keep_nothing_take_no_memory() -> None:
    layout = CacheLayout((), 512, torch.float32)
    assert layout.new_blocks(4, CPU).shape == (4, 0)
    assert layout.views(layout.new_blocks(4, CPU)) == []


def test_a_segment_lies_head_by_head_and_a_block_in_one_piece() -> None:
    layout = CacheLayout((GROUPED,) * 2, 4, torch.float32)
    blocks = layout.new_blocks(3, CPU)
    values = layout.views(blocks)[1].segments[1]
    values.copy_(torch.arange(values.numel()).view(values.shape))
    expected = values[2].transpose(0, 1).contiguous().view(-1)
    assert torch.equal(blocks[2].view(torch.float32)[-len(expected) :], expected)


def test_keys_and_values_are_kept_in_fp8_with_the_scales_of_their_layer_and_nothing_else_is() -> None:
    first, second = in_fp8([GROUPED, DRAFT], FP8, {1: (0.5, 0.25)})
    assert [(segment.dtype, segment.scale) for segment in first.segments] == [(FP8, 1.0), (FP8, 1.0)]
    assert [(segment.dtype, segment.scale) for segment in second.segments] == [(FP8, 0.5), (FP8, 0.25)]
    assert [segment.num_heads for segment in (*first.segments, *second.segments)] == [2, 2, 1, 1]
    with pytest.raises(CheckpointError, match="layer 1 caches features, which FP8 does not support"):
        in_fp8([GROUPED, CachedLayer((CacheSegment("features", 1, 40),))], FP8)


def test_latent_vectors_are_kept_in_fp8_and_keys_of_an_index_with_a_scale_each() -> None:
    indexed = CachedLayer((*LATENT.segments, CacheSegment("index", 1, 14)))
    alone, both = in_fp8([LATENT, indexed], FP8, {1: (0.5, 0.25)})
    assert [(segment.dtype, segment.scale) for segment in alone.segments] == [(FP8, 1.0)]
    assert [(segment.dtype, segment.scale) for segment in both.segments] == [(FP8, 0.5), (FP8, 1.0), (None, 1.0)]
    layout = CacheLayout((both,), 16, torch.bfloat16)
    (view,) = layout.views(layout.new_blocks(2, CPU))
    assert [part.dtype for part in view.segments] == [FP8, FP8, torch.float32]
    assert view.segments[2].shape == (2, 16, 1, 1)
    assert view.scales is not None
    assert view.scales.tolist() == [0.5, 1.0]


STATE = CachedLayer.of_state(CacheSegment("delta", 3, 20, is_wide=True), CacheSegment("conv", 1, 42))


def test_a_block_has_one_state_in_fp32_whatever_its_tokens_and_the_caches_type_are() -> None:
    layout = CacheLayout((STATE, GROUPED), 16, torch.bfloat16, 1024)
    state, keys = layout.views(layout.new_blocks(2, CPU))
    assert [tuple(part.shape) for part in state.segments] == [(2, 1, 3, 20), (2, 1, 1, 42)]
    assert [part.dtype for part in state.segments] == [torch.float32, torch.bfloat16]
    assert (state.is_state, state.block_size, keys.is_state) == (True, 16, False)
    assert layout.windows[keys.group] is None
    assert layout.windows[state.group] == STATE_WINDOW


def test_blocks_are_as_long_as_their_snapshots_are_large() -> None:
    def length(numbers: int) -> int:
        state = CachedLayer.of_state(CacheSegment("delta", 1, numbers, is_wide=True))
        return CacheLayout((state, GROUPED), 16, torch.float32).block_size

    token = 2 * 2 * 6 * 4  # bytes of keys and values
    assert length(3 * 16 * token // 4) == 16
    assert length(3 * 16 * token // 4 + 4) == 32
    assert length(10**7) == 1024, "1,024 tokens are the longest block"


def test_states_stay_in_fp32_beside_keys_and_values_in_fp8() -> None:
    assert in_fp8((STATE, GROUPED), FP8)[0] == STATE
