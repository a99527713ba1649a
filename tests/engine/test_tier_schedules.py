"""Random schedules on tiny pools with tiers that are late and lose blocks. Every sequence ends with the right tokens, and no resource leaks
(invariants I1, I2, I3, I6 and I9).
"""

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import BlockSource
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.pool.groups import Windows
from pilotlight.engine.scheduling.plan import Speculation
from tests.engine import test_shared_schedules as shared
from tests.engine.core.test_engine import PROMPT
from tests.engine.driver import Heard, drain, one, submit
from tests.engine.fake_runner import FakeRunner, borrowing_engine, expected_tokens, fake_engine
from tests.engine.fake_tiers import FakeTiers
from tests.engine.test_schedules import Arrival, Shape, as_submit, check, make_engine, names, windows

# Small pools and repeated prompts: one prompt evicts the blocks of another, which a third one needs again.
crowds = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 40),
        prompt_length=st.integers(9, 40),
        family=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([b"", b"", b"a"]),
        abort_after=st.none() | st.integers(0, 25),
        siblings=st.integers(0, 2),
        priority=st.sampled_from([0, 0, -1]),
        prompt_logprobs=st.booleans(),
        logprobs=st.just(False),
        is_penalised=st.booleans(),
        stops_at=st.none(),
    ),
    min_size=4,
    max_size=10,
)
tight = st.builds(
    Shape,
    num_blocks=st.integers(8, 20),
    block_size=st.sampled_from([2, 3, 4]),
    max_num_batched_tokens=st.integers(4, 40),
    max_num_seqs=st.integers(1, 6),
    depth=st.sampled_from([1, 2, 3]),
    windows=windows,
    drafts=st.none() | st.integers(0, 2**32),
    tick_s=st.sampled_from([0.0, 0.3, 1.0]),  # transfers take up to four looks, so some time out
    copies=st.sampled_from([1, 1, 2, 3]),
    has_states=st.booleans(),
)


@pytest.mark.long
@given(tight, crowds, st.integers(0, 2**32), st.integers(0, 40), st.booleans(), st.none() | st.integers(1, 30))
@settings(max_examples=120, deadline=None)
def test_every_sequence_ends_rightly_and_nothing_is_left(
    shape: Shape, plan: list[Arrival], seed: int, capacity: int, has_disk: bool, fails_at: int | None
) -> None:
    run(shape, plan, seed, capacity, has_disk, fails_at)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@given(tight, crowds, st.integers(0, 2**32), st.integers(0, 40), st.booleans(), st.none() | st.integers(1, 30))
@settings(max_examples=5000, deadline=None)
def test_thousands_of_schedules(
    shape: Shape, plan: list[Arrival], seed: int, capacity: int, has_disk: bool, fails_at: int | None
) -> None:
    run(shape, plan, seed, capacity, has_disk, fails_at)


def run(shape: Shape, plan: list[Arrival], seed: int, capacity: int, has_disk: bool, fails_at: int | None) -> None:
    tiers: list[FakeTiers] = []

    def make(runner: FakeRunner) -> FakeTiers:
        tiers.append(FakeTiers(runner, seed, capacity, has_disk, has_store=bool(seed % 2)))
        return tiers[0]

    engine, runner = make_engine(shape, make)
    heard = play(engine, tiers[0], plan, fails_at)
    for i, arrival in enumerate(plan):
        for name in names(i, arrival):
            if heard[name].error != "on purpose":
                check(heard[name], arrival, engine.info.context_length)
    assert engine.scheduler.pool.num_held == 0
    num_groups = len(shape.windows) + shape.has_states
    assert engine.scheduler.pool.num_available == shape.copies * shape.num_blocks * num_groups
    assert max(runner.batch_tokens, default=0) <= shape.max_num_batched_tokens
    assert not tiers[0].pins
    assert not tiers[0].open
    assert not tiers[0].handed_over
    load = engine.load()
    from_tiers = load.prefix_host_hits + load.prefix_disk_hits + load.prefix_store_hits + load.prefix_peer_hits
    assert from_tiers <= load.prefix_hits <= load.prefix_queries
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
    for what in (
        "swaps",
        "prefix_host_hits",
        "prefix_disk_hits",
        "prefix_store_hits",
        "prefix_peer_hits",
        "preemptions",
    ):
        event(what if getattr(load, what) else f"no {what}")


