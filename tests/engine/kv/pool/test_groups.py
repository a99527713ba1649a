"""Groups of layers: how they are formed, the blocks that a context needs, and the number of tokens that an arena holds."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, MistralConfig, PreTrainedConfig

from load_tests.kv_capacity import BLOCK_SIZE, fitting_tokens
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheLayout, keys_and_values
from pilotlight.engine.kv.pool.prefix_index import block_name, chain_root, extend_chain
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from tests.checkpoints import write_checkpoint
from tests.engine.driver import drain, one, random_prompt, submit
from tests.engine.fake_runner import FakeArena, borrowing_engine, fake_engine
from tests.engine.families import config

GEMMA = config(
    Gemma3TextConfig,
    hidden_activation="gelu_pytorch_tanh",
    layer_types=["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2,
    num_hidden_layers=6,
    sliding_window=32,
    max_position_embeddings=20_000,
    rope_parameters=None,
)
MISTRAL = config(MistralConfig, sliding_window=32, max_position_embeddings=20_000, num_hidden_layers=6)


def layers(*windows: int | None) -> list[CachedLayer]:
    return [CachedLayer(keys_and_values(2, 8), window) for window in windows]


def groups_of(*windows: int | None) -> list[tuple[tuple[int, ...], int | None]]:
    return [(group.layers, group.window) for group in CacheLayout(layers(*windows), 4, torch.float32, 10_000).groups]


def test_layers_of_a_kind_are_cut_into_groups_that_fill_a_block() -> None:
    assert groups_of(None, None, None) == [((0, 1, 2), None)]
    assert groups_of(5, 5) == [((0, 1), 5)]
    assert groups_of(7, None, 7, None) == [((1, 3), None), ((0, 2), 7)]
    assert groups_of(*[9] * 5, None) == [((5,), None), *[((i,), 9) for i in range(5)]]
    assert groups_of(10_000, None) == [((0, 1), None)], "a window that no context exceeds counts as full attention"


def test_layers_of_other_sizes_share_blocks_of_one_size() -> None:
    wide = CachedLayer(keys_and_values(4, 8), 9)
    layout = CacheLayout([*layers(None, None), wide, wide], 4, torch.float32, 10_000)
    assert layout.windows == (None, 9, 9)
    assert layout.block_bytes == 2 * 2 * 4 * 2 * 8 * 4, "a block has room for two narrow layers or a wide one"


def test_what_a_context_needs_ends_growing_where_its_windows_are_full() -> None:
    groups = CacheGroups(4, max_chunk=8, windows=(None, 9))
    assert [groups.most_blocks(n, 1) for n in (1, 4, 5, 16, 17, 40)] == [2, 2, 4, 8, 9, 14]
    assert [groups.most_blocks(40, n) for n in (40, 8, 4)] == [15, 15, 14], (
        "a chunk needs blocks beside those of its window"
    )
    assert [groups.longest_context(n, 100) for n in (0, 1, 2, 10, 15, 99)] == [0, 0, 4, 20, 40, 100]
    assert CacheGroups(4, 8, (9,)).longest_context(5, 10**6) == 10**6


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 12))
def test_what_a_window_sees_behind_so_many_blocks_is_what_its_next_token_sees(
    size: int, window: int, num_blocks: int
) -> None:
    groups, position = CacheGroups(size, 8, (None, window)), num_blocks * size
    seen = [i for i in range(num_blocks) if (i + 1) * size > position - (window - 1)]
    first = min([*seen, max(0, num_blocks - 1)])  # at least one, as a table is never empty
    assert (groups.first_seen(0, num_blocks), groups.first_seen(1, num_blocks)) == (0, first)
    places = [(i, group) for i in range(num_blocks) for group in (0, 1) if group == 0 or i >= first]
    assert groups.seen(num_blocks) == places
    assert CacheGroups(size, 8, (window,)).seen(num_blocks) == [(i, 0) for i in range(first, num_blocks)]


@given(st.integers(1, 5), st.sampled_from([(None,), (7,), (None, 3), (2, 9)]), st.integers(0, 30), st.integers(0, 60))
def test_the_longest_context_is_the_last_that_fits(
    size: int, windows: tuple[int | None, ...], num_blocks: int, at_most: int
) -> None:
    groups = CacheGroups(size, 8, windows)
    fits = [n for n in range(0, at_most + size, size) if groups.most_blocks(n, n) <= num_blocks]
    assert groups.longest_context(num_blocks, at_most) == min(at_most, max(fits))


def test_a_sequence_holds_no_more_than_its_windows_need() -> None:
    engine, _ = fake_engine(num_blocks=32, block_size=4, windows=(None, 9), max_num_batched_tokens=8)
    engine.submit(submit("a", random_prompt(60, seed=1), max_tokens=30))
    held = []
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            held.append([table.num_held for table in sequence.tables])
            for table in sequence.tables:
                assert set(table.blocks) == set(table.held), "a kernel may read every block of a table, masked or not"
    assert max(full for full, _ in held) == 22
    assert max(window for _, window in held) == 3, "the block of the newest token, and two before it"


def test_a_hit_needs_the_last_blocks_of_a_window_and_all_of_the_others() -> None:
    engine, _ = fake_engine(num_blocks=64, block_size=4, windows=(None, 9))
    prompt = random_prompt(41, seed=1)
    one(engine, submit("a", prompt, max_tokens=1))
    hits = [one(engine, submit(str(n), prompt[:n], max_tokens=1)).num_cached_tokens for n in (41, 24, 7)]
    assert hits == [40, 20, 4], "a released block is found until it is handed out again"
    pool = engine.scheduler.pool
    sequence = Sequence("s", prompt, SamplingParams(1), chain_root(b"", engine.identity))
    extend_chain(sequence.block_hashes, sequence.chain_root, prompt, 4)
    pool.discard([block_name(sequence.block_hashes[8], 1)])  # a block of the group with the window
    hits = [one(engine, submit(str(n), prompt[:n], max_tokens=1)).num_cached_tokens for n in (41, 33)]
    assert hits == [32, 32]


def test_samples_of_one_prompt_share_the_blocks_of_every_group() -> None:
    engine, _ = fake_engine(num_blocks=64, block_size=4, windows=(None, 9, 9))
    prompt = random_prompt(40, seed=1)
    heard = drain(engine, [submit("a", prompt), *[submit(name, prompt, leader="a") for name in "bcd"]])
    assert [h.num_cached_tokens for h in heard.values()] == [0, 36, 36, 36]


@pytest.mark.parametrize("checkpoint", [GEMMA, MISTRAL], ids=["gemma3", "mistral"])
def test_a_real_arena_holds_as_many_tokens_as_the_arithmetic_says(checkpoint: PreTrainedConfig, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint)
    host = HostConfig(kv_bytes=3 << 20, threads=1)
    engine = load_model(ModelSpec("tiny", str(tmp_path)), host, make_kv_memory(host)).engine
    windows = [None if kind == "full_attention" else 32 for kind in getattr(checkpoint, "layer_types", range(6))]
    cached = [CachedLayer(keys_and_values(2, 10), window) for window in windows]
    before, _, longest = fitting_tokens(cached, 20_000, host.kv_bytes, torch.float32)
    assert before == 3264
    assert engine.info.context_length == (20_000 if longest is None else longest) > 2 * before
    assert engine.load().free_blocks == engine.load().total_blocks <= before // BLOCK_SIZE
    length = longest or 9000
    heard = one(engine, submit("a", random_prompt(length - 3, seed=1), max_tokens=3))
    assert len(heard.token_ids) == 3
    assert engine.scheduler.counts.preemptions == 0


def test_bad_numbers_reach_no_sequence_through_blocks_that_a_window_has_left() -> None:
    engine, runner = fake_engine(num_blocks=64, block_size=4, windows=(None, 9), max_num_batched_tokens=8)
    prompt = random_prompt(40, seed=1)
    engine.submit(submit("bad", prompt, max_tokens=9))
    for _ in range(6):
        engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.tables[1].first == 8
    runner.bad_prompts.add(tuple(prompt))
    heard = drain(engine, [])["bad"]
    assert "not finite" in (heard.error or "")
    assert len(set(runner.scrubbed)) == len(runner.scrubbed) == 2 * 11, "released blocks must be cleared too"
    runner.bad_prompts.clear()
    assert [one(engine, submit(str(n), prompt[:n], max_tokens=1)).num_cached_tokens for n in (40, 12)] == [0, 8]


def test_models_with_windows_lend_each_other_what_they_have_left() -> None:
    arena = FakeArena(16, 24)
    one_model, _ = borrowing_engine(arena, "one", 3, windows=(None, 9, 9), tokens=8)
    other, _ = borrowing_engine(arena, "two", 3, windows=(5,), tokens=8)
    assert one_model.info.context_length > one_model.info.total_blocks * 4, (
        "with windows, a context may be longer than the blocks of one group"
    )
    assert other.info.context_length == 16 * 8 * 4
    prompt = random_prompt(one_model.info.context_length - 9, seed=1)
    heard = drain(one_model, [submit("long", prompt, max_tokens=9)])
    assert len(heard["long"].token_ids) == 9
    load = other.load()
    assert load.free_blocks == load.total_blocks == 128, "an idle model's cached blocks are free for any model"
    assert len(drain(other, [submit("b", [7] * 400, max_tokens=9)])["b"].token_ids) == 9
    assert one(one_model, submit("again", prompt, max_tokens=9)).token_ids == heard["long"].token_ids
