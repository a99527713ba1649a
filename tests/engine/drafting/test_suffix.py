"""The suffix drafter: it proposes what followed the same tokens earlier in the sequence, or in answers to the same tenant."""

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.drafting.suffix import SuffixDrafter


def sequence(*token_ids: int, tenant: bytes = b"a", output: tuple[int, ...] = (), delivered: int = 0) -> Sequence:
    made = Sequence("s", list(token_ids), SamplingParams(max_tokens=9), b"", delivered, tenant)
    made.token_ids += output
    return made


def drafts(drafter: SuffixDrafter, of: Sequence, most: int = 4, ahead: tuple[int, ...] = ()) -> list[int]:
    found = drafter.propose(of, ahead, most)
    return [] if found is None else list(found.token_ids)


def test_it_copies_the_continuation_in_the_prompt_and_continues_as_the_sequence_grows() -> None:
    drafter, copying = SuffixDrafter(), sequence(1, 2, 3, 4, 5, 6, 9, 1, 2)
    assert drafts(drafter, copying) == [3, 4, 5, 6]
    copying.token_ids += [3, 4]
    assert drafts(drafter, copying, most=3) == [5, 6, 9]
    copying.token_ids += [77, 78]
    assert drafts(drafter, copying) == []


def test_a_token_that_is_not_known_yet_is_part_of_what_follows() -> None:
    drafter, copying = SuffixDrafter(), sequence(1, 2, 3, 4, 5, 9, 1, 2)
    copying.token_ids.append(PENDING)
    assert drafts(drafter, copying) == [3, 4, 5, 9], "the first draft is a guess of the pending token"


def test_guesses_ahead_are_looked_for_as_if_they_were_there() -> None:
    assert drafts(SuffixDrafter(), sequence(1, 2, 3, 4, 5, 9), ahead=(2, 3)) == [4, 5, 9, 4], (
        "the text is continued as a repetition"
    )


def test_a_longer_match_is_another_kind_of_draft_and_likelier() -> None:
    drafter = SuffixDrafter()
    text = list(range(100, 120))
    kinds = [drafter.propose(sequence(*text, 5, *text[-n - 1 : -1]), (), 1) for n in (2, 3, 5, 9, 16)]
    assert [found and found.kind for found in kinds] == ["suffix 2", "suffix 3", "suffix 4", "suffix 8", "suffix 16"]
    priors = [found.prior for found in kinds if found]
    assert priors == sorted(priors)


def test_a_tenant_s_outputs_help_only_its_own_next_sequences() -> None:
    drafter, first = SuffixDrafter(), sequence(50, 51, 52, output=(1, 2, 3, 4, 5))
    drafts(drafter, first)
    drafter.forget(first)
    assert drafts(drafter, sequence(60, 1, 2)) == [3, 4, 5]
    assert drafts(drafter, sequence(51, 52)) == [1, 2, 3, 4], "the end of a prompt finds the start of its answer"
    assert drafts(drafter, sequence(60, 1, 2, tenant=b"b")) == []


def test_one_answer_does_not_continue_as_the_next_one_starts() -> None:
    drafter = SuffixDrafter()
    for output in ((1, 2, 3, 4, 5), (7, 8, 9)):
        answered = sequence(50, 51, 52, output=output)
        drafts(drafter, answered)
        drafter.forget(answered)
    assert drafts(drafter, sequence(60, 3, 4)) == [5]
    assert drafts(drafter, sequence(60, 4, 5)) == []


def test_what_was_delivered_before_a_continuation_is_output_as_well() -> None:
    drafter, continued = SuffixDrafter(), sequence(50, 51, 52, 53, 54, 55, 1, 2, 3, output=(4, 5), delivered=3)
    drafts(drafter, continued)
    drafter.forget(continued)
    assert drafts(drafter, sequence(60, 1, 2)) == [3, 4, 5]


def test_what_is_kept_of_tenants_is_bounded_and_the_one_unused_for_longest_goes_first() -> None:
    drafter = SuffixDrafter(most_tenant_tokens=64, most_tokens=128)
    for n in range(40):
        tenant = b"ab"[n % 2 :][:1]
        ended = sequence(9, 9, 9, tenant=tenant, output=tuple(range(1000 * n, 1000 * n + 12)))
        drafts(drafter, ended)
        drafter.forget(ended)
    assert drafts(drafter, sequence(38_000, 38_001, tenant=b"a")) == [38_002, 38_003, 38_004, 38_005]
    assert drafts(drafter, sequence(2_000, 2_001, tenant=b"a")) == []
    for tenant in (b"c", b"d", b"e", b"c", b"f"):
        ended = sequence(9, 9, 9, tenant=tenant, output=tuple(range(12)))
        drafts(drafter, ended)
        drafter.forget(ended)
    assert drafts(drafter, sequence(38_000, 38_001, tenant=b"a")) == [], "the tenant unused for longest is forgotten"
    assert all(drafts(drafter, sequence(0, 1, tenant=tenant)) == [2, 3, 4, 5] for tenant in (b"d", b"e", b"c", b"f"))


def test_nothing_is_kept_of_a_sequence_that_was_never_looked_at() -> None:
    drafter = SuffixDrafter()
    drafter.forget(sequence(1, 2, 3, output=(4, 5)))
    assert drafts(drafter, sequence(60, 1, 2)) == []
