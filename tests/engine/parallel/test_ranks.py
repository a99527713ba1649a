"""Ranks that share a model compute the same as one rank: logits, tokens, and all options of requests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import LlamaConfig

from pilotlight.engine.api.errors import CheckpointError, RankLostError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loaded_model import LoadedModel
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.parallel.balancer import experts_of
from pilotlight.engine.parallel.orders import DropModel
from pilotlight.engine.parallel.part_runner import PartRunner
from pilotlight.engine.parallel.ranks import RankGroup
from pilotlight.engine.weights.load import WeightLoad
from tests.adapters import adapted, write_adapter
from tests.checkpoints import write_checkpoint
from tests.engine.driver import (
    Heard,
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
from tests.engine.test_constrained_answers import crowd, ember
from tests.engine.test_draft_models import EAGLE3, MINI, MTP_FAMILIES, write_mtp
from tests.engine.test_speculation import assert_drafted, requests, told_without
from tests.engine.test_speculation import assert_same as assert_same_tokens
from tests.engine.tools.test_packing import packed_into
from training.ember.chat import HERE

pytestmark = pytest.mark.process

DENSE, WINDOWS, SPARSE = "llama, biased", "gemma3, windows but in layer 2, tied", "mixtral, two of five experts"
LATENT, CHUNKS = (
    "deepseek-v3, three experts in two of four groups, yarn",
    "scout, chunks of 23, two experts, biased, no norm",
)


def group_of(size: int, **changes: Any) -> HostConfig:
    return HostConfig(device="cpu", kv_bytes=64 << 20, threads=1, group=("cpu",) * size, **changes)


@contextmanager
def group_memory(config: HostConfig) -> Iterator[KvMemory]:
    memory = make_kv_memory(config)
    try:
        yield memory
    finally:
        memory.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one stage", "two stages"])
def pair(process_tier: None, request: pytest.FixtureRequest) -> Iterator[KvMemory]:
    """Start two ranks that share every matrix, or that have half of the layers each."""
    with group_memory(group_of(2, stages=request.param)) as memory:
        yield memory


class Ranks(NamedTuple):
    host: HostConfig
    memory: KvMemory

    @contextmanager
    def loaded(self, directory: Path) -> Iterator[LoadedModel]:
        model = load_model(ModelSpec("tiny", str(directory), kv_tokens=1024), self.host, self.memory)
        try:
            yield model
        finally:
            model.close()


@pytest.fixture(scope="module")
def ranks(process_tier: None, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Start a group of ranks, which takes seconds; the parameter has the arguments of `group_of`."""
    host = group_of(request.param["size"], **{name: of for name, of in request.param.items() if name != "size"})
    with group_memory(host) as memory:
        yield Ranks(host, memory)


def host_of(memory: KvMemory, **changes: Any) -> HostConfig:
    assert isinstance(memory.group, RankGroup)
    return group_of(memory.group.size, stages=memory.group.num_stages, **changes)


def skip_stages(memory: KvMemory, why: str) -> None:
    if isinstance(memory.group, RankGroup) and memory.group.num_stages > 1:
        pytest.skip(why)


@contextmanager
def loaded(directory: Path, memory: KvMemory, name: str = "tiny", **changes: Any) -> Iterator[LoadedModel]:
    model = load_model(ModelSpec(name, str(directory), kv_tokens=1024), host_of(memory, **changes), memory)
    try:
        yield model
    finally:
        model.close()


def assert_same(actual: dict[str, Heard], expected: dict[str, Heard]) -> None:
    assert actual.keys() == expected.keys()
    for name, theirs in expected.items():
        ours = actual[name]
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.error == theirs.error
        pairs = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        pairs += zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)
        for mine, wanted in pairs:
            assert mine.logprob == pytest.approx(wanted.logprob, rel=1e-5, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in wanted.top]


def several(**sampling: Any) -> list[Submit]:
    settings = {"max_tokens": 12, "num_logprobs": 3} | sampling
    return [submit(f"s{i}", random_prompt(20 + 7 * i, seed=i), **settings) for i in range(4)]


def write_llama_of(directory: Path, heads: int, kv_heads: int) -> Path:
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    write_checkpoint(directory, config(LlamaConfig, **sizes))
    return directory


