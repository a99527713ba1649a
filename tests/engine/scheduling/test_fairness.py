"""Fair admission: the bounds stated in engine/scheduling/fairness.py hold with tenants that flood, send little, or come and go."""

from collections import Counter, deque
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.fairness import ADMISSIONS_PER_TURN, AGEING_ADMISSIONS, FairQueue
from tests.engine.fake_runner import fake_engine
from tests.engine.scheduling.references import num_kept

QUANTUM = 100
LEAST_COST = QUANTUM // ADMISSIONS_PER_TURN

prompt_lengths = st.integers(1, 400)
sizes = st.lists(prompt_lengths, min_size=1, max_size=12)


class Line:
    """A queue of prompts that are not cached, which counts the tokens served to each tenant."""

    def __init__(self) -> None:
        self.queue = FairQueue(QUANTUM)
        self.served: Counter[bytes] = Counter()
        self._arrivals = count()

    def add(self, tenant: bytes, length: int, priority: int = 0) -> Sequence:
        sequence = Sequence("", [0] * length, SamplingParams(1), b"", tenant=tenant, priority=priority)
        sequence.arrival = next(self._arrivals)
        self.queue.add(sequence)
        return sequence

    def admit(self) -> Sequence:
        expected = self.queue.peek()
        assert self.queue.peek() is expected, "peek must not change the queue"
        sequence = self.queue.pop(len(expected.token_ids))
        assert sequence is expected
        if sequence.num_cached_tokens is None:
            self.served[sequence.tenant] += max(len(sequence.token_ids), LEAST_COST)
            sequence.num_cached_tokens = 0
        return sequence


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(0, 60), prompt_lengths)
@settings(max_examples=200, deadline=None)
def test_a_newcomer_waits_for_a_quantum_and_a_prompt_of_each_other_tenant(
    floods: list[list[int]], before: int, length: int
) -> None:
    line = Line()
    tenants = [b"%d" % i for i in range(len(floods))]
    lengths = {tenant: deque(flood) for tenant, flood in zip(tenants, floods, strict=True)}

    def admit() -> bytes:
        """Admit a request; if its tenant floods the queue, add its next one. Return the tenant."""
        tenant = line.admit().tenant
        if tenant in lengths:
            line.add(tenant, lengths[tenant][0])
            lengths[tenant].rotate(-1)
        return tenant

    for tenant in tenants:
        for size in lengths[tenant]:
            line.add(tenant, size)
    for _ in range(before):
        admit()
    line.served.clear()
    line.add(b"newcomer", length)
    while admit() != b"newcomer":
        pass
    for tenant, flood in zip(tenants, floods, strict=True):
        assert line.served[tenant] <= QUANTUM + max(*flood, LEAST_COST)


