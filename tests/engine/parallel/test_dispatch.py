"""Ranks with separate sequences, and each with some experts of every layer, compute the same as one rank for all requests."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.layers.moe import SparseMLP
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.parallel.balancer import experts_of, sparse_parts_of
from pilotlight.engine.parallel.dispatch import RoutedTokens
from pilotlight.engine.parallel.part_runner import PartRunner
from pilotlight.engine.planning.model_plan import read_model
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace
from pilotlight.engine.planning.speed import RoutedCounts, exchanged
from tests.adapters import adapted, write_adapter
from tests.checkpoints import write_checkpoint, write_speaking_experts
from tests.engine.driver import (
    check_all_drafts,
    drain,
    drain_preempting,
    load_engine,
    one,
    random_prompt,
    runner_of,
    submit,
)
from tests.engine.families import config, write_family
from tests.engine.parallel.test_ranks import ASKED, LATENT, Ranks, assert_same, group_memory, group_of, settle, several
from tests.engine.test_constrained_answers import crowd
from tests.engine.test_speculation import assert_drafted

pytestmark = pytest.mark.process

GROUPED = "qwen3-moe, every second layer, tied"
WINDOWED = "mixtral, one of four experts, window"


def write(directory: Path, family: str) -> None:
    if family == WINDOWED:
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 18}
        write_checkpoint(directory, config(MixtralConfig, **sizes))
    else:
        write_family(directory, family)


def dp_of(size: int, stages: int = 1, **changes: Any) -> HostConfig:
    return group_of(size, stages=stages, expert_parallel=True, data_parallel=size // stages, **changes)


HOSTS = [
    pytest.param(dp_of(2), id="two ranks"),
    pytest.param(
        group_of(4, expert_parallel=True, data_parallel=2), id="two ranks for each copy", marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module", params=HOSTS)
def pair(process_tier: None, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Start ranks among which attention has two copies."""
    with group_memory(request.param) as memory:
        yield Ranks(request.param, memory)


def shares_of(ranks: Ranks, directory: Path, asked: list[Submit], **changes: Any) -> set[int]:
    """Run requests; return the ranks that the sequences belonged to."""
    with ranks._replace(host=replace(ranks.host, **changes)).loaded(directory) as model:
        for message in asked:
            model.engine.submit(message)
        model.engine.step()
        found = {sequence.share for sequence in model.engine.scheduler.running}
        drain(model.engine, [])
    return found


def test_rows_in_bf16_go_between_ranks(tmp_path: Path, pair: Ranks) -> None:
    write(tmp_path, WINDOWED)
    expected = one(
        load_engine(tmp_path, dtype="bfloat16"), submit("a", random_prompt(30, seed=1), max_tokens=1, num_logprobs=1)
    )
    model = load_model(ModelSpec("tiny", str(tmp_path), "bfloat16", 1024), pair.host, pair.memory)
    heard = one(model.engine, submit("a", random_prompt(30, seed=1), max_tokens=1, num_logprobs=1))
    model.close()
    assert heard.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=0.1)


def test_sequences_are_divided_between_the_ranks(tmp_path: Path, pair: Ranks) -> None:
    write_family(tmp_path, GROUPED)
    assert shares_of(pair, tmp_path, several()) == {0, 1}


@pytest.mark.parametrize("family", [GROUPED, LATENT])
def test_a_rank_without_tokens_computes_its_experts_for_the_other(tmp_path: Path, pair: Ranks, family: str) -> None:
    write(tmp_path, family)
    alone = submit("a", random_prompt(40, seed=1), num_logprobs=2)
    expected = drain(load_engine(tmp_path), [alone])
    with pair.loaded(tmp_path) as model:
        assert_same(drain(model.engine, [alone]), expected)


@pytest.mark.long
@pytest.mark.parametrize("asked", ASKED)
def test_what_sequences_ask_for_is_what_one_rank_gives(tmp_path: Path, pair: Ranks, asked: str) -> None:
    write_family(tmp_path, LATENT)
    expected = drain(load_engine(tmp_path), ASKED[asked]())
    with pair.loaded(tmp_path) as model:
        assert_same(drain(model.engine, ASKED[asked]()), expected)


