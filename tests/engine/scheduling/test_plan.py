"""A planned step, and the lengths of a sequence on which it depends, at their limits and without a scheduler."""

import math
from array import array
from dataclasses import replace

import pytest

from pilotlight.engine.api.protocol import Pooling, SamplingParams
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.images.prompt import SequenceImage
from pilotlight.engine.scheduling.plan import Chunk, StepPlan, most_drafts


def sequence(length: int = 6, computed: int = 0, pooling: Pooling | None = None, **sampling: object) -> Sequence:
    made = Sequence("s", list(range(length)), SamplingParams(50, **sampling), pooling=pooling, length_limit=20)
    made.num_computed_tokens = made.num_completed_tokens = computed
    return made


@pytest.mark.parametrize(
    ("rows", "budget", "most", "left"),
    [
        (0, 64, math.inf, 64),
        (0, 64, 100.0, 64),
        (0, 64, 63.9, 48),
        (3, 100, 50.0, 45),
        (3, 20, math.inf, 20),
        (1, 31, math.inf, 31),
        (0, 31, math.inf, 16),
        (0, 16, math.inf, 16),
        (0, 15, math.inf, 15),
        (16, 17, 17.0, 16),
        (5, 0, 3.0, 0),
    ],
)
def test_what_is_left_of_a_step_fills_tiles_of_rows_where_that_is_a_tile_or_more(
    rows: int, budget: int, most: float, left: int
) -> None:
    plan = StepPlan(budget + rows)
    if rows:
        plan.add(sequence(rows + 1), rows)
    plan.limit(most)
    assert plan.budget == left


def test_a_plan_adds_up_and_gives_decodes_before_prompts() -> None:
    prompt, decode, last = sequence(10), sequence(6, 5), sequence(1)
    plan = StepPlan(20)
    assert plan.is_empty
    for each, length in ((prompt, 4), (decode, 1), (prompt, 3), (last, 1)):
        plan.add(each, length)
    plan.add_drafts(decode, (7, 8))
    assert (plan.budget, plan.num_rows, plan.is_empty) == (20 - 9 - 2, 9, False)
    assert [plan.length_of(each) for each in (prompt, decode, sequence())] == [7, 1, 0]
    assert [each in plan for each in (prompt, decode, sequence())] == [True, True, False]
    assert [(chunk.sequence, chunk.start, chunk.end, chunk.samples, chunk.drafts) for chunk in plan.chunks] == [
        (decode, 5, 6, True, (7, 8)), (prompt, 0, 7, False, ()), (last, 0, 1, True, ()),
    ]  # fmt: skip
    assert [chunk.num_tokens for chunk in plan.chunks] == [3, 7, 1]
    assert [chunk.is_decode for chunk in plan.chunks] == [True, False, False]
    assert plan.decoding == [decode]


def test_a_chunk_chooses_a_token_at_its_sequences_end_unless_that_is_embedded_and_is_its_epochs() -> None:
    assert Chunk.next_of(sequence(6, 2), 4).samples
    assert not Chunk.next_of(sequence(6, 2), 3).samples
    pooled = sequence(6, 5, pooling="last")
    assert not Chunk.next_of(pooled, 1).samples
    plan = StepPlan(5)
    plan.add(pooled, 1)
    assert plan.decoding == []
    chunk = Chunk.next_of(pooled, 1)
    assert chunk.is_current
    pooled.epoch += 1
    assert not chunk.is_current


@pytest.mark.parametrize(("length", "most"), [(18, 1), (19, 0), (20, -1)])
def test_the_token_after_the_last_draft_is_the_sequences_last_at_most(length: int, most: int) -> None:
    assert most_drafts(sequence(length)) == most


def test_what_can_be_computed_of_a_sequence_is_what_is_known_and_what_may_still_come() -> None:
    one = sequence(6, 2)
    assert (one.num_uncomputed_tokens, one.num_ready_tokens, one.is_decoding) == (4, 4, False)
    one.num_computed_tokens = 5
    assert one.is_decoding
    one.num_computed_tokens = 6
    one.token_ids.append(PENDING)
    assert (one.is_pending, one.is_decoding, one.num_ready_tokens) == (True, True, 1)
    one.awaits_tokens = True
    assert one.num_ready_tokens == 0
    one.awaits_tokens = False
    one.length_limit = 8
    assert one.num_ready_tokens == 1
    one.length_limit = 7  # the token in flight is the last one
    assert one.num_ready_tokens == 0
    one.token_ids[-1] = 9
    assert one.num_ready_tokens == 1
    assert not sequence(1).is_decoding, "a prompt of one token is not a decode"


def test_a_sequence_that_loses_its_blocks_keeps_its_tokens_and_chooses_the_open_one_again() -> None:
    one = sequence(6, 6)
    one.token_ids += [7, PENDING]
    one.awaits_tokens, one.share, one.num_registered_blocks = True, 2, 1
    one.num_disk_blocks = one.num_store_blocks = 0
    one.forget_computed()
    assert one.token_ids == [*range(6), 7]
    assert (one.awaits_tokens, one.share, one.num_registered_blocks, one.tables) == (False, 0, 0, [])
    assert (one.num_computed_tokens, one.num_completed_tokens) == (0, 0)
    assert (one.num_disk_blocks, one.num_store_blocks) == (None, None)
    one.forget_computed()
    assert len(one.token_ids) == 7


def test_a_prompt_is_computed_once_it_is_complete_or_an_output_has_reported_it() -> None:
    one = sequence(6, 5)
    assert not one.has_computed_prompt
    one.num_completed_tokens = 6
    assert one.has_computed_prompt
    one.num_completed_tokens, one.started = 0, True
    assert one.has_computed_prompt


def test_lengths_count_from_the_prompt_that_was_first_asked_for() -> None:
    one = Sequence("s", [1, 2, 3, 4], SamplingParams(50, min_tokens=5), num_delivered_tokens=1)
    assert (one.num_prompt_tokens, one.min_length, one.may_be_masked, one.counts) == (4, 8, True, None)
    plain = sequence()
    assert (plain.min_length, plain.may_be_masked) == (6, False)
    assert sequence(presence_penalty=0.5).counts is not None


def test_two_sequences_share_a_prompt_where_whatever_its_blocks_depend_on_is_the_same() -> None:
    leader, other = sequence(), sequence()
    assert other.shares_prompt_with(leader)
    assert not leader.shares_prompt_with(leader)
    leader.token_ids.append(99)  # an output token is not part of the prompt
    assert other.shares_prompt_with(leader)
    assert not sequence(5).shares_prompt_with(leader)
    assert not sequence(7).shares_prompt_with(leader)
    for name, value in (("chain_root", b"x"), ("images", (SequenceImage(b"", b"", 0, 1, array("q"), False),))):
        assert not replace(other, **{name: value}).shares_prompt_with(leader), name
    assert not sequence(prompt_logprobs=True).shares_prompt_with(leader)
    assert [sequence(pooling=pooling).needs_every_token for pooling in ("mean", "cls", "last", None)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_a_devices_time_is_reported_in_whole_microseconds_and_the_rest_later() -> None:
    one = sequence()
    told = []
    for more in (0.75, 0.75, 2.0, 0.0):
        one.device_us += more
        told.append(one.take_device_us())
    assert (told, one.device_us) == ([0, 1, 2, 0], 0.5)


def test_its_log_probabilities_are_wanted_until_its_first_output() -> None:
    one = sequence(prompt_logprobs=True)
    assert (one.wants_prompt_logprobs, one.needs_every_token) == (True, True)
    one.started = True
    assert (one.wants_prompt_logprobs, one.needs_every_token) == (False, False)
