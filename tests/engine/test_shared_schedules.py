"""Random schedules of two models on one arena, with bursts, idle phases, reservations, failed steps and corrupt bookkeeping. Every sequence ends with
the right tokens, no model reads data of the other, and every slab is returned.
"""

from typing import NamedTuple

import pytest
from hypothesis import currently_in_test_context, event, given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.lending.lease import Reservation
from pilotlight.engine.kv.lending.slab_allocator import NoSlabsError
from pilotlight.engine.kv.pool.groups import Windows
from pilotlight.engine.scheduling.plan import Speculation
from tests.engine.driver import Heard
from tests.engine.fake_drafter import FakeDrafter
from tests.engine.fake_runner import (
    FakeArena,
    FakeMemory,
    FakeRunner,
    borrowing_engine,
    next_penalised_token,
    next_token,
    prompt_logprobs_of,
)
from tests.engine.test_schedules import windows

MODELS = ("one", "two")


class Arrival(NamedTuple):
    model: int
    step: int
    prompt_length: int
    family: int  # prompts of one family share a prefix
    max_tokens: int
    salt: bytes
    abort_after: int | None
    copies: int  # size of a burst of prompts that differ at the end
    priority: int
    prompt_logprobs: bool = False
    is_penalised: bool = False


class Shape(NamedTuple):
    num_slabs: int
    slab_bytes: int
    block_bytes: tuple[int, int]
    block_sizes: tuple[int, int]
    max_num_batched_tokens: int
    max_num_seqs: int
    depth: int = 1
    drafts: int | None = None  # seed of a drafter
    windows: tuple[Windows, Windows] = ((None,), (None,))
    copies: int = 1  # ranks with separate sequences and as many slabs each


class Reserve(NamedTuple):
    step: int
    num_slabs: int
    steps: int


class Accident(NamedTuple):
    """A fault of a model at a step: a block is handed out although a sequence holds it, a generation is damaged, or a step fails."""

    step: int
    model: int
    kind: str
    n: int