@pytest.mark.long
@pytest.mark.parametrize("family", [WINDOWED, LATENT])
def test_prompts_in_chunks_and_beside_decodes_are_the_same(tmp_path: Path, pair: Ranks, family: str) -> None:
    write(tmp_path, family)
    expected = drain(load_engine(tmp_path), several())
    with pair._replace(host=replace(pair.host, max_num_batched_tokens=16)).loaded(tmp_path) as model:
        assert_same(drain(model.engine, several()), expected)


@pytest.mark.parametrize("family", [WINDOWED, LATENT])
def test_preempted_sequences_continue_with_the_same_tokens(tmp_path: Path, pair: Ranks, family: str) -> None:
    write(tmp_path, family)
    expected = drain(load_engine(tmp_path), several())
    with pair.loaded(tmp_path) as model:
        assert_same(drain_preempting(model.engine, several()), expected)
        assert model.engine.scheduler.counts.preemptions > 0


def test_steps_that_overlap_feed_every_rank_the_first_ones_tokens(tmp_path: Path, pair: Ranks) -> None:
    write_family(tmp_path, GROUPED)
    expected = drain(load_engine(tmp_path), several(temperature=0.8, seed=3))
    with pair.loaded(tmp_path) as model:
        model.engine.runner.depth = 2
        assert_same(drain(model.engine, several(temperature=0.8, seed=3)), expected)


@pytest.mark.long
def test_grammars_are_followed_and_neighbours_have_the_tokens_of_one_rank(tmp_path: Path, pair: Ranks) -> None:
    write_speaking_experts(tmp_path)
    expected = crowd(load_engine(tmp_path, dtype="float32"))
    model = load_model(ModelSpec("tiny", str(tmp_path), "float32", 1024), pair.host, pair.memory)
    try:
        assert_same(crowd(model.engine), expected)
    finally:
        model.close()


def test_drafts_are_checked_by_the_ranks_that_have_their_sequences(tmp_path: Path, pair: Ranks) -> None:
    write(tmp_path, WINDOWED)
    asked = [submit(f"s{i}", random_prompt(8, seed=i) * 4, max_tokens=24, num_logprobs=1) for i in range(4)]
    expected = drain(load_engine(tmp_path), asked)
    model = load_model(ModelSpec("tiny", str(tmp_path), kv_tokens=1024, speculate="suffix"), pair.host, pair.memory)
    try:
        check_all_drafts(model.engine)
        assert_same(drain(model.engine, asked), expected)
        assert_drafted(model.engine, at_least=1)
    finally:
        model.close()


def test_a_prefix_is_found_on_the_rank_that_has_it(tmp_path: Path, pair: Ranks) -> None:
    write_family(tmp_path, LATENT)
    prompt = random_prompt(64, seed=9)
    expected = drain(load_engine(tmp_path), [submit("b", [*prompt, 5], num_logprobs=2)])
    with pair.loaded(tmp_path) as model:
        first = drain(model.engine, [submit("a", [*prompt, 4]), submit("x", random_prompt(64, seed=1))])
        assert first["a"].num_cached_tokens == 0
        heard = drain(model.engine, [submit("b", [*prompt, 5], num_logprobs=2)])
        assert_same(heard, expected)
        assert heard["b"].num_cached_tokens == 64


def test_a_group_has_room_for_as_many_tokens_as_its_ranks_together(tmp_path: Path, pair: Ranks) -> None:
    write_family(tmp_path, LATENT)
    with pair.loaded(tmp_path) as model:
        assert model.engine.info.total_blocks == 2 * 1024 // 16
        assert len(runner_of(model.engine).kv_cache) == 1024 // 16