def test_two_ranks_hold_one_key_value_head_twice(tmp_path: Path, pair: KvMemory) -> None:
    skip_stages(pair, "these share no heads")
    write_llama_of(tmp_path, heads=4, kv_heads=1)
    expected = drain(load_engine(tmp_path), several())
    with loaded(tmp_path, pair) as model:
        assert_same(drain(model.engine, several()), expected)
        assert runner_of(model.engine).layout.layers[0].segments[0].num_heads == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"size": 4}], ids=["four ranks"], indirect=True)
def test_four_ranks_hold_two_key_value_heads_twice(tmp_path: Path, ranks: Ranks) -> None:
    write_llama_of(tmp_path, heads=8, kv_heads=2)
    expected = drain(load_engine(tmp_path), several())
    with ranks.loaded(tmp_path) as model:
        assert_same(drain(model.engine, several()), expected)
        assert runner_of(model.engine).layout.layers[0].segments[0].num_heads == 1


EXPERTS = {"size": 2, "stages": 1, "expert_parallel": True}


@pytest.mark.parametrize("ranks", [EXPERTS], ids=["one stage"], indirect=True)
@pytest.mark.parametrize(
    ("family", "message"),
    [
        (SPARSE, "ep is 2, and the model has 5 experts; leave ep at 1|ep may be 5"),
        (CHUNKS, "contains all experts in one tensor, which ranks can only share in parts"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_by_name(
    tmp_path: Path, ranks: Ranks, family: str, message: str
) -> None:
    write_family(tmp_path, family)
    with pytest.raises(CheckpointError, match=message), ranks.loaded(tmp_path):
        pass


@pytest.mark.parametrize("ranks", [EXPERTS | {"redundant_experts": 2}], ids=["with a copy"], indirect=True)
def test_experts_move_between_ranks_while_they_serve_and_the_tokens_stay_the_same(tmp_path: Path, ranks: Ranks) -> None:
    write_family(tmp_path, LATENT)
    asked = [submit(f"s{i}", random_prompt(90, seed=i), max_tokens=8, num_logprobs=3) for i in range(7)]
    expected = drain(load_engine(tmp_path), asked)
    with ranks.loaded(tmp_path) as model:
        runner = runner_of(model.engine)
        assert isinstance(runner, PartRunner)
        layers = experts_of(runner.model)
        began = [layer.placement for layer in layers]
        for _ in range(4):
            assert_same(drain(model.engine, asked), expected)
        moved = [layer.placement for layer in layers]
        assert runner.balancer.moved > 0
        assert moved != began
        assert all(len(slots) == len(set(slots)) for placement in moved for slots in placement.slots)


ASKED: dict[str, Callable[[], list[Submit]]] = {
    "sampled": lambda: several(temperature=0.9, seed=7, top_p=0.9),
    "penalties": lambda: several(repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((5, 3.0),)),
    "a prefix hit": lambda: [submit(f"s{i}", [*random_prompt(64, seed=9), i], num_logprobs=2) for i in range(3)],
    "stop tokens and a length": lambda: several(stop_token_ids=tuple(range(50, 200)), min_tokens=3),
    "priorities and tenants": lambda: [replace(one, priority=i, salt=bytes([i])) for i, one in enumerate(several())],
}


@pytest.mark.long
@pytest.mark.parametrize("asked", ASKED)
def test_what_sequences_ask_for_is_what_one_rank_gives(tmp_path: Path, pair: KvMemory, asked: str) -> None:
    write_family(tmp_path, DENSE)
    expected = drain(load_engine(tmp_path), ASKED[asked]())
    with loaded(tmp_path, pair) as model:
        assert_same(drain(model.engine, ASKED[asked]()), expected)


@pytest.mark.long
def test_grammars_are_followed_and_neighbours_have_the_tokens_of_one_rank(pair: KvMemory) -> None:
    expected = crowd(ember())
    model = load_model(ModelSpec("tiny", str(HERE), "float32", 1024), host_of(pair), pair)
    try:
        assert_same(crowd(model.engine), expected)
    finally:
        model.close()


@pytest.mark.long
def test_drafts_are_checked_by_all_ranks(pair: KvMemory) -> None:
    model = load_model(ModelSpec("tiny", str(HERE), "float32", 4096, speculate="grammar,suffix"), host_of(pair), pair)
    try:
        check_all_drafts(model.engine)
        few = requests(12)[:8]
        expected = {message.sequence_id: told_without(12)[message.sequence_id] for message in few}
        assert_same_tokens(drain(model.engine, few), expected)
        assert_drafted(model.engine, at_least=4)
    finally:
        model.close()


@pytest.mark.long
@pytest.mark.parametrize("words", [f"draft:{MINI}", f"suffix,eagle3:{EAGLE3}"], ids=["draft", "suffix,eagle3"])
def test_ranks_share_a_drafter_with_weights(pair: KvMemory, words: str) -> None:
    skip_stages(pair, "these refuse it by name")
    few = requests(12)[:5]
    expected = {message.sequence_id: told_without(12)[message.sequence_id] for message in few}
    again = [replace(message, sequence_id=f"{message.sequence_id} again") for message in few]
    alone = load_engine(HERE, dtype="float32", kv_tokens=4096, speculate=words)
    for asked in (few, again):
        drain(alone, asked)
    model = load_model(ModelSpec("tiny", str(HERE), "float32", 4096, speculate=words), host_of(pair), pair)
    try:
        check_all_drafts(model.engine)
        assert_same_tokens(drain_preempting(model.engine, few), expected)
        found = drain(model.engine, again)
        assert_same_tokens({name.removesuffix(" again"): heard for name, heard in found.items()}, expected)
        ours, theirs = model.engine.load().drafts, alone.load().drafts
        assert ours.num_failures == 0
        rates = [counts.num_accepted_tokens / counts.num_draft_tokens for counts in (ours, theirs)]
        assert rates[0] == pytest.approx(rates[1], abs=0.15), "drafts are as good as with one rank"
    finally:
        model.close()
        alone.close()


@pytest.mark.long
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_ranks_share_a_layer_that_predicts_further_tokens(tmp_path: Path, pair: KvMemory, family: str) -> None:
    skip_stages(pair, "these refuse it by name")
    write_mtp(tmp_path, family)
    expected = drain(load_engine(tmp_path), several())
    model = load_model(ModelSpec("tiny", str(tmp_path), kv_tokens=1024, speculate="mtp"), host_of(pair), pair)
    try:
        check_all_drafts(model.engine)
        assert_same(drain(model.engine, several()), expected)
        counts = model.engine.load().drafts
        assert (counts.num_draft_tokens > 4, counts.num_failures) == (True, 0)
    finally:
        model.close()


def test_stages_refuse_a_drafter_with_weights_and_serve_the_next_model(pair: KvMemory) -> None:
    if pair.group is not None and pair.group.num_stages == 1:
        pytest.skip("of stages")
    with pytest.raises(CheckpointError, match="draft does not draft for a model in 2 stages"):
        load_model(ModelSpec("tiny", str(HERE), "float32", 1024, speculate=f"draft:{MINI}"), host_of(pair), pair)
    model = load_model(ModelSpec("tiny", str(HERE), "float32", 1024), host_of(pair), pair)
    assert one(model.engine, submit("a", random_prompt(9, seed=1))).finish_reason == "length"
    model.close()


@pytest.mark.parametrize("words", [f"draft:{MINI}"])
def test_a_rank_that_is_lost_while_tokens_are_guessed_is_no_drafters_failure(
    pair: KvMemory, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_stages(pair, "these refuse it by name")
    model = load_model(ModelSpec("tiny", str(HERE), "float32", 1024, speculate=words), host_of(pair), pair)
    try:
        check_all_drafts(model.engine)

        def lost(step: object) -> None:
            raise RankLostError("rank 1 is gone")

        monkeypatch.setattr(model.engine.speculation.model._runner, "forward", lost)
        model.engine.submit(submit("a", random_prompt(9, seed=1)))
        with pytest.raises(RankLostError):
            drain(model.engine, [])
        assert model.engine.load().drafts.num_failures == 0
    finally:
        model.close()


@pytest.mark.long
@pytest.mark.parametrize("family", [DENSE, WINDOWS, SPARSE, LATENT, CHUNKS])
def test_preempted_sequences_continue_with_the_same_tokens(tmp_path: Path, pair: KvMemory, family: str) -> None:
    write_family(tmp_path, family)
    expected = drain(load_engine(tmp_path), several())
    with loaded(tmp_path, pair) as model:
        assert_same(drain_preempting(model.engine, several()), expected)
        assert model.engine.scheduler.counts.preemptions > 0


def test_steps_that_overlap_feed_every_rank_the_first_ones_tokens(tmp_path: Path, pair: KvMemory) -> None:
    skip_stages(pair, "there a sequence waits for its token")
    write_family(tmp_path, DENSE)
    expected = drain(load_engine(tmp_path), several(temperature=0.8, seed=3))
    with loaded(tmp_path, pair) as model:
        model.engine.runner.depth = 2
        assert_same(drain(model.engine, several(temperature=0.8, seed=3)), expected)


def test_prompts_in_chunks_and_beside_decodes_are_the_same(tmp_path: Path, pair: KvMemory) -> None:
    write_family(tmp_path, WINDOWS)
    expected = drain(load_engine(tmp_path), several())
    with loaded(tmp_path, pair, max_num_batched_tokens=16) as model:
        assert_same(drain(model.engine, several()), expected)


@pytest.mark.parametrize("stages", [1, 2])
def test_all_ranks_parts_of_a_block_are_kept_in_the_tiers_and_come_back(tmp_path: Path, stages: int) -> None:
    write_family(tmp_path / "model", DENSE)
    prompt = random_prompt(96, seed=1)
    expected = one(load_engine(tmp_path / "model"), submit("a", prompt))
    host = replace(group_of(2, stages=stages), kv_host_bytes=8 << 20, kv_host_dir=str(tmp_path / "host"))
    (tmp_path / "host").mkdir()
    with group_memory(host) as memory:
        tiers = open_tiers(host)
        assert tiers is not None
        spec = ModelSpec("tiny", str(tmp_path / "model"), kv_tokens=256)
        first = load_model(spec, host, memory, tiers=tiers)
        first.engine.stats.rates.count = lambda *_: None
        assert one(first.engine, submit("a", prompt)).token_ids == expected.token_ids
        settle(first.engine)
        first.close()  # puts the model to sleep: it leaves the device
        again = load_model(spec, host, memory, tiers=tiers)
        again.engine.tiers.note_prefill_rate(1.0)  # so slow that fetching pays
        heard = one(again.engine, submit("b", prompt))
        assert heard.token_ids == expected.token_ids
        assert heard.num_cached_tokens == 80, "five blocks of sixteen tokens; the last token is always computed"
        again.close()
        tiers.close()


def settle(engine: Engine) -> None:
    engine.on_idle()
    engine.tiers.close()


def test_a_model_that_sleeps_leaves_every_rank_and_wakes_as_it_was(tmp_path: Path, pair: KvMemory) -> None:
    write_family(tmp_path, SPARSE)
    with loaded(tmp_path, pair) as model:
        before = drain(model.engine, several())
    with loaded(tmp_path, pair) as model:
        assert_same(drain(model.engine, several()), before)


@pytest.mark.long
def test_two_models_share_the_ranks_and_borrow_from_one_arena(tmp_path: Path, pair: KvMemory) -> None:
    write_family(tmp_path / "a", DENSE)
    write_family(tmp_path / "b", WINDOWS)
    host, engines = host_of(pair), []
    for name in ("a", "b"):
        model = load_model(ModelSpec(name, str(tmp_path / name)), host, pair)
        engines.append(model)
    try:
        for name, model in zip("ab", engines, strict=True):
            expected = drain(load_engine(tmp_path / name), several())
            messages = [replace(message, model=name) for message in several()]
            for message in messages:
                model.engine.submit(message)
            assert_same(drain(model.engine, []), expected)
    finally:
        for model in engines:
            model.close()


def test_a_sequence_whose_cache_is_damaged_ends_alone_and_its_blocks_are_scrubbed_everywhere(
    tmp_path: Path, pair: KvMemory
) -> None:
    write_family(tmp_path, DENSE)
    with loaded(tmp_path, pair) as model:
        engine = model.engine
        engine.submit(submit("a", random_prompt(40, seed=1), max_tokens=20))
        engine.step()
        runner_of(engine).kv_cache.view(runner_of(engine).layout.dtype).fill_(float("nan"))
        heard = drain(engine, [])["a"]
        assert heard.finish_reason == "error"
        engine.fail_all("engine_error", "the cache is in doubt")  # this zeroes all ranks' blocks
        expected = drain(load_engine(tmp_path), several())
        assert_same(drain(engine, several()), expected)


def test_messages_and_bytes_of_a_step_are_those_of_the_formula(tmp_path: Path, pair: KvMemory) -> None:
    from pilotlight.engine.planning.model_plan import read_model
    from pilotlight.engine.planning.parallelism import Parallelism, RankPlace
    from pilotlight.engine.planning.speed import exchanged

    skip_stages(pair, "of ranks that share matrices")
    write_family(tmp_path, DENSE)
    assert pair.links is not None
    assert pair.links.serving is not None
    with loaded(tmp_path, pair) as model:
        before = pair.links.serving.exchanged
        one(model.engine, submit("a", random_prompt(40, seed=1), max_tokens=1))
        after = pair.links.serving.exchanged
    planned = read_model(tmp_path, on_cpu=True)
    expected = exchanged(planned, RankPlace(Parallelism(tp=2)), tokens=40, rows=1)
    counted = tuple(b - a for a, b in zip(before, after, strict=True))
    assert counted == expected


def test_ranks_that_cannot_share_a_model_refuse_it_by_name_and_serve_the_next(tmp_path: Path, pair: KvMemory) -> None:
    skip_stages(pair, "these share no heads")
    write_family(tmp_path / "nine", "gpt-oss, three of five experts")
    write_family(tmp_path / "six", DENSE)
    with pytest.raises(
        CheckpointError, match="tp is 2, and the model has 9 heads and 3 key-value heads; tp may be 1, 3, 9"
    ):
        load_model(ModelSpec("nine", str(tmp_path / "nine")), host_of(pair), pair)
    with loaded(tmp_path / "six", pair) as model:
        assert one(model.engine, submit("a", random_prompt(9, seed=1))).finish_reason == "length"


def test_one_ranks_damaged_part_fails_the_load_and_names_the_rank(
    tmp_path: Path, pair: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path / "here_alone", DENSE)
    monkeypatch.chdir(tmp_path)  # the other rank keeps its working directory, where the model is missing
    with pytest.raises(CheckpointError, match=r"rank 1 cannot load its part: .*here_alone"):
        load_model(ModelSpec("tiny", "here_alone"), host_of(pair), pair)
    with loaded(tmp_path / "here_alone", pair) as model:
        assert one(model.engine, submit("a", random_prompt(9, seed=1))).finish_reason == "length"


def test_a_load_that_the_first_rank_cannot_end_leaves_nothing_on_the_others(
    tmp_path: Path, pair: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path, DENSE)

    def cut(self: object) -> None:
        raise CheckpointError("the disk is gone")

    sent, send = list[object](), RankGroup.send

    def note(self: RankGroup, order: object) -> None:
        sent.append(order)
        send(self, order)

    monkeypatch.setattr(WeightLoad, "run", cut)
    monkeypatch.setattr(RankGroup, "send", note)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        load_model(ModelSpec("tiny", str(tmp_path)), host_of(pair), pair)
    assert sent[-1] == DropModel("tiny")
    monkeypatch.undo()
    with loaded(tmp_path, pair) as model:
        assert one(model.engine, submit("a", random_prompt(9, seed=1))).finish_reason == "length"


def test_a_packed_model_is_refused_by_name(tmp_path: Path, pair: KvMemory) -> None:
    write_family(tmp_path / "model", DENSE)
    packed_into(tmp_path / "packed", tmp_path / "model")
    with pytest.raises(CheckpointError, match="packed is packed, so ranks cannot share its tensors"):
        load_model(ModelSpec("tiny", str(tmp_path / "packed")), host_of(pair), pair)


@pytest.mark.long
def test_adapters_are_those_of_one_rank(tmp_path: Path, pair: KvMemory) -> None:
    model = write_family(tmp_path / "base", DENSE)
    directories = [None, *(tmp_path / f"{i}" for i in range(3))]
    for i, directory in enumerate(directories[1:]):
        assert directory is not None
        write_adapter(directory, model, seed=i, rank=2 + 9 * i)
    messages = [adapted(message, directory) for message, directory in zip(several(), directories, strict=True)]
    expected = drain(load_engine(tmp_path / "base"), messages)
    with loaded(tmp_path / "base", pair, adapter_slots=2) as shared:
        assert_same(drain(shared.engine, messages), expected)
        assert_same(drain(shared.engine, messages), expected)


def test_ranks_share_a_cache_in_fp8(tmp_path: Path, pair: KvMemory) -> None:
    write_family(tmp_path, DENSE)
    asked = [submit(f"s{i}", random_prompt(20 + 7 * i, seed=i), max_tokens=12) for i in range(4)]
    expected = drain(load_engine(tmp_path, kv_dtype="fp8"), asked)
    model = load_model(ModelSpec("tiny", str(tmp_path), kv_tokens=1024, kv_dtype="fp8"), host_of(pair), pair)
    heard = drain(model.engine, asked)
    model.close()
    assert {name: one.token_ids for name, one in heard.items()} == {n: one.token_ids for n, one in expected.items()}