arrivals = st.lists(
    st.builds(
        Arrival,
        model=st.integers(0, 1),
        step=st.sampled_from([0, 1, 5, 20, 21, 40]),
        prompt_length=st.integers(1, 40),
        family=st.integers(1, 2),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from([b"", b"a"]),
        abort_after=st.none() | st.integers(0, 25),
        copies=st.sampled_from([1, 1, 2, 6]),
        priority=st.sampled_from([0, 0, -1, 5]),
        prompt_logprobs=st.booleans(),
        is_penalised=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
shapes = st.builds(
    Shape,
    num_slabs=st.integers(1, 9),
    slab_bytes=st.integers(10, 24),
    block_bytes=st.tuples(st.integers(2, 5), st.integers(1, 5)),
    block_sizes=st.tuples(st.sampled_from([1, 3, 4]), st.sampled_from([2, 4, 16])),
    max_num_batched_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    depth=st.sampled_from([1, 2, 3]),
    drafts=st.none() | st.integers(0, 2**32),
    windows=st.tuples(windows, windows),
    copies=st.sampled_from([1, 1, 2, 3]),
)
reservations = st.none() | st.builds(
    Reserve, step=st.integers(0, 30), num_slabs=st.integers(1, 4), steps=st.integers(1, 30)
)
accidents = st.none() | st.builds(
    Accident,
    step=st.integers(0, 30),
    model=st.integers(0, 1),
    kind=st.sampled_from(["handed out twice", "damaged", "failed step"]),
    n=st.integers(0, 100),
)


@pytest.mark.long
@given(shapes, arrivals, reservations, accidents)
@settings(max_examples=200, deadline=None)
def test_two_models_on_one_arena_end_every_sequence_rightly(
    shape: Shape, plan: list[Arrival], reserve: Reserve | None, accident: Accident | None
) -> None:
    Play(shape, plan, reserve, accident).run()


@pytest.mark.slow
@given(shapes, arrivals, reservations, accidents)
@settings(max_examples=20_000, deadline=None)
@pytest.mark.timeout(7200)
def test_two_models_on_one_arena_through_twenty_thousand_schedules(
    shape: Shape, plan: list[Arrival], reserve: Reserve | None, accident: Accident | None
) -> None:
    Play(shape, plan, reserve, accident).run()


def test_a_full_batch_of_late_arrivals_still_claims_what_it_needs() -> None:
    """Urgent late arrivals run in both models while older sequences wait for a place in the batch. Each model lacks blocks that the other has."""
    shape = Shape(9, 10, (5, 4), (3, 4), 16, 1)
    plan = [
        Arrival(0, 5, 32, 2, 6, b"", None, 1, 0),
        Arrival(0, 5, 31, 1, 11, b"a", None, 2, 0),
        Arrival(1, 20, 40, 2, 6, b"", 4, 6, 0),
        Arrival(1, 0, 20, 2, 20, b"a", None, 2, -1),
        Arrival(0, 40, 10, 1, 2, b"a", 13, 2, 0),
        Arrival(0, 20, 7, 2, 19, b"", 4, 2, -1),
        Arrival(1, 0, 25, 1, 14, b"", 7, 2, 5),
        Arrival(0, 0, 12, 2, 11, b"a", 18, 1, 0),
    ]
    Play(shape, plan, Reserve(step=0, num_slabs=1, steps=2), None).run()


def test_a_sequence_that_leaves_before_its_lost_block_is_noticed_takes_nothing_from_its_new_holder() -> None:
    """A block of the sequence is handed out twice while it waits for memory of the other model. It is aborted before the next step checks it."""
    shape = Shape(8, 15, (2, 4), (1, 2), 18, 3)
    short = [Arrival(0, 0, length, 1, 1, salt, None, 1, 0) for length, salt in ((3, b"a"), *[(1, b"")] * 4)]
    plan = [
        *short,
        Arrival(0, 21, 15, 1, 16, b"a", None, 1, 0),
        Arrival(1, 20, 34, 2, 6, b"", None, 1, 0),
        Arrival(1, 20, 2, 2, 4, b"", 7, 1, 0),
    ]
    Play(shape, plan, None, Accident(step=26, model=1, kind="handed out twice", n=0)).run()


class Play:
    def __init__(self, shape: Shape, plan: list[Arrival], reserve: Reserve | None, accident: Accident | None) -> None:
        self.shape, self.plan, self.reserve, self.accident = shape, plan, reserve, accident
        self.arena = FakeArena(shape.num_slabs, shape.slab_bytes, shape.copies)
        self.engines: list[Engine] = []
        self.runners: list[FakeRunner] = []
        for model, name in enumerate(MODELS):
            limits = shape.max_num_batched_tokens, shape.max_num_seqs, shape.depth
            speculation = None if shape.drafts is None else FakeDrafter(shape.drafts)
            sizes = shape.block_bytes[model], shape.block_sizes[model]
            engine, runner = self.make_engine(name, sizes, limits, speculation, shape.windows[model])
            self.engines.append(engine)
            self.runners.append(runner)
        self.contexts = [engine.info.context_length for engine in self.engines]
        self.heard = {name: Heard() for i, arrival in enumerate(plan) for name in names(i, arrival)}
        self.reservation: Reservation | None = None
        self.was_reserved = False
        self.may_fail: set[str] = set()  # sequences that a fault may end
        self.num_preemptions = 0

    def make_engine(
        self,
        name: str,
        sizes: tuple[int, int],
        limits: tuple[int, int, int],
        speculation: Speculation | None,
        windows: Windows,
    ) -> tuple[Engine, FakeRunner]:
        return borrowing_engine(self.arena, name, *sizes, *limits, speculation=speculation, windows=windows)

    def run(self) -> None:
        step = 0
        while step <= 70 or any(engine.has_work for engine in self.engines):
            self._arrive_and_leave(step)
            self._reserve(step)
            for model, engine in enumerate(self.engines):
                if engine.has_work:
                    self._step(step, model)
                for output in engine.sequences.take_outputs():
                    self.heard[output.sequence_id].hear(output)
                assert len(engine.scheduler.running) <= self.shape.max_num_seqs
                engine.on_idle()
                load = engine.load()
                assert 0 <= load.free_blocks <= load.total_blocks
            self.arena.slabs.assert_consistent()
            step += 1
            assert step < 5000, "the sequences do not end"
        self._check_the_end()

    def _arrive_and_leave(self, step: int) -> None:
        for i, arrival in enumerate(self.plan):
            engine = self.engines[arrival.model]
            if arrival.step == step:
                for k, name in enumerate(names(i, arrival)):
                    engine.submit(as_submit(name, k, arrival))
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                held = engine.scheduler.pool.num_held
                engine.sequences.abort(str(i))
                assert engine.scheduler.pool.num_held <= held

    def _reserve(self, step: int) -> None:
        """Reserve slabs for a third model at its step, overwrite them, and release them later."""
        if self.reserve is None:
            return
        allocator = self.arena.slabs
        if step == self.reserve.step:
            try:
                self.reservation = allocator.reserve("own", self.reserve.num_slabs)
                self.was_reserved = True
            except NoSlabsError:
                assert self.reserve.num_slabs > allocator.largest_run
        if self.reservation is not None and self.reservation.is_complete():
            start = self.reservation.slabs.start * self.shape.slab_bytes
            for block in range(len(self.reservation.slabs)):
                FakeMemory(self.arena, "own", self.shape.slab_bytes, start).write(block)
            if step >= self.reserve.step + self.reserve.steps:
                self.reservation.close()
                self.reservation = None

    def _step(self, step: int, model: int) -> None:
        engine = self.engines[model]
        accident = self.accident
        if accident is not None and accident.step == step and accident.model == model:
            getattr(self, f"_{accident.kind.replace(' ', '_')}")(engine, accident.n)
        self.runners[model].explode = (
            accident is not None and accident[:3] == (step, model, "failed step") and bool(engine.scheduler.running)
        )
        before = {name for name, heard in self.heard.items() if heard.finish_reason is None}
        try:
            engine.step()
        except RuntimeError:
            self.may_fail |= {name for name in before if self.plan[int(name.split(".")[0])].model == model}
            self.num_preemptions += engine.scheduler.counts.preemptions
            engine.fail_all("engine_error", "a step failed")

    def _damaged(self, engine: Engine, n: int) -> None:
        """Simulate a damaged generation number of a held block."""
        held = sorted({block for sequence in engine.scheduler.running for block in blocks_of(sequence)})
        if held:
            block = held[n % len(held)]
            engine.scheduler.pool.generations[block] += 1
            self.may_fail |= {s.sequence_id for s in engine.scheduler.running if block in blocks_of(s)}

    def _handed_out_twice(self, engine: Engine, n: int) -> None:
        """Simulate an error in the pool: a held block counted as free, and another sequence has taken it."""
        pool = engine.scheduler.pool
        held = sorted({block for sequence in engine.scheduler.running for block in blocks_of(sequence)})
        if held:
            block = held[n % len(held)]
            self.may_fail |= {s.sequence_id for s in engine.scheduler.running if block in blocks_of(s)}
            pool.forget([block])
            pool.recount(block, 0)
            share = block % self.shape.copies
            taken = [pool.allocate(share)]
            while taken[-1] != block:
                taken.append(pool.allocate(share))
            pool.release([other for other in taken[:-1] if other is not None])

    def _failed_step(self, engine: Engine, n: int) -> None:
        pass

    def _check_the_end(self) -> None:
        allocator = self.arena.slabs
        for i, arrival in enumerate(self.plan):
            for k, name in enumerate(names(i, arrival)):
                self._check(self.heard[name], name, k, arrival)
        for engine in self.engines:
            assert engine.scheduler.pool.num_held == 0
            assert (engine.load().waiting, engine.load().waiting_tokens) == (0, 0)
            self.num_preemptions += engine.scheduler.counts.preemptions
        for model, runner in enumerate(self.runners):
            assert max(runner.batch_tokens, default=0) <= self.shape.max_num_batched_tokens, MODELS[model]
        if self.reservation is not None:
            assert self.reservation.is_complete()
            self.reservation.close()
        for engine in self.engines:
            engine.scheduler.lease.close()
        assert allocator.num_free == allocator.num_lendable == allocator.num_slabs
        assert not any(self.arena.writers), "free slabs hold zeros"
        if currently_in_test_context():
            event("drafts" if any(runner.num_drafts for runner in self.runners) else "no drafts")
            event("preempted" if self.num_preemptions else "not preempted")
            event(f"reserved: {self.was_reserved}")
            for error in {(heard.error or "").partition(" ")[2][:10] for heard in self.heard.values() if heard.error}:
                event(f"error: {error}")

    def _check(self, heard: Heard, name: str, k: int, arrival: Arrival) -> None:
        context_length = self.contexts[arrival.model]
        prompt, tokens = prompt_of(k, arrival), list(prompt_of(k, arrival))
        expected = min(arrival.max_tokens, context_length - len(tokens))
        for i, token in enumerate(heard.token_ids):
            wanted = next_penalised_token(prompt, heard.token_ids[:i]) if arrival.is_penalised else next_token(tokens)
            assert token == wanted
            tokens.append(token)
        if heard.token_ids:
            assert heard.prompt_logprobs == (prompt_logprobs_of(prompt) if arrival.prompt_logprobs else None)
        if heard.finish_reason == "abort":
            assert arrival.abort_after is not None
        elif heard.finish_reason == "error":
            assert name in self.may_fail or self.was_reserved or arrival.prompt_length >= context_length, heard.error
            if name not in self.may_fail:
                assert "tokens" in (heard.error or "")
        elif heard.finish_reason == "length" and self.was_reserved:
            assert len(heard.token_ids) <= expected
        else:
            assert heard.finish_reason == "length"
            assert len(heard.token_ids) == expected


def names(i: int, arrival: Arrival) -> list[str]:
    return [str(i), *(f"{i}.{k}" for k in range(1, arrival.copies))]


def prompt_of(k: int, arrival: Arrival) -> tuple[int, ...]:
    prompt = [(arrival.family * 100 + i) % 1000 for i in range(arrival.prompt_length)]
    prompt[-1] = (prompt[-1] + k) % 1000
    return tuple(prompt)


def as_submit(name: str, k: int, arrival: Arrival) -> Submit:
    sampling = SamplingParams(
        arrival.max_tokens,
        prompt_logprobs=arrival.prompt_logprobs,
        presence_penalty=0.5 if arrival.is_penalised else 0.0,
    )
    prompt = prompt_of(k, arrival)
    return Submit(name, MODELS[arrival.model], prompt, sampling, arrival.salt, priority=arrival.priority)


def blocks_of(sequence: Sequence) -> list[int]:
    return [block for table in sequence.tables for block in table.held]