def test_models_lend_each_other_slabs_of_all_ranks(tmp_path: Path, pair: Ranks) -> None:
    write_family(tmp_path / "a", GROUPED)
    write_family(tmp_path / "b", LATENT)
    models = [load_model(ModelSpec(name, str(tmp_path / name)), pair.host, pair.memory) for name in "ab"]
    try:
        for name, model in zip("ab", models, strict=True):
            expected = drain(load_engine(tmp_path / name), several())
            assert_same(drain(model.engine, [replace(asked, model=name) for asked in several()]), expected)
        pair.memory.slabs.assert_consistent()
    finally:
        for model in models:
            model.close()


@pytest.mark.parametrize("copies", HOSTS)
def test_a_block_comes_back_from_the_host_tier_to_any_rank(tmp_path: Path, copies: HostConfig) -> None:
    write_family(tmp_path / "model", LATENT)
    (tmp_path / "host").mkdir()
    prompts = [random_prompt(96, seed=1), random_prompt(96, seed=2)]
    expected = [one(load_engine(tmp_path / "model"), submit("a", prompt)).token_ids for prompt in prompts]
    host = replace(copies, kv_host_bytes=8 << 20, kv_host_dir=str(tmp_path / "host"))
    with group_memory(host) as memory:
        tiers = open_tiers(host)
        assert tiers is not None
        spec = ModelSpec("tiny", str(tmp_path / "model"), kv_tokens=256)
        first = load_model(spec, host, memory, tiers=tiers)
        first.engine.stats.rates.count = lambda *_: None
        heard = drain(first.engine, [submit(f"s{i}", prompt) for i, prompt in enumerate(prompts)])
        assert [heard[f"s{i}"].token_ids for i in range(2)] == expected
        settle(first.engine)
        first.close()
        again = load_model(spec, host, memory, tiers=tiers)
        again.engine.tiers.note_prefill_rate(1.0)  # so slow that fetching is worth it
        for i in (1, 0):  # in reverse order, so that each prompt goes to the other rank
            found = one(again.engine, submit(f"again {i}", prompts[i]))
            assert found.token_ids == expected[i]
            assert found.num_cached_tokens == 80, "five blocks of sixteen: the last token is computed"
        again.close()
        tiers.close()


def test_a_sequence_whose_cache_is_damaged_ends_alone_and_its_blocks_are_scrubbed_where_they_are(
    tmp_path: Path, pair: Ranks
) -> None:
    write_family(tmp_path, GROUPED)
    with pair.loaded(tmp_path) as model:
        engine = model.engine
        engine.submit(submit("a", random_prompt(40, seed=1), max_tokens=20))
        engine.step()
        runner_of(engine).kv_cache.view(runner_of(engine).layout.dtype).fill_(float("nan"))
        assert drain(engine, [])["a"].finish_reason == "error"
        engine.fail_all("engine_error", "the cache is in doubt")
        assert_same(drain(engine, several()), drain(load_engine(tmp_path), several()))


def test_adapters_are_those_of_one_rank(tmp_path: Path, pair: Ranks) -> None:
    model = write_family(tmp_path / "base", GROUPED)
    directories = [None, tmp_path / "one", tmp_path / "two", None]
    for seed, directory in enumerate(directories):
        if directory is not None:
            write_adapter(directory, model, seed=seed, rank=4)
    messages = [adapted(message, directory) for message, directory in zip(several(), directories, strict=True)]
    expected = drain(load_engine(tmp_path / "base"), messages)
    with pair.loaded(tmp_path / "base") as shared:
        assert_same(drain(shared.engine, messages), expected)


