"""The content of a step: how long prompts delay other sequences, in steps and on a clock that computed tokens advance."""

import math
from array import array
from itertools import pairwise

import pytest

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.images.prompt import SequenceImage
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk, SchedulerLimits
from pilotlight.engine.scheduling.scheduler import Scheduler
from tests.engine.driver import drain, submit
from tests.engine.fake_runner import FakeRunner, fake_engine

TOKENS_PER_S = 850  # the speed of a small model on a CPU


def clock_of(runner: FakeRunner) -> float:
    """Return the time that the runner's tokens so far take."""
    return sum(runner.batch_tokens) / TOKENS_PER_S


def slow_engine(max_decode_delay_s: float = math.inf, **shape: int) -> tuple[Engine, FakeRunner]:
    """Return an engine whose clock advances only by the tokens that it computes."""
    runners: list[FakeRunner] = []
    engine, runner = fake_engine(
        num_blocks=400,
        block_size=16,
        clock=lambda: clock_of(runners[0]),
        max_decode_delay_s=max_decode_delay_s,
        **{"max_num_batched_tokens": 2048, **shape},
    )
    runners.append(runner)
    return engine, runner


def held_up_s(max_decode_delay_s: float) -> tuple[float, int]:
    """Return a stream's longest wait for a token while a prompt of 2,048 tokens is computed, and the number of steps for the prompt."""
    engine, runner = slow_engine(max_decode_delay_s)
    engine.submit(submit("stream", list(range(100)), salt=b"a", max_tokens=200))
    for _ in range(5):
        engine.step()
    engine.sequences.take_outputs()
    engine.submit(submit("long", [i % 900 for i in range(2048)], salt=b"b", max_tokens=1))
    times: list[float] = []
    steps = 0
    while not any(output.sequence_id == "long" for output in engine.sequences.take_outputs()):
        times.append(clock_of(runner))
        engine.step()
        steps += 1
    times.append(clock_of(runner))
    return max(later - earlier for earlier, later in pairwise(times)), steps


def test_the_first_step_of_a_model_whose_speed_is_unknown_is_short() -> None:
    engine, runner = slow_engine(most_unmeasured=256)
    drain(engine, [submit("first", [i % 900 for i in range(4096)], max_tokens=1)])
    assert runner.batch_tokens == [256, 2048, 1792]


def test_a_long_prompt_holds_up_the_streams_beside_it_by_no_more_than_was_said() -> None:
    longest_s, steps = held_up_s(float("inf"))
    assert longest_s > 2.4
    assert steps <= 2
    longest_s, steps = held_up_s(0.2)
    assert longest_s <= 0.2 + 2 / TOKENS_PER_S
    assert steps == 13  # steps of 170 tokens


def test_a_step_has_a_block_of_prompt_tokens_at_least() -> None:
    longest_s, steps = held_up_s(0.0)
    assert steps == 128
    assert longest_s == pytest.approx(17 / TOKENS_PER_S)


def test_where_nothing_decodes_a_prompt_has_the_whole_step() -> None:
    engine, runner = slow_engine(0.0)
    for name in ("first", "second"):
        engine.submit(submit(name, [ord(name[0]) + i % 700 for i in range(2048)], max_tokens=1))
    engine.step()
    engine.step()
    assert runner.batch_tokens == [2048, 2048]


@pytest.mark.parametrize(("hands_over", "steps"), [(True, [388, 512]), (False, [900])])
def test_the_last_chunk_of_a_prompt_that_is_handed_over_is_short(hands_over: bool, steps: list[int]) -> None:
    engine, runner = fake_engine(num_blocks=80, block_size=16, max_num_batched_tokens=1024)
    drain(engine, [replace(submit("a", list(range(900)), max_tokens=1), hands_over=hands_over)])
    assert runner.batch_tokens == steps


def test_before_anything_was_measured_a_step_is_not_capped() -> None:
    engine, _ = slow_engine(0.2)
    assert engine.stats.rates.num_prompt_tokens_in(0.2) == float("inf")


