"""Random schedules of arrivals and aborts on tiny pools, with steps in flight, drafts, penalties and log-probabilities. Every sequence ends with the
tokens that it gets alone, and no resource leaks.
"""

import math
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import currently_in_test_context, event, given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import SamplingParams, Submit, TokenLogprobs
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.pool.groups import Windows
from pilotlight.engine.kv.pool.layout import STATE_WINDOW
from pilotlight.engine.kv.tier_protocol import Tiers
from tests.engine.driver import Heard
from tests.engine.fake_drafter import FakeDrafter
from tests.engine.fake_runner import FakeRunner, fake_engine, next_penalised_token, next_token, prompt_logprobs_of


class Arrival(NamedTuple):
    step: int
    prompt_length: int
    family: int  # prompts of one family share a prefix
    max_tokens: int
    salt: bytes
    abort_after: int | None  # number of steps until it is aborted
    siblings: int  # further sequences of the same prompt
    priority: int
    prompt_logprobs: bool = False
    logprobs: bool = False
    is_penalised: bool = False
    stops_at: int | None = None  # position of the output token that stops it


class Shape(NamedTuple):
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    depth: int
    windows: Windows
    drafts: int | None = None  # seed of a drafter
    tick_s: float = 0.0  # advance of the clock each time it is read
    max_decode_delay_s: float = math.inf
    copies: int = 1  # ranks with separate sequences and as many blocks each
    has_states: bool = False  # whether a further group of layers has states


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt_length=st.integers(1, 40),
        family=st.integers(1, 2),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from([b"", b"a", b"b"]),
        abort_after=st.none() | st.integers(0, 25),
        siblings=st.integers(0, 3),
        priority=st.sampled_from([0, 0, -1, 5]),
        prompt_logprobs=st.booleans(),
        logprobs=st.booleans(),
        is_penalised=st.booleans(),
        stops_at=st.none() | st.integers(0, 19),
    ),
    min_size=1,
    max_size=10,
)
# The windows of each group of layers, None for full attention. One draw has a window of one token; two have no full attention.
windows = st.sampled_from([(None,), (None,), (None, 5), (None, 1, 9), (7,), (None, None, 30), (3, 12)])
shapes = st.builds(
    Shape,
    num_blocks=st.integers(2, 14),
    block_size=st.sampled_from([1, 3, 4, 16]),
    max_num_batched_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    depth=st.sampled_from([1, 2, 3]),
    windows=windows,
    drafts=st.none() | st.integers(0, 2**32),
    tick_s=st.sampled_from([0.0, 1.0]),
    max_decode_delay_s=st.sampled_from([math.inf, 0.0, 8.0]),
    copies=st.sampled_from([1, 1, 2, 3]),
    has_states=st.booleans(),
)


@pytest.mark.long
@given(shapes, arrivals)
@settings(max_examples=300, deadline=None)
def test_every_sequence_ends_rightly_and_every_block_returns(shape: Shape, plan: list[Arrival]) -> None:
    play_and_check(shape, plan)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@given(shapes, arrivals)
@settings(max_examples=20_000, deadline=None)
def test_every_sequence_ends_rightly_through_twenty_thousand_schedules(shape: Shape, plan: list[Arrival]) -> None:
    play_and_check(shape, plan)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@given(shapes.map(lambda shape: shape._replace(has_states=True)), arrivals)
@settings(max_examples=20_000, deadline=None)
def test_every_sequence_of_a_model_with_states_ends_rightly_through_twenty_thousand_schedules(
    shape: Shape, plan: list[Arrival]
) -> None:
    play_and_check(shape, plan)


def test_a_more_urgent_prompt_that_lacks_a_block_lets_the_older_one_that_holds_it_continue() -> None:
    older = Arrival(10, 8, 1, 9, b"", None, 0, priority=5, prompt_logprobs=True)
    urgent = Arrival(15, 17, 1, 9, b"", None, 0, priority=-1)
    play_and_check(Shape(11, 1, max_num_batched_tokens=1, max_num_seqs=2, depth=1, windows=(3, 12)), [older, urgent])


def play_and_check(shape: Shape, plan: list[Arrival]) -> None:
    engine, runner = make_engine(shape)
    heard = play(engine, plan)

    for i, arrival in enumerate(plan):
        for name in names(i, arrival):
            check(heard[name], arrival, engine.info.context_length)
    pool = engine.scheduler.pool
    assert pool.num_held == 0
    assert pool.num_available == shape.copies * shape.num_blocks * (len(shape.windows) + shape.has_states)
    assert max(runner.batch_tokens, default=0) <= shape.max_num_batched_tokens
    if currently_in_test_context():  # events for Hypothesis's statistics, if it runs the test
        event("preempted" if engine.scheduler.counts.preemptions else "not preempted")
        event("prefix hit" if engine.scheduler.counts.prefix_hits else "no prefix hit")
        event("drafts" if runner.num_drafts else "no drafts")