def play(engine: Engine, tiers: FakeTiers, plan: list[Arrival], fails_at: int | None) -> dict[str, Heard]:
    heard = {name: Heard() for i, arrival in enumerate(plan) for name in names(i, arrival)}
    step = 0
    while engine.has_work or step <= 60:
        for i, arrival in enumerate(plan):
            if arrival.step == step:
                for name in names(i, arrival):
                    source = BlockSource("elsewhere", name, 2.0) if i % 3 == 0 else None
                    engine.submit(replace(as_submit(name, arrival), fetch_from=source, hands_over=i % 3 == 1))
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                abort(engine, tiers, str(i))
        if step == fails_at:
            engine.fail_all("engine_error", "on purpose")
            assert engine.scheduler.pool.num_held == 0
        if engine.has_work:
            engine.step()
        for output in engine.sequences.take_outputs():
            heard[output.sequence_id].hear(output)
        engine.on_idle()
        engine.scheduler.pool.assert_consistent()
        assert len(engine.scheduler.running) <= engine.scheduler.limits.max_num_seqs
        step += 1
        assert step < 5000, "the sequences do not end"
    return heard


def abort(engine: Engine, tiers: FakeTiers, name: str) -> None:
    sequence = engine.sequences.get(name)
    held = engine.scheduler.pool.num_held
    engine.sequences.abort(name)
    assert engine.scheduler.pool.num_held <= held
    if sequence is not None:
        assert not sequence.tables
        assert sequence not in tiers.pins


@pytest.mark.long
@given(
    shared.shapes, st.lists(shared.arrivals, min_size=2, max_size=2), shared.reservations, shared.accidents,
    st.integers(0, 2**32), st.integers(0, 40),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_two_models_on_one_arena_with_tiers_end_every_sequence_rightly(
    shape: shared.Shape,
    plans: list[list[shared.Arrival]],
    reserve: shared.Reserve | None,
    accident: shared.Accident | None,
    seed: int,
    capacity: int,
) -> None:
    play = TieredPlay(shape, [arrival for plan in plans for arrival in plan], reserve, accident, seed, capacity)
    play.run()
    for engine, tiers in zip(play.engines, play.tiers, strict=True):
        assert not tiers.pins
        assert not tiers.open
        event("fetched" if engine.load().prefix_host_hits else "not fetched")
        event("swapped" if engine.load().swaps else "not swapped")


class TieredPlay(shared.Play):
    def __init__(
        self,
        shape: shared.Shape,
        plan: list[shared.Arrival],
        reserve: shared.Reserve | None,
        accident: shared.Accident | None,
        seed: int,
        capacity: int,
    ) -> None:
        self.seed, self.capacity = seed, capacity
        self.tiers: list[FakeTiers] = []
        super().__init__(shape, plan, reserve, accident)

    def make_engine(
        self,
        name: str,
        sizes: tuple[int, int],
        limits: tuple[int, int, int],
        speculation: Speculation | None,
        windows: Windows,
    ) -> tuple[Engine, FakeRunner]:
        def make(runner: FakeRunner) -> FakeTiers:
            self.tiers.append(FakeTiers(runner, self.seed, self.capacity))
            return self.tiers[-1]

        return borrowing_engine(self.arena, name, *sizes, *limits, make, speculation, windows)


def tiered(**shape: int) -> tuple[Engine, FakeTiers]:
    engine, _ = fake_engine(**shape, make_tiers=lambda runner: FakeTiers(runner, seed=3))
    assert isinstance(engine.tiers, FakeTiers)
    return engine, engine.tiers


def test_bad_numbers_reach_no_tier() -> None:
    engine, tiers = tiered()
    runner = engine.runner
    long_prompt = PROMPT * 5
    one(engine, submit("good", long_prompt, max_tokens=4))
    assert len(tiers.host) == 8
    assert isinstance(runner, FakeRunner)
    runner.bad_prompts.add((*long_prompt, 1, 2, 3))
    heard = one(engine, submit("bad", [*long_prompt, 1, 2, 3]))
    assert "not finite" in (heard.error or "")
    assert len(tiers.host) == 1, "the bad sequence does not contain the last block of the good one"
    runner.bad_prompts.clear()
    assert one(engine, submit("again", long_prompt, max_tokens=4)).num_cached_tokens == 0


def test_what_was_waiting_to_be_copied_is_not_copied_after_a_failure() -> None:
    engine, tiers = tiered()
    engine.submit(submit("a", PROMPT * 4))
    engine.step()
    assert tiers.waiting
    engine.fail_all("engine_error", "a step failed")
    engine.on_idle()
    assert not tiers.host
    assert one(engine, submit("b", PROMPT, max_tokens=3)).token_ids == expected_tokens(PROMPT, 3)


def test_sequences_of_one_prefix_fetch_it_once() -> None:
    engine, tiers = tiered(num_blocks=64)
    tiers.draw.random = lambda: 0.5
    prompt = PROMPT * 6
    one(engine, submit("a", prompt, max_tokens=1))
    engine.fail_all("engine_error", "the device has forgotten")
    fetched: list[int] = []
    fetch = tiers.fetch
    tiers.fetch = lambda hashes, blocks: fetched.append(len(blocks)) or fetch(hashes, blocks)
    heard = drain(engine, [submit(name, [*prompt, i], max_tokens=2) for i, name in enumerate("bcd")])
    assert fetched == [9]
    assert [h.num_cached_tokens for h in heard.values()] == [36, 36, 36]


def test_others_continue_while_blocks_are_on_their_way() -> None:
    engine, tiers = tiered(num_blocks=64)
    tiers.draw.random = lambda: 0.5
    tiers.draw.randint = lambda low, high: 20 if (low, high) == (1, 4) else low
    prompt = PROMPT * 6
    one(engine, submit("a", prompt, max_tokens=1))
    engine.fail_all("engine_error", "the device has forgotten")
    engine.sequences.take_outputs()
    engine.submit(submit("fetching", prompt, max_tokens=2))
    engine.submit(submit("other", [9, 9, 9], max_tokens=5))
    told = []
    while engine.has_work:
        engine.step()
        told += [o.sequence_id for o in engine.sequences.take_outputs()]
    assert told == ["other"] * 5 + ["fetching"] * 2


class Tiers(FakeTiers):
    """Tiers with all stored blocks in host memory; fetched blocks arrive when a test permits it."""

    class Draws(Random):
        def random(self) -> float:
            return 0.5

        def randint(self, low: int, high: int) -> int:
            return 10**6

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner, 0, 1000, has_disk=False)
        self.draw = self.Draws()
        self.swapped: list[list[int]] = []

    def swap_out(self, owner: Hashable, hashes: SequenceOf[bytes], blocks: SequenceOf[int], num_tokens: int) -> bool:
        self.swapped.append(list(blocks))
        return super().swap_out(owner, hashes, blocks, num_tokens)


