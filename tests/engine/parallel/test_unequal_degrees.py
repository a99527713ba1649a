"""Hosts with one rank and with several hand over blocks to each other: outside the device a block is whole, however many ranks computed it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.api.protocol import HostConfig, KvDtype, ModelSpec
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.pool.block_parts import BlockParts, Piece
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheLayout, CacheSegment, keys_and_values
from pilotlight.engine.kv.shared_tiers import SharedTiers
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loaded_model import LoadedModel
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.weights.shard import Shard
from tests.engine.driver import drain, load_engine, random_prompt, submit
from tests.engine.families import write_family
from tests.engine.parallel.test_ranks import LATENT, WINDOWS, group_memory, group_of, write_llama_of
from tests.engine.test_hand_over import PROMPT, Pair

DENSE, ONE_HEAD = "llama, six heads over two", "llama, one key-value head"


pytestmark = pytest.mark.usefixtures("always_worth_it")


class UnequalPair(Pair):
    """A prefill host and a decode host, one of which has several ranks."""

    def __init__(self, model: Path, place: Path, ranks: KvMemory, of_prefill: bool, kv_dtype: KvDtype = "auto") -> None:
        self._ranks = ranks
        self._with_ranks = "prefill" if of_prefill else "decode"
        self._kv_dtype = kv_dtype
        self._loaded: list[LoadedModel] = []
        super().__init__(model, place, max_num_batched_tokens=48)

    def _load(self, role: str, tiers: SharedTiers, **limits: Any) -> Engine:
        del limits["depth"]
        config = HostConfig(device="cpu", kv_bytes=64 << 20, threads=1, **limits)
        memory = make_kv_memory(config)
        if role == self._with_ranks:
            assert self._ranks.group is not None
            config = group_of(self._ranks.group.size, stages=self._ranks.group.num_stages, **limits)
            memory = self._ranks
        spec = ModelSpec("tiny", str(self.model), kv_tokens=1024, kv_dtype=self._kv_dtype)
        self._loaded.append(load_model(spec, config, memory, tiers=tiers))
        return self._loaded[-1].engine

    def close(self) -> None:
        for model in self._loaded:
            model.close()
        for tiers in self.tiers:
            tiers.close()


@pytest.fixture(scope="module")
def two(process_tier: None) -> Iterator[KvMemory]:
    with group_memory(group_of(2)) as memory:
        yield memory


def write(directory: Path, family: str) -> Path:
    if family == ONE_HEAD:
        return write_llama_of(directory, heads=4, kv_heads=1)
    write_family(directory, family)
    return directory


def asked() -> list[Any]:
    return [submit("s0", PROMPT, max_tokens=12), submit("s1", random_prompt(90, seed=2), max_tokens=12)]


@pytest.mark.parametrize("of_prefill", [False, True], ids=["from one to two", "from two to one"])
@pytest.mark.parametrize("family", [DENSE, WINDOWS, LATENT, ONE_HEAD])
def test_tokens_are_those_of_one_host(tmp_path: Path, two: KvMemory, family: str, of_prefill: bool) -> None:
    model = write(tmp_path / "model", family)
    expected = drain(load_engine(model), asked())
    pair = UnequalPair(model, tmp_path, two, of_prefill)
    heard = pair.answer(asked())
    assert {name: one.token_ids for name, one in heard.items()} == {n: one.token_ids for n, one in expected.items()}
    assert [heard[name].num_fetched_tokens for name in ("s0", "s1")] == [144, 80], (
        "all full blocks except that of the last token"
    )
    assert pair.decode.load().prompt_tokens == 150 - 144 + 90 - 80
    pair.assert_nothing_is_left()
    pair.close()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("of_prefill", [False, True])
def test_four_ranks_and_one_hand_over_what_heads_they_share(tmp_path: Path, of_prefill: bool) -> None:
    model = write_llama_of(tmp_path / "model", heads=8, kv_heads=2)
    expected = drain(load_engine(model), asked())
    with group_memory(group_of(4)) as ranks:
        pair = UnequalPair(model, tmp_path, ranks, of_prefill)
        heard = pair.answer(asked())
        assert [heard[name].token_ids for name in expected] == [one.token_ids for one in expected.values()]
        assert heard["s0"].num_fetched_tokens == 144
        pair.assert_nothing_is_left()
        pair.close()


def test_keys_and_values_in_fp8_under_one_scale_are_handed_over(tmp_path: Path, two: KvMemory) -> None:
    model = write(tmp_path / "model", DENSE)
    expected = drain(load_engine(model, kv_dtype="fp8"), asked())
    pair = UnequalPair(model, tmp_path, two, False, kv_dtype="fp8")
    heard = pair.answer(asked())
    assert heard["s0"].num_fetched_tokens == 144
    assert heard["s0"].token_ids == expected["s0"].token_ids
    pair.assert_nothing_is_left()
    pair.close()


@pytest.mark.process
def test_hosts_of_other_stages_refuse_each_other_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path / "model", DENSE)
    expected = drain(load_engine(model), asked())
    with group_memory(group_of(2, stages=2)) as ranks:
        pair = UnequalPair(model, tmp_path, ranks, of_prefill=False)
        heard = pair.answer(asked())
        assert [heard[name].token_ids for name in expected] == [one.token_ids for one in expected.values()]
        assert heard["s0"].num_fetched_tokens == 0
        assert "differs from the reader's in layout" in caplog.text
        pair.assert_nothing_is_left()
        pair.close()


def parts_of(layers: list[CachedLayer], per_stage: int, stages: list[range] | None = None) -> BlockParts:
    stages = stages or [range(len(layers))]

    def layouts(shard: Shard) -> list[CacheLayout]:
        of_shard = [layer.part_of(shard) for layer in layers]
        return [CacheLayout(of_shard, 4, torch.float32, 10_000, stages, stage) for stage in range(len(stages))]

    return BlockParts.of(layouts(Shard()), layouts(Shard(0, per_stage)), per_stage)


@pytest.mark.parametrize("stages", [None, [range(2), range(2, 3)]], ids=["one stage", "two"])
@pytest.mark.parametrize(
    "segments",
    [
        keys_and_values(4, 8),
        keys_and_values(1, 6),
        (CacheSegment("latent", 1, 9),),
        (*keys_and_values(2, 3), CacheSegment("x", 1, 5)),
    ],
)
def test_a_block_that_was_cut_into_parts_is_whole_again(
    segments: tuple[CacheSegment, ...], stages: list[range] | None
) -> None:
    parts = parts_of([CachedLayer(segments)] * 3, 2, stages)
    assert parts.is_whole
    content = bytes(i % 251 for i in range(parts.whole_bytes))
    again = memoryview(bytearray(parts.whole_bytes))
    for rank in range(len(parts.pieces)):
        part = memoryview(bytearray(parts.part_bytes))
        parts.take(rank, memoryview(content), part)
        parts.put(rank, part, again)
    covered = {i for pieces in parts.pieces for piece in pieces for i in range(piece.whole, piece.whole + piece.size)}
    assert all(again[i] == content[i] for i in covered)
    kept = sum(4 * one.num_heads * one.head_dim * 4 for one in segments)
    assert len(covered) == 3 * kept, "the pieces must cover all content, without padding"


def test_layers_whose_blocks_are_made_of_other_pieces_stay_apart() -> None:
    parts = parts_of([CachedLayer(keys_and_values(2, 8)), CachedLayer(keys_and_values(4, 8), window=9)], 2)
    assert not parts.is_whole
    assert parts.pieces == ((Piece(0, 0, parts.part_bytes),), (Piece(parts.part_bytes, 0, parts.part_bytes),))


def test_the_block_of_a_host_without_ranks_is_its_one_part() -> None:
    parts, content = BlockParts.of_one(9), memoryview(bytes(range(9)))
    assert (parts.whole_bytes, parts.part_bytes, parts.is_whole, len(parts.pieces)) == (9, 9, True, 1)
    part, again = memoryview(bytearray(9)), memoryview(bytearray(9))
    parts.take(0, content, part)
    parts.put(0, part, again)
    assert part == again == content
