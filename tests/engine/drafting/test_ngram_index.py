"""The n-gram index, which finds earlier occurrences of a text's last tokens, compared with a full search."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.drafting.ngram_index import MOST_MATCHED, SEPARATOR, Match, NgramIndex


def longest_by_looking(text: list[int], tail: list[int]) -> int:
    lengths = [0]
    for end in range(2, len(text)):
        length = 0
        while length < min(end, len(tail), MOST_MATCHED) and text[end - 1 - length] == tail[-1 - length]:
            length += 1
        lengths.append(length)
    return max(lengths)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 4), min_size=2, max_size=20), st.integers(0, 12)
)
def test_a_short_text_s_longest_match_is_found_and_says_what_follows(
    text: list[int], tail: list[int], cut: int
) -> None:
    index = NgramIndex()
    index.extend(text[:cut])
    index.extend(text[cut:])
    found, longest = index.find(tail), longest_by_looking(text, tail)
    if found is None:
        assert longest < 2
    else:
        assert found.length == longest
        assert text[found.end - found.length : found.end] == tail[len(tail) - found.length :]
        assert index.following(found, 3) == text[found.end : found.end + 3]


def test_of_equal_matches_the_newest_counts() -> None:
    index = NgramIndex()
    index.extend([7, 8, 1, 7, 8, 2, 7, 8])
    assert index.find([7, 8]) == Match(5, 2)
    assert index.following(Match(5, 2), 9) == [2, 7, 8]


def test_nothing_follows_the_end_of_a_text() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, SEPARATOR, 1, 2, 9])
    assert index.following(Match(2, 2), 5) == [3]


def test_a_text_that_has_grown_is_found_in_as_one_that_came_whole_and_takes_few_bytes() -> None:
    draw = Random(1)
    text = [draw.randrange(300) for _ in range(20_000)]
    grown, whole = NgramIndex(), NgramIndex()
    whole.extend(text)
    for i in range(0, len(text), 7):
        grown.extend(text[i : i + 7])
    for _ in range(300):
        tail = text[(at := draw.randrange(20, len(text))) - 16 : at]
        assert grown.find(tail) == whole.find(tail) is not None
    assert whole.num_bytes <= 16 * len(text)