@given(st.lists(sizes, min_size=2, max_size=5), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_tenants_that_always_wait_are_served_alike(floods: list[list[int]], admissions: int) -> None:
    line = Line()
    lengths = {b"%d" % i: deque(flood) for i, flood in enumerate(floods)}
    for tenant, flood in lengths.items():
        line.add(tenant, flood[0])
        line.add(tenant, flood[0])
    for _ in range(admissions):
        tenant = line.admit().tenant
        lengths[tenant].rotate(-1)
        line.add(tenant, lengths[tenant][0])
    shares = [line.served[tenant] for tenant in lengths]
    assert max(shares) - min(shares) <= QUANTUM + max(LEAST_COST, *(max(flood) for flood in floods))


@given(sizes, prompt_lengths, st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_one_giant_at_a_time_gains_nothing_over_a_queue(flood: list[int], giant: int, admissions: int) -> None:
    """A tenant keeps its debt although its queue is empty after each admission."""
    line = Line()
    small = deque(flood)
    line.add(b"one at a time", giant)
    line.add(b"queue", small[0])
    line.add(b"queue", small[0])
    for _ in range(admissions):
        tenant = line.admit().tenant
        if tenant == b"queue":
            small.rotate(-1)
            line.add(tenant, small[0])
        else:
            line.add(tenant, giant)
    advantage = line.served[b"one at a time"] - line.served[b"queue"]
    assert advantage <= QUANTUM + max(giant, *flood, LEAST_COST)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), prompt_lengths, st.integers(-1, 1)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_tenants_sequences_of_one_priority_go_in_order_and_all_of_them_go(
    arrivals: list[tuple[bytes, int, int]],
) -> None:
    line = Line()
    added = [line.add(*arrival) for arrival in arrivals]
    assert line.queue.num_tokens == sum(len(sequence.token_ids) for sequence in added)
    dropped = added[::5]
    for sequence in dropped:
        line.queue.remove(sequence)
    admitted = [line.admit() for _ in range(len(line.queue))]
    assert (len(line.queue), line.queue.num_tokens, list(line.queue)) == (0, 0, [])
    assert set(admitted) == set(added) - set(dropped)
    for key in {(sequence.tenant, sequence.priority) for sequence in admitted}:
        order = [s.arrival for s in admitted if (s.tenant, s.priority) == key]
        assert order == sorted(order)


def test_the_smaller_priority_goes_first() -> None:
    line = Line()
    for priority in (3, 0, -2, 0):
        line.add(b"t", 10, priority)
    assert [line.admit().priority for _ in range(4)] == [-2, 0, 0, 3]


@pytest.mark.parametrize("passed_over", [[5], [1, 2, 5, 8]])
def test_no_priority_starves(passed_over: list[int]) -> None:
    line = Line()
    for priority in passed_over:
        for _ in range(50):
            line.add(b"patient", 10, priority)
    order = []
    for _ in range(400):
        line.add(b"flood", 10, 0)
        order.append(line.admit().priority)
    for priority in passed_over:
        places = [-1, *(i for i, admitted in enumerate(order) if admitted == priority)]
        gaps = [later - earlier for earlier, later in pairwise(places)]
        assert gaps
        assert max(gaps) <= AGEING_ADMISSIONS + len(passed_over)
    assert order.count(0) >= 400 * (1 - len(passed_over) / AGEING_ADMISSIONS), "urgent requests must still come first"


def test_cached_prompts_do_not_win_every_place_in_the_batch() -> None:
    line = Line()
    for _ in range(200):
        line.add(b"cached", 1)
    line.add(b"other", 50)
    order = [line.admit().tenant for _ in range(20)]
    assert order.index(b"other") <= 2 * ADMISSIONS_PER_TURN


def test_a_preempted_sequence_goes_before_its_tenants_others_and_is_not_paid_twice() -> None:
    line = Line()
    first = line.add(b"t", 90)
    line.add(b"t", 90)
    line.add(b"other", 90)
    assert line.admit() is first
    line.queue.add(first)  # as after a preemption
    assert line.admit() is first
    line.queue.add(first)
    assert [line.admit().arrival for _ in range(3)] == [0, 1, 2], (
        "a preempted sequence is charged once, so its tenant has 10 tokens left"
    )


def test_debts_are_forgotten_without_a_queue_and_do_not_pile_up() -> None:
    line = Line()
    guests = [b"guest %d" % i for i in range(1000)]
    for i in range(1000):
        line.add(b"steady", 100)
        line.add(guests[i], 300)
        while len(line.queue) > 2:
            line.admit()
    line.served.clear()
    assert num_kept(guests) < 100
    while line.queue:
        line.admit()
    line.served.clear()
    assert num_kept(guests) == 0


def test_a_flood_delays_another_tenants_request_by_its_share_alone() -> None:
    engine, _ = fake_engine(num_blocks=400, max_num_batched_tokens=32, max_num_seqs=4)
    for i in range(60):
        engine.submit(Submit(f"flood {i}", "tiny", tuple(range(i, i + 30)), SamplingParams(4), b"flood"))
    for _ in range(10):
        engine.step()
    started = {o.sequence_id for o in engine.sequences.take_outputs()}
    engine.submit(Submit("guest", "tiny", tuple(range(500, 530)), SamplingParams(4), b"guest"))
    ended: list[str] = []
    while engine.has_work:
        engine.step()
        ended += [o.sequence_id for o in engine.sequences.take_outputs() if o.finish_reason]
    # Four sequences were running. Before the guest, the flood may start at most three more: a quantum of tokens, and one prompt beyond it.
    assert ended.index("guest") <= 4 + 3
    assert len(started) < 50
    assert len(ended) >= 50


def test_started_sequences_are_preempted_by_age_whatever_their_priority() -> None:
    engine, _ = fake_engine(num_blocks=6, block_size=4)
    engine.submit(Submit("old", "tiny", tuple(range(6)), SamplingParams(18), priority=8))
    engine.step()
    engine.submit(Submit("young", "tiny", tuple(range(6)), SamplingParams(18), priority=-8))
    ended = []
    while engine.has_work:
        engine.step()
        ended += [o.sequence_id for o in engine.sequences.take_outputs() if o.finish_reason]
    assert ended == ["old", "young"]
    assert engine.scheduler.counts.preemptions > 0


def test_an_absence_pays_debts_and_saves_up_nothing() -> None:
    line = Line()
    line.add(b"steady", 50)
    line.add(b"back", 350)
    while line.queue:
        line.add(b"steady", 50)
        if line.admit().tenant == b"back":
            break
    for _ in range(100):  # 50 rounds, more than enough to pay the debt of 250 tokens
        line.add(b"steady", 50)
        line.admit()
    line.served.clear()
    for _ in range(20):
        line.add(b"back", 50)
    line.add(b"steady", 50)
    line.add(b"steady", 50)
    for _ in range(10):
        line.admit()
    assert line.served[b"back"] - line.served[b"steady"] <= QUANTUM + 50


@pytest.mark.parametrize("queued", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("salt", "priority"), [(b"other", 0), (b"other", -8), (b"long", -8)])
def test_a_long_prompt_delays_no_short_one_of_another_tenant(
    salt: bytes, priority: int, depth: int, queued: int
) -> None:
    engine, runner = fake_engine(num_blocks=300, max_num_batched_tokens=16, depth=depth)
    for i in range(1 + queued):
        prompt = tuple(i * 7 + n % 900 for n in range(800 // (1 + queued)))
        engine.submit(Submit(f"long {i}", "tiny", prompt, SamplingParams(1), b"long"))
    engine.step()
    engine.step()
    engine.submit(Submit("short", "tiny", (1, 2, 3), SamplingParams(1), salt, priority=priority))
    ended: list[str] = []
    for _ in range(2 + depth):  # a step of the other tenant may have started
        engine.step()
        ended += [o.sequence_id for o in engine.sequences.take_outputs() if o.token_ids]
    assert ended == ["short"]
    while engine.has_work:
        engine.step()
    assert sum(runner.batch_tokens) == 803
    assert len(runner.batch_tokens) <= 53, "steps must be full"


def test_long_prompts_of_several_tenants_advance_alike() -> None:
    engine, _ = fake_engine(num_blocks=300, max_num_batched_tokens=24)
    for tenant in (b"a", b"b", b"c"):
        for i in range(2):
            prompt = tuple((tenant[0] * 3 + i + n) % 900 for n in range(150))
            engine.submit(Submit(f"{tenant!r} {i}", "tiny", prompt, SamplingParams(1), tenant))
    for _ in range(10):
        engine.step()
    computed = sorted(s.num_computed_tokens for s in engine.scheduler.running)
    assert len(computed) == 3, "the second prompt of a tenant waits for the first"
    assert computed[0] >= 64
    assert sum(computed) == 240
