"""Grammars of several accounts wait for their checks, and results are cached."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.guarded_pool import EndReason, GuardedJob, JobEndedError, JobError
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.grammar_check import GrammarVocabulary
from pilotlight.runtime.generation.grammar_checks import REFUSED_S, GrammarChecks
from pilotlight.wire.errors import ApiError
from tests.asgi import eventually
from tests.clock import Clock

EMBER = GrammarVocabulary(Path("/models/ember"), 2048, (0,))


class FakePool:
    """A fake pool, whose jobs end when a test ends them."""

    def __init__(self) -> None:
        self.jobs: dict[str, Future[Any]] = {}
        self.order: list[str] = []

    def submit(self, job: GuardedJob) -> "Future[Any]":
        text = str(job.call.arguments[-1])
        self.order.append(text)
        self.jobs[text] = Future()
        return self.jobs[text]

    def close(self) -> None:
        pass


class Site:
    def __init__(self, wait_s: float = 60.0) -> None:
        self.pool, self.clock = FakePool(), Clock()
        self.checks = GrammarChecks(self.pool, self.clock, wait_s)

    def ask(self, text: str, owner: str = "a", vocabulary: GrammarVocabulary = EMBER) -> "asyncio.Task[str | None]":
        return asyncio.create_task(self.checks.refusal(vocabulary, Constraint("regex", text), owner))

    async def end(self, text: str, error: Exception | None = None) -> None:
        await eventually(lambda: text in self.pool.jobs)
        job = self.pool.jobs.pop(text)
        job.set_result(None) if error is None else job.set_exception(error)

    async def known(self, text: str, error: Exception | None = None, owner: str = "a") -> str | None:
        asked = self.ask(text, owner)
        await self.end(text, error)
        return await asked


async def test_an_account_has_one_grammar_checked_at_a_time_and_delays_no_other_account() -> None:
    site = Site()
    assert await site.known("known", owner="b") is None
    large = [site.ask(f"large{i}") for i in range(3)]
    await eventually(lambda: site.pool.order[1:] == ["large0"])
    assert await site.checks.refusal(EMBER, Constraint("regex", "known"), "b") is None
    assert await site.checks.refusal(EMBER, Constraint("regex", "known"), "a") is None
    assert await site.known("tiny", owner="b") is None
    assert site.pool.order == ["known", "large0", "tiny"]
    assert not any(each.done() for each in large)
    for i in range(3):
        await site.end(f"large{i}")
    assert [await each for each in large] == [None] * 3
    assert site.pool.order[3:] == ["large1", "large2"]


async def test_requests_of_one_grammar_share_its_check() -> None:
    site = Site()
    asked = [site.ask("same") for _ in range(5)]
    await site.end("same")
    assert [await each for each in asked] == [None] * 5
    assert await site.checks.refusal(EMBER, Constraint("regex", "same", is_optional=True), "b") is None
    assert site.pool.order == ["same"]


async def test_a_grammar_is_known_for_one_model_alone() -> None:
    site = Site()
    assert await site.known("same") is None
    other = site.ask("same", vocabulary=EMBER._replace(size=4096))
    await site.end("same")
    assert await other is None
    assert site.pool.order == ["same", "same"]


@pytest.mark.parametrize("reason", ["crash", "memory", "cpu"])
async def test_what_ended_a_child_is_refused_and_not_tried_again_soon(reason: EndReason) -> None:
    site = Site()
    why = await site.known("bad", JobEndedError(reason, "it ended the process"))
    assert why == "the pattern cannot be enforced: it ended the process"
    for owner in ("a", "b"):
        assert await site.checks.refusal(EMBER, Constraint("regex", "bad"), owner) == why
    assert site.pool.order == ["bad"]
    site.clock.now += REFUSED_S + 1
    assert await site.known("bad") is None


async def test_a_refusal_is_passed_on_as_it_is() -> None:
    site = Site()
    assert (
        await site.known("bad", JobError("ConstraintError", "the pattern is no pattern")) == "the pattern is no pattern"
    )
    why = await site.known("worse", JobError("PanicException", "index out of bounds"))
    assert why == "the pattern cannot be enforced: PanicException: index out of bounds"


async def test_a_tokenizer_that_cannot_be_read_is_not_remembered() -> None:
    site = Site()
    assert await site.known("a", JobError("TokenizerUnreadableError", "no file")) == "no file"
    assert await site.known("a") is None


@pytest.mark.parametrize("reason", ["deadline", "lost"])
async def test_what_was_no_fault_of_the_grammar_can_be_tried_again(reason: EndReason) -> None:
    site = Site()
    with pytest.raises(ApiError, match="try again") as refused:
        await site.known("good", JobEndedError(reason, "the machine is overloaded"))
    assert (refused.value.word, refused.value.retry_after_s is not None) == ("overloaded", True)
    assert await site.known("good") is None


async def test_a_wait_for_a_turn_that_took_too_long_can_be_repeated() -> None:
    site = Site(wait_s=0.01)
    first, second = site.ask("large"), site.ask("next")
    for each in (first, second):
        with pytest.raises(ApiError, match=r"more than 0\.01 s") as refused:
            await each
        assert (refused.value.word, refused.value.retry_after_s is not None) == ("overloaded", True)
    await site.end("large")
    assert await site.checks.refusal(EMBER, Constraint("regex", "large"), "a") is None
    assert site.pool.order == ["large"], "no request waits for the second any more"


async def test_a_check_without_waiting_callers_is_not_started_and_a_started_one_keeps_its_turn() -> None:
    site = Site()
    first, second, third = site.ask("first"), site.ask("second"), site.ask("third")
    await eventually(lambda: site.pool.order == ["first"])
    for each in (first, second):
        each.cancel()
    await asyncio.wait({first, second})
    assert site.pool.order == ["first"]
    await site.end("first")
    await site.end("third")
    assert await third is None
    assert site.pool.order == ["first", "third"]


async def test_a_grammar_that_is_asked_for_again_as_its_last_reader_leaves_is_checked() -> None:
    site = Site()
    first, second = site.ask("first"), site.ask("second")
    await eventually(lambda: site.pool.order == ["first"])
    second.cancel()
    again = site.ask("second")
    await asyncio.wait({second})
    await site.end("first")
    await site.end("second")
    assert (await first, await again) == (None, None)
