"""Facts that the user states and later asks for, with other facts and exchanges in between."""

import random
from collections.abc import Callable

from training.ember.corpus import words
from training.ember.corpus.conversation import (
    Conversation,
    Exchange,
    Expected,
    Message,
    Split,
    assistant,
    barred,
    join,
    system,
    user,
)
from training.ember.corpus.phrasing import blur, fill, say
from training.ember.corpus.topics import Topic, draw_topic

INTRO = barred(
    "Please remember this.|Here are some facts about me.|Let me tell you something.|I will tell you a few things."
    "|Listen.|Remember these things.|Some facts first.",
    "Please keep these facts in mind.|Let me share some details.",
)
_ACKS = ("Okay.", "Noted.", "Got it.", "All right, I will remember.", "I will remember that.", "Understood.")
_SYSTEM_FACTS = ("You know this about the user: ", "Facts: ", "Notes: ", "Remember: ", "The user told you earlier: ")

Distractor = Callable[[random.Random, Split], Exchange]


def recall(rng: random.Random, split: Split, distractor: Distractor, turns_between: int | None = None) -> Conversation:
    """Return a conversation: stated facts, other exchanges, and one or more questions for facts."""
    told = [
        (topic, words.value(rng, topic.kind, split)) for topic in _topics(rng, split, rng.choice((1, 2, 2, 3, 3, 4, 5)))
    ]
    if rng.random() < 0.06 and turns_between is None:
        return _at_once(rng, split, told)
    between = rng.choice((0, 0, 0, 1, 1, 2, 3)) if turns_between is None else turns_between
    messages = list(_telling(rng, split, told, distractor))
    messages += join([distractor(rng, split) for _ in range(between)])
    asked = rng.sample(told, min(len(told), rng.choice((1, 1, 2, 3, 4) if split is Split.TRAIN else (1, 1, 2, 3))))
    expected = Expected()
    for topic, value in asked:
        answer = fill(topic.answer, {"value": value})
        others = tuple(other for _, other in told if other not in answer)
        expected = Expected(holds=(value,), lacks=others)
        messages += _question(rng, split, topic, answer)
        if split is Split.HELD_OUT:
            break
    if rng.random() < (0.25 if split is Split.TRAIN else 0.12):
        missing = _topics(rng, split, 1, {topic.key for topic, _ in told} | _clashes(told))[0]
        messages += _question(rng, split, missing, missing.not_told)
        expected = Expected(holds=("not told",))
    return Conversation("recall", tuple(messages), expected=expected)


def _at_once(rng: random.Random, split: Split, told: list[tuple[Topic, str]]) -> Conversation:
    """Return a conversation with the facts and the question in one message."""
    topic, value = rng.choice(told)
    said = [fill(_statement(rng, split, one), {"value": text}) for one, text in told]
    question = say(rng, split, topic.questions.pick(rng, split), {}, decorate=False)
    answer = fill(topic.answer, {"value": value})
    others = tuple(other for _, other in told if other not in answer)
    messages = (user(" ".join((*said, question))), assistant(answer))
    return Conversation("recall", messages, expected=Expected(holds=(value,), lacks=others))


def _question(rng: random.Random, split: Split, topic: Topic, answer: str) -> list[Message]:
    return [user(say(rng, split, topic.questions.pick(rng, split), {})), assistant(answer)]


def _clashes(told: list[tuple[Topic, str]]) -> set[str]:
    """Return the keys of topics that could be confused with a stated topic."""
    same = (
        {"food", "favourite food"},
        {"colour", "favourite colour"},
        {"hobby", "hobby!"},
        {"dog", "dog's name"},
        {"cat", "cat's name"},
        {"work", "job"},
        {"home", "favourite city", "home town"},
        {"meeting", "meeting time"},
    )
    keys = {topic.key for topic, _ in told}
    return {key for group in same if group & keys for key in group}


def _topics(rng: random.Random, split: Split, count: int, taken: set[str] | None = None) -> list[Topic]:
    topics: list[Topic] = []
    used = set(taken or ())
    while len(topics) < count:
        topic = draw_topic(rng, split)
        if topic.key not in used and not used & _clashes([(topic, "")]):
            topics.append(topic)
            used.add(topic.key)
    return topics


def _telling(rng: random.Random, split: Split, told: list[tuple[Topic, str]], distractor: Distractor) -> list[Message]:
    said = [say(rng, split, _statement(rng, split, topic), {"value": value}, decorate=False) for topic, value in told]
    draw = rng.random()
    if draw < 0.4:
        opening = [INTRO.pick(rng, split)] if rng.random() < 0.3 else []
        text = " ".join(sentence if sentence[-1] in ".!?" else sentence + "." for sentence in opening + said)
        return [user(text), assistant(_acknowledge(rng, told))]
    if draw < 0.5:
        text = rng.choice(_SYSTEM_FACTS) + " ".join(
            sentence if sentence[-1] in ".!?" else sentence + "." for sentence in said
        )
        return [system(text)]
    messages: list[Message] = []
    for sentence, one in zip(said, told, strict=True):
        messages += [user(sentence), assistant(_acknowledge(rng, [one]))]
        if rng.random() < 0.2:
            messages += distractor(rng, split).messages
    return messages


def _statement(rng: random.Random, split: Split, topic: Topic) -> str:
    statement = topic.statements.pick(rng, split)
    return blur(rng, statement, 0.06, keep=True) if split is Split.TRAIN else statement


def _acknowledge(rng: random.Random, told: list[tuple[Topic, str]]) -> str:
    names = [value for topic, value in told if topic.key == "name"]
    if names and rng.random() < 0.6:
        return f"Nice to meet you, {names[0]}."
    if len(told) == 1 and rng.random() < 0.35:
        return "Okay. " + fill(told[0][0].answer, {"value": told[0][1]})
    return rng.choice(_ACKS)
