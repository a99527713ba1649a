"""Preemption: of the youngest sequence first, of none for a younger one, and of all holders of blocks that must be freed."""

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.tier_protocol import TRANSFER_TIMEOUT_S
from pilotlight.engine.scheduling.plan import StepPlan
from pilotlight.engine.scheduling.scheduler import Scheduler
from tests.clock import Clock
from tests.engine.driver import submit
from tests.engine.fake_runner import fake_engine
from tests.engine.kv.test_connector import PROMPT, stuck_engine


def running(*names: str) -> tuple[Scheduler, list[Sequence]]:
    engine, _ = fake_engine()
    for name in names:
        engine.submit(submit(name, [1, 2, 3, 4, 5], max_tokens=20))
    engine.step()
    return engine.scheduler, list(engine.scheduler.running)


def test_the_youngest_that_is_not_planned_yet_gives_way() -> None:
    scheduler, (old, middle, young) = running("old", "middle", "young")
    plan = StepPlan(64)
    plan.add(old, 1)
    plan.add(young, 1)
    assert not scheduler.preemption.preempt_for(middle, plan), "a sequence must not be preempted for itself"
    assert scheduler.running == [old, middle, young]
    assert scheduler.preemption.preempt_for(old, plan)
    assert scheduler.running == [old, young]
    assert (middle.tables, middle.num_computed_tokens, len(middle.token_ids)) == ([], 0, 6)
    assert list(scheduler.waiting.ready) == [middle]
    assert scheduler.counts.preemptions == 1


def test_no_sequence_gives_way_to_a_younger_one() -> None:
    scheduler, (old, middle, young) = running("old", "middle", "young")
    assert not scheduler.preemption.preempt_for(young, StepPlan(64))
    assert scheduler.preemption.preempt_for(middle, StepPlan(64))
    assert scheduler.running == [old, middle]


def test_for_another_model_the_youngest_goes_and_the_oldest_where_that_may() -> None:
    scheduler, (old, young) = running("old", "young")
    assert not scheduler.preemption.is_alone
    assert scheduler.preemption.preempt_youngest(keep_oldest=True)
    assert scheduler.running == [old]
    assert scheduler.preemption.is_alone
    assert not scheduler.preemption.preempt_youngest(keep_oldest=True)
    assert scheduler.preemption.preempt_youngest(keep_oldest=False)
    assert scheduler.running == []
    assert not scheduler.preemption.preempt_youngest(keep_oldest=False)
    assert list(scheduler.waiting.ready) == [old, young]


def test_those_that_hold_a_block_that_must_leave_are_preempted() -> None:
    scheduler, (first, second, third) = running("first", "second", "third")
    block = second.tables[0].blocks[-1]
    scheduler.preemption.preempt_holders(range(block, block + 1))
    assert scheduler.running == [first, third]


def test_the_oldest_is_one_with_blocks_and_else_the_next_to_have_some() -> None:
    scheduler, (old, young) = running("old", "young")
    oldest = scheduler.preemption.oldest()
    assert oldest is not None
    assert (oldest.arrival, list(oldest.blocks), oldest.num_missing) == (old.arrival, list(old.tables[0].blocks), 0)
    scheduler.preemption.preempt(old)
    oldest = scheduler.preemption.oldest()
    assert oldest is not None
    assert oldest.arrival == young.arrival
    scheduler.preemption.preempt(young)
    oldest = scheduler.preemption.oldest()
    assert oldest is not None
    assert (oldest.arrival, list(oldest.blocks), oldest.num_missing) == (old.arrival, [], 2)
    scheduler.remove(old)
    assert scheduler.preemption.has_work
    scheduler.remove(young)
    assert scheduler.preemption.oldest() is None
    assert not scheduler.preemption.has_work


def test_one_whose_blocks_are_being_filled_has_blocks_and_its_transfer_ends_with_them() -> None:
    clock = Clock()
    engine, tiers, _ = stuck_engine(clock)
    engine.submit(submit("a", [*PROMPT, 1], max_tokens=2))
    engine.submit(submit("behind", [*PROMPT, 2], max_tokens=2))
    engine.step()
    (fetching,) = engine.scheduler.preemption.holders()
    assert fetching.sequence_id == "a"
    engine.scheduler.preemption.preempt_holders(range(80))
    assert not tiers.open
    assert engine.scheduler.pool.num_held == 0
    engine.step()
    assert len(tiers.open) == 1, "one sequence fetches the blocks again, and the other waits for it"
    assert [len(engine.scheduler.waiting.admitted), len(engine.scheduler.waiting)] == [1, 2]
    clock.now += TRANSFER_TIMEOUT_S
    engine.step()
    assert len(engine.scheduler.running) == 2


def test_blocks_beyond_its_tokens_are_not_missing_from_the_oldest() -> None:
    scheduler, (sequence,) = running("drafting")
    assert scheduler.blocks.grow(sequence, 20)
    oldest = scheduler.preemption.oldest()
    assert oldest is not None
    assert (len(oldest.blocks), oldest.num_missing) == (5, 0)