def steps_until_short_ends(budget: int, num_long: int, depth: int, delay_s: float = float("inf")) -> int:
    """Return how many steps a prompt of three tokens with high priority takes after prompts of 16,000 tokens of other tenants."""
    engine, _ = fake_engine(
        num_blocks=2000 * num_long,
        block_size=16,
        max_num_batched_tokens=budget,
        depth=depth,
        max_decode_delay_s=delay_s,
    )
    for i in range(num_long):
        prompt = tuple((i + n) % 1000 for n in range(16_000))
        engine.submit(Submit(f"long {i}", "tiny", prompt, SamplingParams(1), b"%d" % i))
    for _ in range(3):
        engine.step()
    engine.sequences.take_outputs()
    engine.submit(Submit("short", "tiny", (1, 2, 3), SamplingParams(1), b"other", priority=-8))
    for step in range(1, 100):
        engine.step()
        if engine.sequences.take_outputs():
            return step
    raise AssertionError("a hundred steps were not enough")


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("budget", "num_long"), [(2048, 1), (256, 1), (256, 5), (16, 1), (16, 5)])
def test_a_short_prompt_at_top_priority_waits_for_no_long_one(budget: int, num_long: int, depth: int) -> None:
    assert steps_until_short_ends(budget, num_long, depth) == depth


def test_the_more_urgent_of_two_long_prompts_is_computed_first_and_the_other_continues() -> None:
    engine, _ = fake_engine(num_blocks=1000, block_size=16, max_num_batched_tokens=256)
    for name, priority in (("usual", 0), ("urgent", -8)):
        prompt = tuple((priority + 10 + n) % 1000 for n in range(4096))
        engine.submit(Submit(name, "tiny", prompt, SamplingParams(1), b"t", priority=priority))
        engine.step()
    usual, urgent = engine.scheduler.running
    before = usual.num_computed_tokens
    steps = 1
    while not engine.sequences.take_outputs():
        engine.step()
        steps += 1
    assert urgent not in engine.scheduler.running
    assert steps <= 4096 / 256 * 17 / 16 + 2
    assert 128 <= usual.num_computed_tokens - before <= 512


def scheduler(num_blocks: int, **limits: int) -> Scheduler:
    defaults = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_waiting": 100}
    return Scheduler(BlockPool(num_blocks), SchedulerLimits(**(defaults | limits)))


def decoding(scheduler: Scheduler, *names: str, length: int = 6) -> list[Sequence]:
    """Return new running sequences whose prompts are computed."""
    sequences = [Sequence(name, list(range(length)), SamplingParams(50), b"", length_limit=60) for name in names]
    for sequence in sequences:
        scheduler.add(sequence)
    compute(scheduler)
    return sequences


