"""Decisions: their arithmetic, by the examples in TypeSafe's documentation, and the position of a question after its state."""

import pytest

from pilotlight.dialects.body.bodies import MessageBody
from pilotlight.dialects.body.images import ImagePart
from pilotlight.dialects.body.parsing import conversation_of
from pilotlight.dialects.decisions.questions import (
    Option,
    Question,
    ValidDecision,
    choice_confidence,
    expected_level,
    predicate,
    score,
    score_confidence,
)
from pilotlight.dialects.requests import Sampling


@pytest.mark.parametrize(
    ("levels", "expected"),
    [([0.0, 0.5, 0.5], 0.25), ([0.5, 0.0, 0.5], 0.0), ([0.0, 0.0, 0.48, 0.52], 0.52), ([0.0, 0.0, 0.0, 1.0], 1.0), ([1 / 3] * 3, 0.0)],
)  # fmt: skip
def test_a_scores_confidence_falls_with_the_distance_from_the_likeliest_level(
    levels: list[float], expected: float
) -> None:
    assert score_confidence(levels) == pytest.approx(expected, abs=0.01)


def test_a_choices_confidence_is_how_far_the_likeliest_is_above_an_even_distribution() -> None:
    assert choice_confidence([0.5, 0.5]) == 0.0
    assert choice_confidence([0.0, 1.0, 0.0]) == 1.0
    assert choice_confidence([1.0]) == score_confidence([1.0]) == 1.0
    assert choice_confidence([0.6, 0.4]) == pytest.approx(0.2)
    assert expected_level([0.0, 0.02, 0.5, 0.48]) == pytest.approx(2.46)


def asked(*messages: MessageBody) -> ValidDecision:
    return ValidDecision("m", "m", conversation_of(list(messages), None), Sampling(), False)


def test_a_question_is_the_end_of_what_the_user_says_so_that_states_have_one_beginning() -> None:
    request = asked(MessageBody(role="system", content="s"), MessageBody(role="user", content="A state."))
    first, second = predicate("It rains."), score("How wet?", ["dry", "wet"])
    texts = [request.asked(question).messages[-1]["content"] for question in (first, second)]
    assert all(text.startswith("A state.\n\n") for text in texts)
    assert texts[0].endswith("It rains.\nAnswer yes or no.")
    assert texts[1].endswith("0: dry\n1: wet")
    plain = Question("choice", "Which?", (Option("a"), Option("b")))
    assert plain.text == "Which?\nAnswer with one of: a, b"
    assert len(request.asked(first).messages) == 2


def test_a_question_after_another_role_is_a_separate_turn_and_after_images_a_part() -> None:
    question = Question("choice", "Which?", (Option("a", "one"), Option("b")))
    spoken = asked(MessageBody(role="user", content="Hi"), MessageBody(role="assistant", content="Hello"))
    assert [message["role"] for message in spoken.asked(question).messages] == ["user", "assistant", "user"]
    shown = asked(MessageBody(role="user", content=[ImagePart("data:,"), "See"])).asked(question)
    assert [part["type"] for part in shown.messages[0]["content"]] == ["image", "text", "text"]
    assert len(shown.images) == 1