def make_engine(shape: Shape, make_tiers: Callable[[FakeRunner], Tiers] | None = None) -> tuple[Engine, FakeRunner]:
    depth, windows, drafts, tick_s, max_decode_delay_s, copies, has_states = shape[4:]
    return fake_engine(
        *shape[:4],
        depth=depth,
        make_tiers=make_tiers,
        clock=count(0.0, tick_s).__next__,
        max_decode_delay_s=max_decode_delay_s,
        speculation=None if drafts is None else FakeDrafter(drafts),
        windows=(*windows, STATE_WINDOW) if has_states else windows,
        copies=copies,
        has_states=has_states,
    )


def play(engine: Engine, plan: list[Arrival]) -> dict[str, Heard]:
    heard = {name: Heard() for i, arrival in enumerate(plan) for name in names(i, arrival)}
    step = 0
    while engine.has_work or step <= 60:
        for i, arrival in enumerate(plan):
            if arrival.step == step:
                for name in names(i, arrival):
                    engine.submit(as_submit(name, arrival))
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                held = engine.scheduler.pool.num_held
                engine.sequences.abort(
                    str(i)
                )  # aborts the first sequence of this arrival; its other sequences continue
                assert engine.scheduler.pool.num_held <= held
        if engine.has_work:
            engine.step()
        for output in engine.sequences.take_outputs():
            heard[output.sequence_id].hear(output)
        engine.scheduler.pool.assert_consistent()
        assert len(engine.scheduler.running) <= engine.scheduler.limits.max_num_seqs
        step += 1
        assert step < 5000, "the sequences do not end"
    return heard


def names(i: int, arrival: Arrival) -> list[str]:
    return [str(i), *(f"{i}.{k}" for k in range(arrival.siblings))]


def as_submit(name: str, arrival: Arrival) -> Submit:
    first, is_sibling, _ = name.partition(".")
    stops = () if arrival.stops_at is None else outputs_of(arrival, arrival.stops_at + 1)[-1:]
    sampling = SamplingParams(
        arrival.max_tokens,
        stop_token_ids=tuple(stops),
        num_logprobs=0 if arrival.logprobs else None,
        prompt_logprobs=arrival.prompt_logprobs,
        presence_penalty=0.5 if arrival.is_penalised else 0.0,
    )
    return Submit(
        name,
        "tiny",
        prompt_of(arrival),
        sampling,
        arrival.salt,
        leader=first if is_sibling else None,
        priority=arrival.priority,
    )


def outputs_of(arrival: Arrival, count: int) -> list[int]:
    """Return the first `count` tokens that an arrival gets alone."""
    prompt, outputs = prompt_of(arrival), list[int]()
    for _ in range(count):
        token = next_penalised_token(prompt, outputs) if arrival.is_penalised else next_token([*prompt, *outputs])
        outputs.append(token)
    return outputs


def prompt_of(arrival: Arrival) -> tuple[int, ...]:
    return tuple((arrival.family * 100 + i) % 1000 for i in range(arrival.prompt_length))


def check(heard: Heard, arrival: Arrival, context_length: int) -> None:
    if arrival.prompt_length >= context_length:
        assert heard.finish_reason == "error"
        assert str(context_length) in (heard.error or "")
        return
    expected = outputs_of(arrival, min(arrival.max_tokens, context_length - arrival.prompt_length))
    reason = "length"
    if arrival.stops_at is not None and (stop := outputs_of(arrival, arrival.stops_at + 1)[-1]) in expected:
        expected, reason = expected[: expected.index(stop) + 1], "stop"
    outputs = heard.token_ids
    assert outputs == expected[: len(outputs)]
    assert heard.logprobs == ([TokenLogprobs(-float(token)) for token in outputs] if arrival.logprobs else [])
    if outputs:
        prompt_logprobs = prompt_logprobs_of(prompt_of(arrival)) if arrival.prompt_logprobs else None
        assert heard.prompt_logprobs == prompt_logprobs
    if heard.finish_reason == "abort":
        assert arrival.abort_after is not None
        assert len(outputs) < len(expected)
    else:
        assert (heard.finish_reason, len(outputs)) == (reason, len(expected))