def compute(scheduler: Scheduler) -> dict[str, int]:
    """Compute a step; return the length of each sequence's chunk."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        scheduler.launch(chunk)
    for chunk in chunks:
        if chunk.samples:
            chunk.sequence.token_ids[chunk.end] = 7
            chunk.sequence.started = True
        scheduler.complete(chunk)
    return {chunk.sequence.sequence_id: chunk.end - chunk.start for chunk in chunks}


def test_a_step_is_decodes_first_and_prompts_in_what_they_leave() -> None:
    made = scheduler(40, max_num_batched_tokens=10)
    decoding(made, "a", length=6)
    made.add(Sequence("b", list(range(30, 60)), SamplingParams(5), b"", length_limit=60))
    assert list(compute(made).items()) == [("a", 1), ("b", 9)]
    assert list(compute(made).items()) == [("a", 1), ("b", 9)]


def test_what_a_newcomer_leaves_of_its_share_goes_to_the_prompts_in_work() -> None:
    made = scheduler(40, max_num_batched_tokens=16)
    made.add(Sequence("long", list(range(60)), SamplingParams(5), b"", length_limit=70, tenant=b"a"))
    assert compute(made) == {"long": 16}
    made.add(Sequence("short", [9, 9, 9], SamplingParams(5), b"", length_limit=70, tenant=b"b"))
    assert compute(made) == {"short": 3, "long": 13}


def test_a_newcomer_leaves_each_running_sequence_a_spare_block() -> None:
    made = scheduler(6)
    decoding(made, "a", "b", length=4)  # each holds a full block, and a block for its next token
    made.add(Sequence("c", [9, 9, 9], SamplingParams(5), b"", length_limit=60))
    compute(made)
    assert made.pool.num_held == 4
    assert [s.sequence_id for s in made.running] == ["a", "b"]
    assert len(made.waiting) == 1


def test_what_awaits_its_token_is_held_up_as_well() -> None:
    made = scheduler(40)
    decoding(made, "a")
    for chunk in made.schedule():
        made.launch(chunk, is_fed=False)
    made.add(Sequence("b", list(range(30, 60)), SamplingParams(5), b"", length_limit=60))
    (chunk,) = made.schedule(most_beside_decodes=8)
    assert (chunk.sequence.sequence_id, chunk.end - chunk.start) == ("b", 8)


@pytest.mark.parametrize(("most", "length"), [(50, 47), (47, 47), (46, 31), (31, 31), (30, 30), (8, 8)])
def test_a_prompt_beside_decodes_fills_tiles_of_rows(most: int, length: int) -> None:
    made = scheduler(40)
    decoding(made, "a")
    made.add(Sequence("b", list(range(30, 90)), SamplingParams(5), b"", length_limit=90))
    decode, prompt = made.schedule(most_beside_decodes=most)
    assert (decode.end - decode.start, prompt.end - prompt.start) == (1, length), (
        "with the decode, 48 or 32 rows; fewer than 32 are not rounded"
    )


def seeing(name: str, length: int, *images: tuple[int, int]) -> Sequence:
    """Return a sequence, the only one of its tenant; `images`: start and end of images whose tokens see each other."""
    made = [
        SequenceImage(name.encode(), b"", start, end, array("q", range(start, end)), False, is_bidirectional=True)
        for start, end in images
    ]
    prompt = [ord(name[0]) + i for i in range(length)]
    sampling = SamplingParams(5)
    return Sequence(name, prompt, sampling, b"", length_limit=length + 9, tenant=name.encode(), images=tuple(made))


def test_replayed_output_is_computed_by_kernels_of_decodes_in_chunks_of_its_own() -> None:
    made = scheduler(80, replays=True)
    prompt = list(range(50))
    made.add(Sequence("a", prompt, SamplingParams(5), b"", num_delivered_tokens=20, length_limit=60))
    made.add(Sequence("b", prompt[:17], SamplingParams(5), b"", length_limit=60))
    found = []
    for _ in range(3):
        chunks = made.schedule()
        found.append([(chunk.sequence.sequence_id, chunk.num_tokens, chunk.is_decode) for chunk in chunks])
        for chunk in chunks:
            made.launch(chunk)
            made.complete(chunk)
    assert found[:2] == [[("a", 30, False), ("b", 17, False)], [("a", 16, True)]]
    assert found[2] == [("a", 4, True)]


def test_a_prompts_last_token_after_cached_ones_is_no_decode_if_output_is_replayed() -> None:
    sequence = Sequence("a", list(range(33)), SamplingParams(5), b"", length_limit=60, replays=True)
    sequence.num_computed_tokens = 32
    assert not sequence.is_decoding
    assert not Chunk.next_of(sequence, 1).is_decode


@pytest.mark.parametrize(
    ("budget", "lengths"), [(64, [50]), (31, [30, 20]), (10, [6, 18, 6, 12, 8]), (4, [4, 2, 18, 4, 2, 12, 4, 4])]
)
def test_no_chunk_ends_within_an_image_whose_tokens_see_each_other(budget: int, lengths: list[int]) -> None:
    made = scheduler(40, max_num_batched_tokens=budget, most_image_tokens=18)
    made.add(seeing("a", 50, (6, 24), (30, 42)))
    assert [compute(made)["a"] for _ in lengths] == lengths
    assert compute(made) == {"a": 1}


def test_an_image_beside_decodes_is_computed_in_one_step_whatever_the_limit() -> None:
    made = scheduler(40, most_image_tokens=20)
    decoding(made, "a")
    made.add(seeing("b", 30, (4, 24)))
    found = []
    for _ in range(3):
        _, prompt = made.schedule(most_beside_decodes=8)
        made.launch(prompt)
        made.complete(prompt)
        found.append(prompt.end)
    assert found == [4, 24, 30]


def test_one_image_in_a_step_may_exceed_its_limit_and_the_next_step_is_for_others() -> None:
    made = scheduler(80, max_num_batched_tokens=8, most_image_tokens=20)
    for name in "abc":
        made.add(seeing(name, 48, (4, 24), (28, 48)))
    steps = [compute(made) for _ in range(20)]
    images = [[name for name, length in step.items() if length >= 20] for step in steps]
    assert max(map(len, images)) == 1
    assert max(sum(step.values()) for step in steps) <= 8 + 20
    order = [name for names in images for name in names]
    assert (sorted(order[:3]), sorted(order[3:])) == (["a", "b", "c"],) * 2
    assert all(sequence.has_computed_prompt for sequence in made.running)


def test_a_sample_whose_leader_has_computed_the_prompt_starts_at_once() -> None:
    made = scheduler(40)
    (leader,) = decoding(made, "leader", length=10)
    made.add(Sequence("sample", list(range(10)), SamplingParams(5), b"", length_limit=60), leader)
    assert compute(made) == {"leader": 1, "sample": 2}


def test_a_newcomer_goes_to_a_rank_with_room_for_it_though_another_one_holds_less() -> None:
    pool = BlockPool(40, num_shares=2)
    ranks = Scheduler(pool, SchedulerLimits(4, 64, 8, 100, copies=2))

    def running(share: int, length: int, num_blocks: int) -> None:
        """Add a running sequence of a rank. Its results are in flight, so that it has nothing to compute now."""
        blocks = [pool.allocate(share) for _ in range(num_blocks)]
        sequence = Sequence(f"of {share}", list(range(length)), SamplingParams(9), b"", share=share, length_limit=99)
        sequence.tables = [BlockTable([block for block in blocks if block is not None], [1] * num_blocks)]
        sequence.num_computed_tokens = sequence.num_completed_tokens = 4 * num_blocks
        sequence.awaits_tokens = True
        ranks.running.append(sequence)

    running(0, 64, 4)  # lacks twelve of its sixteen blocks
    running(1, 24, 6)
    newcomer = Sequence("new", [7] * 20, SamplingParams(9), b"", length_limit=99)
    ranks.add(newcomer)
    assert [chunk.sequence for chunk in ranks.schedule()] == [newcomer]
    assert newcomer.share == 1
    ranks.remove(newcomer)
    ranks.remove(ranks.running[0])
    running(0, 24, 5)
    ranks.add(again := Sequence("again", [8] * 20, SamplingParams(9), b"", length_limit=99))
    ranks.schedule()
    assert again.share == 0, "if both ranks have room, the one with fewer blocks is chosen"


@pytest.mark.parametrize("places", [1, 8])
def test_a_request_of_a_lost_host_is_computed_by_its_age(places: int) -> None:
    engine, _ = slow_engine(max_num_seqs=places, max_num_batched_tokens=64)
    for number in range(4):
        engine.submit(submit(f"{number}", [7 * number + i % 900 for i in range(200)], max_tokens=1))
    engine.step()
    engine.step()
    engine.submit(replace(submit("moved", [i % 900 + 50 for i in range(200)], max_tokens=1), waited_s=1e3))
    ends = [output.sequence_id for _ in range(60) for output in (engine.step(), engine.sequences.take_outputs())[1]]
    assert ends == ["0", "moved", "1", "2", "3"], "only the one whose prompt was nearly computed is before it"
