import pytest
import torch

from pilotlight.engine.kv.arena import ALIGNMENT, MAX_SLAB_BYTES, MIN_SLAB_BYTES, Arena, cut_slabs

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "total", [0, 1, ALIGNMENT, 100_000, 1 << 20, 10_737_418, 128 << 20, 256 << 20, 1 << 30, 80 << 30]
)
def test_slabs_are_equal_whole_pages_and_waste_less_than_a_page_each(total: int) -> None:
    number, size = cut_slabs(total)
    assert size % ALIGNMENT == 0
    assert size <= MAX_SLAB_BYTES
    assert total - number * size < max(1, number) * ALIGNMENT
    if total >= MIN_SLAB_BYTES:
        assert size >= MIN_SLAB_BYTES
    if total >= 32 * MIN_SLAB_BYTES:
        assert number >= 32


def test_a_cleared_slab_holds_zeros_and_its_neighbours_keep_their_content() -> None:
    arena = Arena(1 << 20, CPU)
    everything = arena.span(0, arena.num_slabs * arena.slab_bytes)
    assert int(everything.max()) == 0
    everything.fill_(255)
    arena.clear(3)
    cleared = arena.span(3, arena.slab_bytes)
    assert int(cleared.max()) == 0
    assert int(arena.span(0, 3 * arena.slab_bytes).min()) == 255
    assert int(arena.span(4, arena.slab_bytes).min()) == 255


def test_models_of_two_types_see_the_same_bytes() -> None:
    arena = Arena(1 << 20, CPU)
    floats, halves = arena.span(0, 1 << 20).view(torch.float32), arena.span(0, 1 << 20).view(torch.bfloat16)
    floats[: arena.slab_bytes // 4] = 1.0
    assert int(halves[: arena.slab_bytes // 2].count_nonzero()) == arena.slab_bytes // 4, (
        "only the upper half of each 1.0 is not zero"
    )
    arena.clear(0)
    assert not halves.any()
