"""Blocks that arrive from a tier late, in part or never: the sequence continues with those that arrived, and no transfer stays open."""

from random import Random

import pytest

from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.tier_protocol import TRANSFER_TIMEOUT_S
from tests.clock import Clock
from tests.engine.driver import Heard, submit
from tests.engine.fake_runner import FakeRunner, expected_tokens, fake_engine
from tests.engine.fake_tiers import FakeTiers

BLOCKS = 9
PROMPT = list(range(100, 100 + 4 * BLOCKS))


class NeverDone(Random):
    """Random numbers with which no transfer of the fake tiers ends; `brings` blocks of each arrive."""

    brings = 0

    def random(self) -> float:
        return 0.5

    def randint(self, low: int, high: int) -> int:
        return 10**6 if (low, high) == (1, 4) else max(low, self.brings)


def stuck_engine(clock: Clock, on_disk: int = 0) -> tuple[Engine, FakeTiers, FakeRunner]:
    """Return an engine whose tiers, but not its cache, have a prompt; no transfer ends."""
    engine, runner = fake_engine(num_blocks=80, clock=clock, make_tiers=lambda runner: FakeTiers(runner, seed=1))
    tiers = engine.tiers
    assert isinstance(tiers, FakeTiers)
    tiers.draw = NeverDone()
    engine.submit(submit("before", PROMPT, max_tokens=1))
    engine.step()
    engine.tiers.begin_stores(everything=True)
    for block_hash in list(tiers.host)[len(tiers.host) - on_disk :]:
        tiers.disk[block_hash] = tiers.host.pop(block_hash)
    engine.fail_all("engine_error", "the device has forgotten")
    engine.sequences.take_outputs()
    return engine, tiers, runner


def hear(engine: Engine, names: str) -> dict[str, Heard]:
    heard = {name: Heard() for name in names}
    while engine.has_work:
        assert engine.step(), "both sequences can be computed"
        for output in engine.sequences.take_outputs():
            heard[output.sequence_id].hear(output)
    assert engine.scheduler.pool.num_held == 0
    return heard


@pytest.mark.parametrize("on_disk", [0, 3])
def test_a_transfer_that_does_not_come_by_its_deadline_is_computed(on_disk: int) -> None:
    clock = Clock()
    engine, tiers, runner = stuck_engine(clock, on_disk)
    prompt = [*PROMPT, 7]
    engine.submit(submit("a", prompt, max_tokens=3))
    assert not engine.step()
    clock.now += TRANSFER_TIMEOUT_S - 0.01
    assert not engine.step()
    clock.now += 0.01
    if on_disk:  # the prefix without the blocks on disk is tried next, and is late as well
        assert not engine.step()
        clock.now += TRANSFER_TIMEOUT_S
    heard = hear(engine, "a")["a"]
    assert (heard.token_ids, heard.num_cached_tokens) == (expected_tokens(prompt, 3), 0)
    assert (tiers.open, tiers.pins) == (set(), {})
    assert sum(runner.batch_tokens[1:]) == len(prompt) + 2


