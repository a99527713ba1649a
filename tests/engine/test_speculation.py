"""All drafters with all options and interruptions of sequences: tokens are those without drafts (invariant I9). The embedded model computes in fp32,
in which verification gives a token the same logits as decoding.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Constraint, HostConfig, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.drafting.speculator import Speculator
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.text.formats.answer_format import raw_parser
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.runtime.dispatch.sequences import decode_sequence, prefill_sequence
from pilotlight.runtime.generation.output_processor import OutputProcessor
from tests.engine.conftest import make_transfers_pay
from tests.engine.driver import Heard, drain, drain_preempting, load_engine, submit
from training.ember.chat import HERE

pytestmark = pytest.mark.long

LOOKUPS = ("suffix", "grammar", "grammar,suffix")
WITH_WEIGHTS = (f"draft:{HERE / 'mini'}", f"suffix,eagle3:{HERE / 'eagle3'}")
DRAFTERS = ("grammar,suffix", *WITH_WEIGHTS)
NAMED = dict(zip(("grammar,suffix", "draft", "suffix,eagle3"), DRAFTERS, strict=True))
EACH = pytest.mark.parametrize("drafters", NAMED.values(), ids=NAMED)
TOKENIZER = Tokenizer.from_directory(HERE)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "city": {"enum": ["Oslo", "Lima"]}, "age": {"type": "integer"}},
    "required": ["name", "city", "age"],
    "additionalProperties": False,
}  # fmt: skip
JSON = Constraint("json_schema", json.dumps(PERSON))
CALL = Constraint(
    "lark",
    'start: <tool_call> "\\n" call "\\n" </tool_call>\ncall: %json '
    + json.dumps({"type": "object", "properties": {"name": {"const": "find"}, "arguments": PERSON},
                  "required": ["name", "arguments"], "additionalProperties": False}),
)  # fmt: skip
NAMES = ("Anna", "Bram", "Cleo", "Dora", "Emil")


def question(draw: random.Random) -> list[int]:
    name, city = draw.choice(NAMES), draw.choice(("Oslo", "Lima", "Paris"))
    fact = f"{name} lives in {city} and is {draw.randint(10, 90)} years old."
    asked = draw.choice(
        (f"Repeat: {fact} {fact}", f"Tell me a short story about {name}.", f"{fact} Where does {name} live?")
    )
    return list(TOKENIZER.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"))


def requests(number: int, seed: int = 1, **changes: Any) -> list[Submit]:
    """Return greedy and sampled requests, with and without a grammar."""
    draw, made = random.Random(seed), []
    for i in range(number):
        options: dict[str, Any] = {
            "max_tokens": draw.randint(8, 40),
            "ignore_eos": False,
            "seed": draw.randrange(2**62),
        }
        if i % 3:
            options |= {"temperature": draw.uniform(0.7, 1.3), "top_p": draw.choice((1.0, 0.9))}
        message = submit(f"{seed}-{i}", question(draw), salt=draw.choice((b"a", b"b")), **options | changes)
        made.append(replace(message, constraint=(None, None, JSON, CALL)[i % 4]))
    return made


def ember(speculate: str = "off", **options: Any) -> Engine:
    return load_engine(HERE, dtype="float32", speculate=speculate, **{"kv_tokens": 4096, **options})


@functools.cache
def told_without(number: int, **changes: Any) -> dict[str, Heard]:
    engine = ember()
    try:
        told = drain(engine, requests(number, **changes), max_steps=20_000)
        assert all(heard.error is None for heard in told.values())
        return told
    finally:
        engine.close()


def assert_same(found: dict[str, Heard], expected: dict[str, Heard]) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        ours = found[name]
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason), name
        for mine, wanted in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.logprob == pytest.approx(wanted.logprob, rel=3e-5, abs=1e-4), (
                "log-probabilities may differ only by rounding"
            )
            assert [token for token, _ in mine.top] == [token for token, _ in wanted.top]


def assert_drafted(engine: Engine, at_least: int = 20) -> None:
    counts = engine.load().drafts
    assert counts.num_accepted_tokens >= at_least, counts
    assert counts.num_failures == 0
    assert sum(counts.accepted_per_position) == counts.num_accepted_tokens <= counts.num_draft_tokens
    assert isinstance(engine.speculation, Speculator)
    assert not engine.speculation._states, "ended sequences must leave no state"


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "overlapped steps": ({"depth": 2}, {}),
    "chunked prompts": ({"max_num_batched_tokens": 48, "max_num_seqs": 5}, {}),
    "one at a time": ({"max_num_seqs": 1}, {}),
    "log-probabilities": ({}, {"num_logprobs": 3}),
    "penalties and biases": (
        {"depth": 2}, {"frequency_penalty": 0.4, "repetition_penalty": 1.1, "logit_bias": ((40, 3.0), (300, -100.0))}
    ),
    "three tokens": ({}, {"max_tokens": 3}),
    "two tokens, overlapped": ({"depth": 2}, {"max_tokens": 2}),
    "stop tokens": ({}, {"stop_token_ids": (TOKENIZER.encode(".")[0],)}),
    "least tokens": ({"depth": 2}, {"min_tokens": 12}),
    "the prompt's log-probabilities": ({}, {"num_logprobs": 1, "prompt_logprobs": True}),
}  # fmt: skip
# The first option is tested with each drafter, each other option with one drafter in turn. All other pairs are slow tests.
IN_TURN = [
    pytest.param(drafters, *asked, id=f"{name}-{drafter}", marks=[] if i == 0 or j == i % 3 else pytest.mark.slow)
    for i, (name, asked) in enumerate(ASKED.items())
    for j, (drafter, drafters) in enumerate(NAMED.items())
]


@pytest.mark.parametrize(("drafters", "options", "changes"), IN_TURN)
def test_tokens_are_those_without_drafts(drafters: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    engine = ember(drafters, **options)
    assert_same(drain(engine, requests(12, **changes)), told_without(12, **changes))
    assert_drafted(engine, at_least=0 if changes.get("max_tokens", 9) < 4 or "stop_token_ids" in changes else 8)
    engine.close()


@EACH
@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_that_lose_their_blocks_continue_as_they_would_have(drafters: str, depth: int) -> None:
    engine = ember(drafters, depth=depth)
    assert_same(drain_preempting(engine, requests(12)), told_without(12))
    assert engine.scheduler.counts.preemptions > 0
    assert_drafted(engine, at_least=4)
    engine.close()


@EACH
def test_a_cached_prefix_may_end_in_what_drafts_have_left(drafters: str) -> None:
    engine, first = ember(drafters), requests(12)
    told = drain(engine, first)
    assert_same(told, told_without(12))
    longer = [
        replace(message, sequence_id=f"{message.sequence_id} on", constraint=None, num_delivered_tokens=0,
                prompt_token_ids=(*message.prompt_token_ids, *told[message.sequence_id].token_ids, 40, 41))
        for message in first
    ]  # fmt: skip
    plain = ember()
    expected = drain(plain, longer)
    found = drain(engine, longer)
    assert_same(found, expected)
    assert sum(heard.num_cached_tokens or 0 for heard in found.values()) > 200
    plain.close()
    engine.close()


@EACH
def test_blocks_that_come_back_from_a_tier_hold_no_refused_draft(
    drafters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_transfers_pay(monkeypatch)
    for host, kept_in in (("host", "nothing"), ("host", "host"), ("another host", "disk")):
        tiers = open_tiers(
            HostConfig(
                kv_host_bytes=32 << 20,
                kv_host_dir=str(tmp_path / host),
                kv_disk_bytes=64 << 20,
                kv_disk_dir=str(tmp_path / "disk"),
            )
        )
        assert tiers is not None
        assert tiers.disk is not None
        assert tiers.disk.wait_until_idle(10), "the disk is being looked through"
        engine = ember(drafters, tiers=tiers)
        assert isinstance(engine.tiers, TieredCache)
        assert_same(drain(engine, requests(12)), told_without(12))
        counts = engine.scheduler.counts
        assert (counts.prefix_host_hits > 200) == (kept_in == "host")
        assert (counts.prefix_disk_hits > 200) == (kept_in == "disk")
        assert_drafted(engine, at_least=8)
        assert engine.tiers.wait_until_idle(10)
        engine.close()
        tiers.close()


@EACH
def test_samples_of_one_prompt_differ_as_they_would_have(drafters: str) -> None:
    def samples() -> list[Submit]:
        first = requests(3)[2]
        sampling = replace(first.sampling, temperature=1.2, max_tokens=40)
        return [
            replace(first, sequence_id=f"n{i}", sampling=replace(sampling, seed=i), leader="n0" if i else None)
            for i in range(5)
        ]

    engine, plain = ember(drafters), ember()
    assert_same(drain(engine, samples()), drain(plain, samples()))
    assert_drafted(engine, at_least=4)
    engine.close()
    plain.close()


@EACH
def test_any_router_that_continues_an_answer_sends_the_rest_of_it(drafters: str) -> None:
    engine, whole = ember(drafters), told_without(12)
    messages = []
    for message in requests(12):
        told = whole[message.sequence_id].token_ids
        if (cut := len(told) // 2) and len(told) < message.sampling.max_tokens:
            sampling = replace(message.sampling, max_tokens=message.sampling.max_tokens - cut)
            prompt = (*message.prompt_token_ids, *told[:cut])
            messages.append(replace(message, prompt_token_ids=prompt, sampling=sampling, num_delivered_tokens=cut))
    assert len(messages) > 3
    for name, heard in drain(engine, messages).items():
        told = whole[name].token_ids
        assert heard.token_ids == told[len(told) // 2 :], name
    engine.close()


@pytest.mark.parametrize("drafters", [*DRAFTERS[:2], pytest.param(DRAFTERS[2], marks=pytest.mark.slow)], ids=NAMED)
def test_steps_that_check_drafts_are_recorded_and_replayed(drafters: str) -> None:
    engine = ember(drafters, max_num_seqs=2)
    assert isinstance(engine.runner, ModelRunner)
    graphs = engine.runner.graphs
    assert graphs is not None
    for seed in (1, 2):
        assert_same(drain(engine, requests(12, seed=seed)), told_without(12, seed=seed))
    if graphs.num_graphs:  # a CPU without the C library records none
        assert any(shape.longest > 1 for shape in graphs.recorded)
    engine.close()


@EACH
def test_a_prompt_that_another_host_computes_is_answered_with_drafts(
    drafters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_transfers_pay(monkeypatch)

    def tiers(role: str) -> Any:
        address = f"ipc://{tmp_path}/{role}.peers"
        return open_tiers(HostConfig(kv_host_bytes=8 << 20, kv_host_dir=str(tmp_path / role), peer_address=address))

    opened = [tiers("prefill"), tiers("decode")]
    prefill, decode = (ember(drafters, tiers=each) for each in opened)
    address = f"ipc://{tmp_path}/prefill.peers"
    for message in requests(12)[:6]:
        leg = prefill_sequence(message, 16)
        prefill.submit(leg)
        decode.submit(decode_sequence(message, leg, address, 30.0))
    heard: dict[str, Heard] = {}
    while decode.has_work:
        for engine in (prefill, decode):
            if engine.has_work:
                engine.step()
            engine.on_idle()
        for output in decode.sequences.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
    expected = told_without(12)
    assert_same(heard, {name: expected[name] for name in heard})
    assert len(heard) == 6
    assert any(one.num_fetched_tokens for one in heard.values())
    assert_drafted(decode, at_least=4)
    prefill.close()
    decode.close()
    for each in opened:
        each.close()


def test_a_tenant_s_answers_are_drafted_for_that_tenant_alone() -> None:
    engine, asked = ember("suffix"), [40, 41, 42, *question(random.Random(5))]
    text = TOKENIZER.encode("Anna bought seven green lamps in Lima.")

    def drafted(salt: bytes) -> int:
        before = engine.load().drafts.num_draft_tokens
        drain(engine, [submit(f"x{salt!r}", asked, salt=salt, max_tokens=30)])
        return engine.load().drafts.num_draft_tokens - before

    alone = drafted(b"a")
    drain(engine, [submit("a", list(text), salt=b"c", max_tokens=4)])
    assert drafted(b"b") == alone, "another tenant gets no drafts from it"
    assert drafted(b"a") > alone
    engine.close()


@EACH
def test_a_stop_string_among_drafts_ends_the_text_where_it_would_have(drafters: str) -> None:
    def texts(engine: Engine) -> list[tuple[str, int, str | None]]:
        processors = {
            message.sequence_id: OutputProcessor(raw_parser(TOKENIZER), stop=("lives", " you"))
            for message in requests(12)
        }
        for message in requests(12):
            engine.submit(message)
        while engine.has_work:
            engine.step()
            for output in engine.sequences.take_outputs():
                if processors[output.sequence_id].finish_reason is None:
                    processors[output.sequence_id].push(output)
        engine.close()
        taken = [(made.take(), made.completion_tokens) for made in processors.values()]
        return [(delta.text, tokens, delta.finish_reason) for delta, tokens in taken if delta]

    found = texts(ember(drafters))
    assert found == texts(ember())
    assert sum(reason == "stop" for _, _, reason in found) > 3


def test_outputs_say_how_many_drafts_were_checked_and_right() -> None:
    engine = ember("grammar,suffix")
    for message in requests(12):
        engine.submit(message)
    drafted = accepted = 0
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            drafted, accepted = drafted + output.num_drafted, accepted + output.num_accepted
            assert output.num_accepted <= min(output.num_drafted, len(output.token_ids))
            assert len(output.token_ids) <= output.num_accepted + 1
    counts = engine.load().drafts
    assert (drafted, accepted) == (counts.num_draft_tokens, counts.num_accepted_tokens)
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_leaves_nothing_of_its_sequences(depth: int) -> None:
    engine = ember("grammar,suffix", depth=depth)
    for message in requests(12):
        engine.submit(message)
    for _ in range(8):
        engine.step()
    engine.fail_all("engine_error", "as if the device had failed")
    engine.sequences.take_outputs()
    assert isinstance(engine.speculation, Speculator)
    assert not engine.speculation._states
    assert_same(drain(engine, requests(12)), told_without(12))
    engine.close()


def is_tie(batch: list[Submit], name: str, token_ids: list[int]) -> bool:
    """Tell whether another batch size gives these tokens without drafts. If so, two tokens tied except for the last bits of a sum."""
    for size in range(1, 17):
        engine = ember(kv_tokens=8192, max_num_seqs=size)
        found = drain(engine, batch, max_steps=20_000)[name].token_ids
        engine.close()
        if found == token_ids:
            return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafters", [*LOOKUPS, *WITH_WEIGHTS])
def test_ten_thousand_random_requests_are_answered_with_the_same_tokens(drafters: str) -> None:
    """A handful of requests may differ, all by ties."""
    draw, num_ties = random.Random(drafters), 0
    plain, engine = ember(kv_tokens=8192), ember(drafters, kv_tokens=8192, max_num_seqs=16)
    for seed in range(1000, 1105):
        batch = requests(32, seed=seed, num_logprobs=draw.choice((None, None, 2)))
        engine.runner.depth = draw.choice((1, 2))
        found, expected = (drain(one, batch, max_steps=20_000) for one in (engine, plain))
        for name in [name for name in found if found[name].token_ids != expected[name].token_ids]:
            assert is_tie(batch, name, found.pop(name).token_ids), f"{name} has tokens that no batch has without drafts"
            del expected[name]
            num_ties += 1
        assert_same(found, expected)
    assert num_ties <= 3
    assert_drafted(engine, at_least=1000)
    plain.close()
    engine.close()