def test_a_waiter_after_an_aborted_fetcher_looks_again() -> None:
    engine, _ = fake_engine(num_blocks=20, make_tiers=Tiers)
    one(engine, submit("first", PROMPT * 4, max_tokens=1))
    one(engine, submit("pushes it out", [900 - i for i in range(76)], max_tokens=1))
    engine.submit(submit("fetcher", [*PROMPT * 4, 7], max_tokens=2))
    engine.submit(submit("behind", [*PROMPT * 4, 8], max_tokens=2))
    engine.step()
    waiting = engine.scheduler.waiting
    assert len(waiting.admitted) == 1
    assert len(waiting.awaiting) == 2
    engine.sequences.abort("fetcher")
    engine.step()
    (sequence,) = waiting.admitted
    assert sequence.sequence_id == "behind"
    engine.sequences.abort("behind")
    assert not engine.has_work


def test_a_block_that_was_handed_to_another_is_not_kept_under_the_first_ones_name() -> None:
    engine, _ = fake_engine(num_blocks=12, make_tiers=Tiers)
    engine.submit(submit("a", PROMPT * 2, max_tokens=20))
    engine.step()
    (sequence,) = engine.scheduler.running
    first, second, *_ = sequence.tables[0].blocks
    assert sequence.num_registered_blocks >= 2
    pool = engine.scheduler.pool
    pool.generations[first] += 1
    assert engine.scheduler.preemption.preempt_youngest(keep_oldest=False)
    tiers = engine.tiers
    assert isinstance(tiers, Tiers)
    assert second in tiers.swapped[0]
    assert first not in tiers.swapped[0]