def test_sequences_after_a_late_transfer_do_not_wait_for_one_each() -> None:
    clock = Clock()
    engine, tiers, runner = stuck_engine(clock)
    prompts = {name: [*PROMPT, i] for i, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        engine.submit(submit(name, prompt, max_tokens=2))
    assert not engine.step()
    assert len(tiers.open) == 1
    assert engine.load().waiting_tokens == 1 + 3, "one token of the fetching sequence, and one of each later sequence"
    clock.now += TRANSFER_TIMEOUT_S
    heard = hear(engine, "abcd")
    assert {name: heard[name].token_ids for name in heard} == {n: expected_tokens(p, 2) for n, p in prompts.items()}
    assert not tiers.open
    engine.submit(submit("next", PROMPT, max_tokens=1))
    engine.step()
    assert len(runner.batch_tokens) > 1
    assert not engine.has_work, "the prompt must be cached on the device"


def test_arrived_blocks_of_a_late_transfer_are_used() -> None:
    clock = Clock()
    engine, tiers, runner = stuck_engine(clock)
    assert isinstance(tiers.draw, NeverDone)
    tiers.draw.brings = 5
    prompt = [*PROMPT, 7]
    engine.submit(submit("a", prompt, max_tokens=3))
    engine.step()
    assert not engine.step(), "the transfer has not ended, although five blocks have arrived"
    clock.now += TRANSFER_TIMEOUT_S
    heard = hear(engine, "a")["a"]
    assert (heard.token_ids, heard.num_cached_tokens) == (expected_tokens(prompt, 3), 20)
    load = engine.load()
    assert (load.prefix_hits, load.prefix_host_hits, load.prefix_disk_hits) == (20, 20, 0)
    assert sum(runner.batch_tokens[1:]) == len(prompt) - 20 + 2


def test_a_sequence_that_gave_up_asks_the_tiers_again_once_it_is_preempted() -> None:
    clock = Clock()
    engine, tiers, _ = stuck_engine(clock)
    for name in "ab":
        engine.submit(submit(name, [*PROMPT, 7], max_tokens=3))
    engine.step()
    clock.now += TRANSFER_TIMEOUT_S
    engine.step()
    assert [s.sequence_id for s in engine.scheduler.running] == ["a", "b"]
    assert not tiers.open
    engine.scheduler.pool.forget(engine.scheduler.running[0].tables[0].blocks)
    engine.sequences.abort("a")
    assert engine.scheduler.preemption.preempt_youngest(keep_oldest=False)
    engine.step()
    assert len(tiers.open) == 1


def test_what_is_fetched_after_a_preemption_is_no_second_hit() -> None:
    engine, tiers, _ = stuck_engine(Clock())
    tiers.draw.randint = lambda low, high: low
    engine.submit(submit("a", [*PROMPT, 7], max_tokens=3))
    for _ in range(2):
        engine.step()
        engine.step()
        (sequence,) = engine.scheduler.running
        assert sequence.num_computed_tokens >= 4 * BLOCKS
        load = engine.load()
        assert (load.prefix_queries, load.prefix_hits, load.prefix_host_hits) == (36 + 37, 36, 36)
        engine.scheduler.pool.forget(sequence.tables[0].blocks)
        assert engine.scheduler.preemption.preempt_youngest(keep_oldest=False)


def test_an_aborted_sequence_that_gave_up_is_forgotten() -> None:
    clock = Clock()
    engine, _, _ = stuck_engine(clock)
    engine.submit(submit("a", [*PROMPT, 1], max_tokens=3))
    engine.submit(submit("b", [*PROMPT, 2], max_tokens=3))
    engine.step()
    clock.now += TRANSFER_TIMEOUT_S
    list(engine.scheduler.waiting.take_admitted(clock.now))
    connector, waiting = engine.scheduler.connector, engine.sequences.get("b")
    assert waiting is not None
    assert not connector.may_wait(waiting)
    engine.sequences.abort("b")
    assert connector.may_wait(waiting)


def test_a_twin_of_a_cached_block_is_not_kept_for_another_host() -> None:
    engine, tiers, runner = stuck_engine(Clock())
    engine.submit(replace(submit("hands over", [*PROMPT, 7], max_tokens=1), hands_over=True))
    engine.step()
    (fetch,) = tiers.open
    tiers.pays = lambda names, num_tokens: False
    engine.submit(submit("computes the same", [*PROMPT, 8], max_tokens=9))
    engine.step()
    fetch.polls = 1
    assert fetch.is_done
    tiers.host.clear()  # the blocks were evicted after they were copied
    engine.step()
    assert {output.sequence_id for output in engine.sequences.take_outputs() if output.finish_reason} == {"hands over"}
    assert not any(map(engine.scheduler.pool.num_holders, range(BLOCKS))), (
        "its blocks were released, and not stored again"
    )
    engine.submit(submit("overwrites half of one", [500, 501], max_tokens=1))
    engine.step()
    assert runner.slots[0] == (500,)
    engine.tiers.begin_stores(everything=True)
    chain = [tuple(PROMPT[: i + 1]) for i in range(len(PROMPT))]
    assert sorted(tiers.host.values()) == [chain[i : i + 4] for i in range(0, len(chain), 4)]
