"""One host computes prompts and another one decodes: tokens are those of a single host, for all requests and whatever happens to the blocks
(invariant I9)."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from pilotlight.engine.api.protocol import PRIORITIES, Constraint, HostConfig, Submit
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.shared_tiers import SharedTiers, open_tiers
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.runtime.dispatch.dispatcher import can_hand_over
from pilotlight.runtime.dispatch.sequences import decode_sequence, prefill_sequence
from tests.adapters import adapted, write_adapter
from tests.checkpoints import write_tokenizer
from tests.engine.driver import Heard, drain, load_engine, one, random_prompt, submit
from tests.engine.families import MODELS, SWEPT, write_family
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("always_worth_it")
FAMILIES = (
    "llama, six heads over two",
    "mistral, window",
    "qwen3-moe, three of five experts, renormalised",
    "qwen3-moe, one dense layer, biased, window",
    "deepseek-v3, three experts in two of four groups, yarn",
    "scout, chunks of 16, one of five experts",
)
BLOCK_SIZE = 16


@pytest.fixture(
    scope="module",
    params=[
        *FAMILIES,
        *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in FAMILIES),
        *SWEPT,
    ],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("family")
    write_family(path, request.param)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    write_family(path, FAMILIES[0])
    return path


class Pair:
    """A prefill host and a decode host, with separate tiers."""

    def __init__(self, model: Path, place: Path, depth: int = 1, **limits: Any) -> None:
        self.model = model
        self.address = f"ipc://{place}/prefill.peers"
        self.tiers = [self._open(place, "prefill"), self._open(place, "decode")]
        self.prefill, self.decode = (
            self._load(role, tiers, depth=depth, **limits)
            for role, tiers in zip(("prefill", "decode"), self.tiers, strict=True)
        )

    def _load(self, role: str, tiers: SharedTiers, **options: Any) -> Engine:
        return load_engine(self.model, tiers=tiers, **options)

    def _open(self, place: Path, role: str) -> SharedTiers:
        config = HostConfig(
            kv_host_bytes=8 << 20, kv_host_dir=str(place / role), peer_address=f"ipc://{place}/{role}.peers"
        )
        tiers = open_tiers(config)
        assert tiers is not None
        assert tiers.peers is not None
        return tiers

    def split(self, message: Submit, within_s: float = 30.0) -> tuple[Submit, Submit]:
        assert can_hand_over(message)
        leg = prefill_sequence(message, BLOCK_SIZE)
        return leg, decode_sequence(message, leg, self.address, within_s)

    def answer(self, messages: list[Submit], preempts_every: int = 0) -> dict[str, Heard]:
        """Submit requests, handing prompts over; step both hosts until all sequences have ended. Return the outputs."""
        heard: dict[str, Heard] = {}
        for message in messages:
            if can_hand_over(message):
                leg, message = self.split(message)
                self.prefill.submit(leg)
            self.decode.submit(message)
        step = 0
        while step == 0 or self.decode.has_work or self.prefill.has_work:
            step += 1
            for engine, into in ((self.prefill, {}), (self.decode, heard)):
                stepped = engine.step() if engine.has_work else False
                for output in engine.sequences.take_outputs():
                    into.setdefault(output.sequence_id, Heard()).hear(output)
                engine.on_idle()
            if preempts_every and step % preempts_every == 0:
                self.decode.scheduler.preemption.preempt_youngest(keep_oldest=False)
            if not stepped:
                time.sleep(0.001)
            assert step < 20_000, "the sequences do not end"
        return heard

    def assert_nothing_is_left(self) -> None:
        for engine, tiers in zip((self.prefill, self.decode), self.tiers, strict=True):
            assert engine.scheduler.pool.num_held == 0
            engine.scheduler.pool.assert_consistent()
            assert isinstance(engine.tiers, TieredCache)
            assert engine.tiers.wait_until_idle(10)
            assert tiers.peers is not None
            wait_until_zero(tiers)
            until(lambda held=engine.tiers: held.load().num_pinned == 0, "reads that were cancelled are unpinned", 10)
            load = engine.load()
            assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)

    def close(self) -> None:
        for engine, tiers in zip((self.prefill, self.decode), self.tiers, strict=True):
            engine.close()
            tiers.close()


def wait_until_zero(tiers: SharedTiers) -> None:
    peers = tiers.peers
    assert peers is not None

    def nothing_is_held() -> bool:
        return not (peers.server.num_leased or peers.reader.num_open or tiers.host.num_pinned)

    until(nothing_is_held, "every lease, read and pin has ended")


@pytest.fixture
def pair(directory: Path, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(directory, tmp_path, max_num_batched_tokens=48)
    yield made
    made.assert_nothing_is_left()
    made.close()


@pytest.fixture
def dense_pair(dense: Path, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(dense, tmp_path, max_num_batched_tokens=48)
    yield made
    made.assert_nothing_is_left()
    made.close()


def alone(model: Path, messages: list[Submit]) -> dict[str, Heard]:
    return drain(load_engine(model), messages)


PROMPT = random_prompt(150, seed=1)
SHOWN: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "sampled": [{"temperature": 0.8, "top_p": 0.9, "seed": 11}],
    "penalties and a bias": [
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((7, 3.0),)}
    ],
    "log-probabilities": [{"num_logprobs": 3}],
    "three of one prompt": [{"temperature": 1.0, "seed": i} for i in range(3)],
}


@pytest.mark.long
@pytest.mark.parametrize("what", SHOWN)
def test_tokens_are_those_of_one_host(pair: Pair, what: str) -> None:
    messages = [
        submit(f"s{i}", PROMPT, leader="s0" if i else None, max_tokens=12, **sampling)
        for i, sampling in enumerate(SHOWN[what])
    ]
    expected = alone(pair.model, messages)
    heard = pair.answer(messages)
    for name, one_host in expected.items():
        assert heard[name].token_ids == one_host.token_ids, name
        logprobs = [each.logprob for each in heard[name].logprobs]
        assert logprobs == pytest.approx([each.logprob for each in one_host.logprobs], abs=1e-4)
    first = heard["s0"]
    assert first.num_cached_tokens == 144, "all full blocks before the last token must be found"
    assert first.num_fetched_tokens == 144, "another host must have computed them"
    assert pair.decode.load().prefix_peer_hits == 144
    assert pair.decode.load().prompt_tokens <= (150 - 144) * len(messages), "the decode host computed the rest alone"


@pytest.mark.long
def test_a_grammar_holds_where_the_prompt_came_from_elsewhere(pair: Pair) -> None:
    messages = [
        replace(
            submit(f"s{i}", random_prompt(100, seed=20 + i), max_tokens=30, **more),
            constraint=Constraint("regex", "[ab]{5}"),
        )
        for i, more in enumerate(({}, {"temperature": 0.9, "seed": 5}))
    ]
    expected = alone(pair.model, messages)
    heard = pair.answer(messages)
    words = Tokenizer.from_file(str(pair.model / "tokenizer.json"))
    for name, one_host in expected.items():
        assert heard[name].token_ids == one_host.token_ids
        assert re.match("[ab]{5}", words.decode(heard[name].token_ids)), heard[name].error
        assert heard[name].num_fetched_tokens == 96


def test_an_adapters_prompt_comes_from_elsewhere_for_that_adapter_alone(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", FAMILIES[0])
    write_adapter(tmp_path / "a", base)
    pair = Pair(tmp_path / "base", tmp_path, max_num_batched_tokens=48)
    messages = [adapted(submit(f"s{i}", PROMPT, max_tokens=10), tmp_path / "a" if i else None) for i in range(2)]
    expected = {message.sequence_id: one(load_engine(pair.model), message) for message in messages}
    assert expected["s0"].token_ids != expected["s1"].token_ids
    for message in messages:
        heard = pair.answer([message])[message.sequence_id]
        assert heard.token_ids == expected[message.sequence_id].token_ids
        assert heard.num_fetched_tokens == 144, "only blocks of the same adapter may be fetched"
    pair.assert_nothing_is_left()
    pair.close()


@pytest.mark.long
def test_what_lies_in_the_other_hosts_tiers_is_handed_over(pair: Pair) -> None:
    message = submit("a", PROMPT, max_tokens=8)
    expected = alone(pair.model, [message])["a"]
    one(pair.prefill, submit("before", PROMPT, max_tokens=1))
    assert isinstance(pair.prefill.tiers, TieredCache)
    assert pair.prefill.tiers.wait_until_idle(10)
    for i in range(9):  # evict the prompt from the device
        one(pair.prefill, submit(f"other{i}", random_prompt(140, seed=50 + i), max_tokens=1))
    heard = pair.answer([message])["a"]
    assert heard.token_ids == expected.token_ids
    assert heard.num_fetched_tokens == 144
    assert pair.prefill.load().prefix_host_hits == 144


@pytest.mark.long
def test_preempted_sequences_continue_with_the_blocks_they_fetched(pair: Pair) -> None:
    messages = [submit(f"s{i}", random_prompt(90 + 7 * i, seed=i), max_tokens=10) for i in range(4)]
    expected = alone(pair.model, messages)
    heard = pair.answer(messages, preempts_every=9)
    assert {name: heard[name].token_ids for name in expected} == {n: e.token_ids for n, e in expected.items()}


@pytest.mark.long
def test_a_conversation_continues_and_its_turns_share_blocks(pair: Pair) -> None:
    first = pair.answer([submit("a", PROMPT, max_tokens=20)])["a"]
    longer = [*PROMPT, *first.token_ids, *random_prompt(60, seed=9)]
    second = submit("b", longer, max_tokens=8)
    expected = alone(pair.model, [second])["b"]
    heard = pair.answer([second])["b"]
    assert heard.token_ids == expected.token_ids
    assert heard.num_cached_tokens == (len(longer) - 1) // 16 * 16


def test_steps_that_overlap_fetch_as_well(dense: Path, tmp_path: Path) -> None:
    pair = Pair(dense, tmp_path, depth=2, max_num_batched_tokens=48)
    messages = [submit(f"s{i}", random_prompt(100 + i, seed=i), max_tokens=10, temperature=0.9) for i in range(5)]
    expected = alone(dense, messages)
    heard = pair.answer(messages)
    assert {name: heard[name].token_ids for name in expected} == {n: e.token_ids for n, e in expected.items()}
    pair.assert_nothing_is_left()
    pair.close()


def test_prompt_logprobs_and_parallel_samples_are_not_handed_over() -> None:
    assert can_hand_over(submit("a", PROMPT))
    assert not can_hand_over(submit("a", PROMPT, prompt_logprobs=True))
    assert not can_hand_over(submit("a", PROMPT, leader="b"))
    assert not can_hand_over(submit("a", PROMPT, pooling="mean"))


def test_a_prefix_that_the_prefill_host_has_only_on_its_device_is_handed_over(dense_pair: Pair) -> None:
    pair = dense_pair
    one(pair.prefill, submit("before", PROMPT, max_tokens=1))
    assert isinstance(pair.prefill.tiers, TieredCache)
    assert pair.prefill.tiers.wait_until_idle(10)
    host = pair.tiers[0].host
    host.forget(list(host._slots))
    heard = pair.answer([submit("a", PROMPT, max_tokens=6)])["a"]
    assert heard.num_cached_tokens == heard.num_fetched_tokens == 144
    assert pair.prefill.load().prompt_tokens == 150 + 1, "only the last token may be computed twice"


def test_a_prompt_from_elsewhere_does_not_wait_for_prompts_computed_here(dense_pair: Pair) -> None:
    """Else the time that the other host saves would be lost again in the queue."""
    pair, long = dense_pair, submit("long", random_prompt(240, seed=41), max_tokens=2)
    leg, waiting = pair.split(submit("fetched", PROMPT, max_tokens=2))
    pair.decode.submit(long)
    pair.decode.submit(waiting)
    first: list[str] = []
    pair.decode.step()
    assert pair.decode.scheduler.waiting.awaiting, "it asks for its blocks at once, although the step is full"
    drain(pair.prefill, [leg])
    while pair.decode.has_work:
        for awaited in list(pair.decode.scheduler.waiting.awaiting.values()):
            until(lambda awaited=awaited: awaited.is_done, "its blocks have come to this host, or to its device")
        pair.decode.step()
        first += [output.sequence_id for output in pair.decode.sequences.take_outputs() if output.token_ids]
    assert [*dict.fromkeys(first)] == ["fetched", "long"]


def test_prompts_from_elsewhere_keep_their_order_of_priorities(dense_pair: Pair) -> None:
    pair = dense_pair
    legs, waiting = zip(
        *[pair.split(submit(f"{p}", random_prompt(100, seed=p), priority=p)) for p in (8, -8)], strict=True
    )
    drain(pair.prefill, list(legs))
    for message in waiting:
        pair.decode.submit(message)
    priorities = [sequence.priority for sequence in pair.decode.scheduler.waiting.ready]
    assert priorities == sorted(priorities, reverse=True)
    assert max(priorities) < min(PRIORITIES), "they are before all others"
    drain(pair.decode, [])


def test_what_never_comes_is_computed_in_its_turn(dense_pair: Pair) -> None:
    pair, long = dense_pair, submit("long", random_prompt(240, seed=42), max_tokens=2)
    _, waiting = pair.split(submit("fetched", PROMPT, max_tokens=2), within_s=0.0)
    pair.decode.submit(long)
    pair.decode.submit(waiting)
    first: list[str] = []
    while pair.decode.has_work:
        pair.decode.step()
        first += [output.sequence_id for output in pair.decode.sequences.take_outputs() if output.token_ids]
    assert [*dict.fromkeys(first)] == ["long", "fetched"]


def test_what_never_comes_is_computed_by_its_deadline(dense_pair: Pair) -> None:
    message = submit("a", PROMPT, max_tokens=6)
    _, waiting = dense_pair.split(message, within_s=0.2)
    dense_pair.prefill.tiers.begin_hand_over(waiting.fetch_from.hand_over)
    expected = alone(dense_pair.model, [message])["a"]
    began = time.monotonic()
    heard = one(dense_pair.decode, waiting)
    assert time.monotonic() - began >= 0.2
    assert (heard.token_ids, heard.num_cached_tokens) == (expected.token_ids, 0)


@pytest.mark.long
@pytest.mark.parametrize("end", ["aborted", "never submitted", "its host is gone"])
def test_a_prefill_that_ends_early_costs_time_and_no_token(dense_pair: Pair, end: str) -> None:
    pair = dense_pair
    message = submit("a", PROMPT, max_tokens=6)
    leg, waiting = pair.split(message)
    expected = alone(pair.model, [message])["a"]
    pair.decode.submit(waiting)
    if end != "never submitted":
        pair.prefill.submit(leg)
        pair.prefill.step()  # computes 48 tokens of the prompt
        pair.prefill.on_idle()
        pair.prefill.sequences.abort(leg.sequence_id)
        pair.prefill.sequences.take_outputs()
    if end == "its host is gone":
        assert pair.tiers[0].peers is not None
        pair.tiers[0].peers.server.close()
        pair.tiers[0].peers.server.close = lambda: None
    heard = drain(pair.decode, [], max_steps=20_000)["a"]
    assert heard.token_ids == expected.token_ids
    if end == "aborted":
        assert heard.num_cached_tokens == heard.num_fetched_tokens == 48


def test_a_sequence_that_is_aborted_while_it_waits_leaves_nothing(dense_pair: Pair) -> None:
    leg, waiting = dense_pair.split(submit("a", PROMPT))
    dense_pair.prefill.submit(leg)
    dense_pair.decode.submit(waiting)
    dense_pair.decode.step()
    assert dense_pair.decode.load().waiting == 1
    dense_pair.decode.sequences.abort("a")
    assert dense_pair.decode.sequences.take_outputs()[0].finish_reason == "abort"
    dense_pair.prefill.sequences.abort(leg.sequence_id)
    dense_pair.prefill.sequences.take_outputs()


def test_another_tenant_never_gets_the_blocks(dense_pair: Pair) -> None:
    pair = dense_pair
    pair.answer([submit("a", PROMPT, salt=b"one", max_tokens=4)])
    message = submit("b", PROMPT, salt=b"another", max_tokens=4)
    heard = one(pair.decode, message)
    assert heard.num_cached_tokens == 0
    leg, waiting = pair.split(message, within_s=0.3)
    other = replace(leg, salt=b"one")  # the prefill host computes for another tenant
    pair.prefill.submit(other)
    pair.decode.submit(replace(waiting, sequence_id="c", salt=b"a third"))
    drain(pair.prefill, [])
    assert drain(pair.decode, [], max_steps=20_000)["c"].num_cached_tokens == 0


def test_a_host_without_tiers_computes_blocks_that_it_should_fetch(dense: Path) -> None:
    engine: Engine = load_engine(dense)
    leg = prefill_sequence(submit("a", PROMPT), BLOCK_SIZE)
    message = decode_sequence(submit("a", PROMPT, max_tokens=4), leg, "ipc:///nowhere", 10.0)
    assert one(engine, message).token_ids == one(load_engine(dense), submit("a", PROMPT, max_tokens=4)).token_ids
