"""System One: POST /v1/systemone, also the input of a decision model at Workers AI's `run`.

Sources: TypeSafe's API reference of /v1/systemone; Cloudflare's input of Clef, which adds `images`. A state is text or JSON; questions have names.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import orjson

from pilotlight.dialects.body.bodies import Body, MessageBody, at_most, not_deep
from pilotlight.dialects.body.images import ImagePart, read_image
from pilotlight.dialects.body.parsing import Resolve, conversation_of, known_model, parse_body, refused
from pilotlight.dialects.decisions.questions import (
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Option,
    Question,
    ValidDecision,
    choice_confidence,
    expected_level,
    likeliest_of,
    predicate,
    score,
    score_confidence,
)
from pilotlight.dialects.requests import Sampling
from pilotlight.wire.workers_ai import Envelope

MAX_IMAGES = 4


def _images(value: Any) -> Any:
    at_most(MAX_IMAGES)(value)
    return [read_image(image) for image in value] if isinstance(value, list) else value


class SystemOneBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"state": not_deep, "questions": not_deep, "images": _images}

    model: str | None = None  # None if the path names it
    state: str | dict[str, Any] | list[Any]
    questions: dict[str, dict[str, Any]]
    images: list[ImagePart] | None = None


def parse_system_one(raw: bytes, resolve: Resolve, model: str | None = None, *, strict: bool = False) -> ValidDecision:
    """Parse a body. `model` is the model in the path, if there is one. Raises ApiError."""
    body, ignored = parse_body(SystemOneBody, raw, strict)
    requested = body.model if model is None else model
    if requested is None:
        raise refused("is required", "model")
    if not 0 < len(body.questions) <= MAX_QUESTIONS:
        raise refused(f"must have 1 to {MAX_QUESTIONS} questions", "questions")
    state = _text(body.state)
    content: Any = [*(body.images or ()), state] if body.images else state
    return ValidDecision(
        model=known_model(requested, resolve),
        requested_model=requested,
        prompt=conversation_of([MessageBody(role="user", content=content)], None),
        sampling=Sampling(),
        stream=False,
        ignored=ignored,
        questions=tuple(_question(name, each, f"questions.{name}") for name, each in body.questions.items()),
    )


def _text(value: Any) -> str:
    """Return a string unchanged; encode any other value as JSON text."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _question(name: str, asked: dict[str, Any], where: str) -> Question:
    instructions, criteria, kind = asked.get("instructions"), asked.get("criteria"), asked.get("type")
    if not isinstance(instructions, str | dict | list | None) or not (instructions or criteria):
        raise refused("must be a text, an object or a list, and not empty", f"{where}.instructions")
    text = _text(instructions) if instructions else ""
    match kind:
        case "noul":
            if not isinstance(criteria, dict | None) or not (criteria or {}).keys() <= {"true", "false"}:
                raise refused('may describe "true" and "false"', f"{where}.criteria")
            told = {value: _text(described) for value, described in (criteria or {}).items() if described is not None}
            return predicate(text, name, told.get("true", ""), told.get("false", ""))
        case "choice":
            return Question("choice", text, tuple(_options(criteria, f"{where}.criteria")), name)
        case "score":
            if not isinstance(criteria, list) or not 1 <= len(criteria) <= MAX_LEVELS:
                raise refused(f"must be a list of 1 to {MAX_LEVELS} levels, the lowest first", f"{where}.criteria")
            return score(text, [_text(level) for level in criteria], name)
    raise refused('must be "noul", "choice" or "score"', f"{where}.type")


def _options(criteria: Any, where: str) -> Iterator[Option]:
    if isinstance(criteria, list) and all(isinstance(label, str) for label in criteria):
        criteria = dict.fromkeys(criteria)
    if not isinstance(criteria, dict) or not 1 <= len(criteria) <= MAX_OPTIONS or "" in criteria:
        raise refused(f"must be an object that maps 1 to {MAX_OPTIONS} options to their descriptions", where)
    for label, described in criteria.items():
        yield Option(label, "" if described is None else _text(described))


def system_one_object(
    request: ValidDecision, probabilities: Sequence[Sequence[float]], input_tokens: int, cached_tokens: int
) -> bytes:
    """Return the response. `probabilities` has, for each question, the probabilities of its options."""
    return msgspec.json.encode(_object(request, probabilities, input_tokens))


def enveloped(
    request: ValidDecision, probabilities: Sequence[Sequence[float]], input_tokens: int, cached_tokens: int
) -> bytes:
    """Return the response of `system_one_object` in Cloudflare's envelope."""
    return msgspec.json.encode(Envelope(_object(request, probabilities, input_tokens)))


def _object(request: ValidDecision, probabilities: Sequence[Sequence[float]], input_tokens: int) -> dict[str, Any]:
    asked = zip(request.questions, probabilities, strict=True)
    return {
        "model": request.requested_model,
        "answers": {question.name: _answer(question, found) for question, found in asked},
        "usage": {"input_tokens": input_tokens, "output_tokens": 0},
    }


def _answer(question: Question, found: Sequence[float]) -> dict[str, Any]:
    labels = [option.label for option in question.options]
    distribution = dict(zip(labels, found, strict=True))
    match question.kind:
        case "predicate":
            return {"type": "noul", "noul": found[0]}
        case "choice":
            chosen = labels[likeliest_of(found)]
            confidence = choice_confidence(found)
            return {"type": "choice", "choice": chosen, "probabilities": distribution, "confidence": confidence}
        case "score":
            legend = {option.label: option.description for option in question.options}
            told = {"type": "score", "score": expected_level(found), "confidence": score_confidence(found)}
            return {**told, "legend": legend, "probabilities": distribution}