@pytest.mark.parametrize("copies", HOSTS)
def test_experts_move_between_ranks_while_they_serve_and_the_tokens_stay_the_same(
    tmp_path: Path, copies: HostConfig
) -> None:
    write_family(tmp_path, LATENT)
    asked = [submit(f"s{i}", random_prompt(90, seed=i), max_tokens=8, num_logprobs=3) for i in range(7)]
    expected = drain(load_engine(tmp_path), asked)
    host = replace(copies, redundant_experts=len(copies.group))
    with group_memory(host) as memory, Ranks(host, memory).loaded(tmp_path) as model:
        runner = runner_of(model.engine)
        assert isinstance(runner, PartRunner)
        began = [layer.placement for layer in experts_of(runner.model)]
        until = time.monotonic() + 60  # mapped weights are first copied to allocated memory
        while not runner.balancer.moved and time.monotonic() < until:
            assert_same(drain(model.engine, asked), expected)
        assert runner.balancer.moved > 0
        assert_same(drain(model.engine, asked), expected)
        assert [layer.placement for layer in experts_of(runner.model)] != began


def test_messages_and_bytes_of_a_step_are_those_of_the_formula(
    tmp_path: Path, pair: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path, LATENT)
    assert pair.memory.links is not None
    assert pair.memory.links.serving is not None
    routed: list[int] = []  # for each layer: pairs of a token and another rank with an expert of it
    back: list[int] = []  # for each layer: tokens that other ranks of the tp group send here
    degrees = Parallelism.of_host(pair.host)
    with pair.loaded(tmp_path) as model:
        watched = [part.experts for part in sparse_parts_of(runner_of(model.engine).model)]
        original = SparseMLP.__call__

        def watch(self: SparseMLP, x: torch.Tensor, context: Any) -> torch.Tensor:
            assert self.experts in watched
            assert self.experts.placement is not None
            ids = self.router(x, context)[1]
            here, *others = [torch.tensor(slots) for slots in self.experts.placement.slots]
            routed.append(sum(int(torch.isin(ids[:: degrees.tp], there).any(1).sum()) for there in others))
            theirs = [ids[lane :: degrees.tp] for lane in range(1, degrees.tp)]
            back.append(sum(int(torch.isin(of_one, here).any(1).sum()) for of_one in theirs))
            return original(self, x, context)

        monkeypatch.setattr(SparseMLP, "__call__", watch)
        before = pair.memory.links.serving.exchanged
        one(model.engine, submit("a", random_prompt(40, seed=1), max_tokens=1))
        after = pair.memory.links.serving.exchanged
    expected = exchanged(
        read_model(tmp_path, on_cpu=True), RankPlace(degrees), 40, 1, RoutedCounts(sum(routed), sum(back))
    )
    assert len(routed) == len(watched)
    assert 0 < sum(routed) <= 40 * len(watched) * (degrees.size - 1)
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == expected


REFUSED: dict[str, tuple[str, Callable[[], HostConfig], str]] = {
    "without experts": (
        "llama, biased",
        lambda: dp_of(2),
        "data_parallel is 2, but the model has no experts to divide: copies would share nothing, so run a host for each device",
    ),
    "experts that do not divide": (
        "mixtral, two of five experts",
        lambda: dp_of(2),
        "ep is 2, and the model has 5 experts",
    ),
    "experts in one tensor": (
        "scout, chunks of 23, two experts, biased, no norm",
        lambda: dp_of(2),
        "contains all experts in one tensor, which ranks can only share in parts: unset expert_parallel",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_spread_is_refused_by_name(tmp_path: Path, pair: Ranks, case: str) -> None:
    family, host, message = REFUSED[case]
    write(tmp_path, family)
    with pytest.raises(CheckpointError, match=message), Ranks(host(), pair.memory).loaded(tmp_path):
        pass


def test_a_token_is_packed_into_one_row_and_comes_out_as_it_was() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tokens = RoutedTokens(
            torch.randn(5, 6).to(dtype), torch.rand(5, 3), torch.tensor([[1, -1, 7]] * 5, dtype=torch.int64)
        )
        rows = tokens.packed()
        assert rows.shape == (5, 6 * dtype.itemsize + 3 * 8)
        for some in (slice(None), slice(0, 0), slice(2, 3)):
            for name, part in RoutedTokens.unpacked(rows[some], 6, dtype)._asdict().items():
                assert torch.equal(part, getattr(tokens, name)[some]), name
