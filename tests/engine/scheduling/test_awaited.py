"""A sequence that waits for a requirement delays no other sequence, and then continues with it, without it, or ends."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.awaited import AwaitedTogether
from pilotlight.engine.scheduling.waiting import WaitingSequences
from tests.clock import Clock
from tests.engine.driver import submit
from tests.engine.fake_runner import fake_engine

PROMPT = [3, 4, 5]


class CompiledGrammar:
    """A requirement of a kind that the engine does not know: a grammar that a thread compiles."""

    is_admitted = False

    def __init__(self, sequence: Sequence, compiling: "Future[str]", deadline: float = 60.0) -> None:
        self.sequence = sequence
        self.deadline = deadline
        self.grammar: str | None = None
        self.is_cancelled = False
        self._compiling = compiling

    @property
    def num_tokens(self) -> int:
        return len(self.sequence.token_ids)

    @property
    def is_done(self) -> bool:
        return self._compiling.done()

    def cancel(self) -> None:
        self.is_cancelled = True

    def take(self) -> None:
        if not self.is_cancelled:
            self.grammar = self._compiling.result()


class Compiler:
    """A thread that compiles when `go` is set."""

    def __init__(self) -> None:
        self.go = Event()
        self._threads = ThreadPoolExecutor(1)

    def compile(self) -> "Future[str]":
        return self._threads.submit(lambda: "rules" if self.go.wait(60) else "nobody asked")

    def close(self) -> None:
        self.go.set()
        self._threads.shutdown()


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.close()


def open_awaiting(
    engine: Engine, name: str, compiling: "Future[str]", prompt: list[int] = PROMPT, leader: Sequence | None = None
) -> CompiledGrammar:
    sequence = Sequence(name, list(prompt), SamplingParams(2), b"", length_limit=len(prompt) + 2)
    grammar = CompiledGrammar(sequence, compiling)
    engine.sequences.add(sequence)
    engine.scheduler.add(sequence, leader, grammar)
    return grammar


def step(engine: Engine) -> list[str]:
    engine.step()
    return [output.sequence_id for output in engine.sequences.take_outputs()]


def test_others_continue_until_it_has_arrived(compiler: Compiler) -> None:
    engine, _ = fake_engine(clock=Clock())
    compiling = compiler.compile()
    grammar = open_awaiting(engine, "constrained", compiling)
    assert not engine.step(), "there is nothing to compute"
    assert engine.has_work
    engine.submit(submit("other", [7, 8, 9], max_tokens=4))
    assert (engine.load().waiting, engine.load().waiting_tokens) == (2, 6)
    assert [step(engine), step(engine)] == [["other"], ["other"]]
    compiler.go.set()
    compiling.result(60)
    assert sorted(step(engine)) == ["constrained", "other"]
    assert (grammar.grammar, grammar.is_cancelled) == ("rules", False)
    assert [sorted(step(engine)), engine.has_work] == [["constrained", "other"], False]


def test_it_goes_back_to_its_old_place(compiler: Compiler) -> None:
    engine, _ = fake_engine(clock=Clock(), max_num_seqs=1)
    compiling = compiler.compile()
    open_awaiting(engine, "constrained", compiling)
    for name in ("running", "behind"):
        engine.submit(submit(name, [7, 8, 9], max_tokens=2))
    assert step(engine) == ["running"]
    compiler.go.set()
    compiling.result(60)
    assert [step(engine) for _ in range(5)] == [["running"], *[["constrained"]] * 2, *[["behind"]] * 2]


def test_one_that_runs_gives_its_blocks_back_and_keeps_its_place(compiler: Compiler) -> None:
    engine, _ = fake_engine(clock=Clock(), max_num_seqs=1)
    for name in ("first", "second", "third"):
        engine.submit(submit(name, [7, 8, 9], max_tokens=2))
    assert step(engine) == ["first"]
    (first,) = engine.scheduler.running
    compiling = compiler.compile()
    engine.scheduler.defer(CompiledGrammar(first, compiling))
    assert engine.scheduler.pool.num_held == 0
    assert step(engine) == ["second"]
    compiler.go.set()
    compiling.result(60)
    assert [step(engine) for _ in range(4)] == [["second"], ["first"], ["third"], ["third"]]


def test_at_its_deadline_the_sequence_continues_without(compiler: Compiler) -> None:
    clock = Clock()
    engine, _ = fake_engine(clock=clock)
    grammar = open_awaiting(engine, "constrained", compiler.compile())
    clock.now = 59.9
    assert not engine.step()
    clock.now = 60.0
    assert step(engine) == ["constrained"]
    assert grammar.is_cancelled
    assert grammar.grammar is None
    assert not engine.scheduler.waiting


@pytest.mark.parametrize("end", ["abort", "fail_all"])
def test_of_a_sequence_that_ends_it_is_cancelled(end: str, compiler: Compiler) -> None:
    engine, _ = fake_engine(clock=Clock())
    grammar = open_awaiting(engine, "constrained", compiler.compile())
    if end == "abort":
        engine.sequences.abort("constrained")
    else:
        engine.fail_all("engine_error", "the device is on fire")
    assert grammar.is_cancelled
    assert not engine.has_work
    assert engine.load().waiting == 0


def test_samples_of_one_prompt_that_await_the_same_still_compute_it_once(compiler: Compiler) -> None:
    engine, runner = fake_engine(clock=Clock())
    compiling, prompt = compiler.compile(), list(range(100, 117))
    leader = open_awaiting(engine, "0", compiling, prompt).sequence
    grammars = [open_awaiting(engine, name, compiling, prompt, leader) for name in "123"]
    assert not engine.step()
    assert engine.load().waiting == 4
    engine.sequences.abort("2")
    assert [grammar.is_cancelled for grammar in grammars] == [False, True, False]
    compiler.go.set()
    compiling.result(60)
    while engine.has_work:
        engine.step()
    assert [grammar.grammar for grammar in grammars] == ["rules", None, "rules"]
    assert sum(runner.batch_tokens) == 17 + 2 * 1 + 3 * 1, (
        "besides the prompt: its last token for each sample, and one decode of each"
    )


def test_samples_whose_leader_ends_await_their_own(compiler: Compiler) -> None:
    engine, _ = fake_engine(clock=Clock())
    compiling, prompt = compiler.compile(), list(range(100, 117))
    leader = open_awaiting(engine, "0", compiling, prompt).sequence
    grammars = [open_awaiting(engine, name, compiling, prompt, leader) for name in "12"]
    engine.sequences.abort("0")
    assert not engine.step()
    assert len(engine.scheduler.waiting.awaiting) == 1
    engine.fail_all("engine_error", "the device is on fire")
    assert all(grammar.is_cancelled for grammar in grammars)


def test_one_that_has_its_blocks_runs_next_and_any_other_is_queued(compiler: Compiler) -> None:
    compiling = compiler.compile()
    compiler.go.set()
    compiling.result(60)
    waiting = WaitingSequences(quantum=16)
    first, second = (CompiledGrammar(Sequence(name, [1], SamplingParams(1), b""), compiling) for name in "ab")
    second.is_admitted = True
    waiting.defer(first)
    waiting.defer(second)
    assert waiting.admitted == [second.sequence]
    assert (len(waiting), waiting.num_tokens) == (2, 2)
    assert list(waiting.take_admitted(0.0)) == [second.sequence]
    assert list(waiting.ready) == [first.sequence]
    assert (len(waiting), waiting.admitted) == (1, [])
    assert not waiting.cancel_awaited(first.sequence)


def test_several_things_are_waited_for_until_all_are_there_or_the_first_deadline_is() -> None:
    sequence = Sequence("s", PROMPT, SamplingParams(1), b"")
    compiling: list[Future[str]] = [Future(), Future()]
    parts = [CompiledGrammar(sequence, each, deadline) for each, deadline in zip(compiling, (9.0, 4.0), strict=True)]
    both = AwaitedTogether(parts)
    assert (both.sequence, both.num_tokens, both.deadline, both.is_admitted) == (sequence, len(PROMPT), 4.0, False)
    compiling[0].set_result("a")
    assert not both.is_done
    compiling[1].set_result("b")
    assert both.is_done
    both.take()
    assert [part.grammar for part in parts] == ["a", "b"]
    both.cancel()
    assert [part.is_cancelled for part in parts] == [True, True]
