"""OpenAI's decisions: POST /v1/decisions.

Source: the types of openai-python 3.57 (decision_create_params.py, decision.py)."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from pilotlight.dialects.body.bodies import Body, at_most, objects
from pilotlight.dialects.body.parsing import Resolve, conversation_of, known_model, parse_body, refused, string_in
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
from pilotlight.dialects.openai_responses import messages_of
from pilotlight.dialects.requests import Sampling
from pilotlight.wire.chat import MAX_MESSAGES


class ChoiceBody(Body, frozen=True, kw_only=True):
    value: bool | str
    description: str | None = None


class LevelBody(Body, frozen=True, kw_only=True):
    label: str
    description: str | None = None


class QuestionBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {
        "instructions": objects(MAX_OPTIONS),
        "choices": at_most(MAX_OPTIONS),
        "levels": at_most(MAX_LEVELS),
    }
    PARTS: ClassVar = {"choices": ChoiceBody, "levels": LevelBody}

    type: Literal["predicate", "choice", "score"]
    instructions: str | list[dict[str, Any]]
    name: str | None = None
    choices: Annotated[list[ChoiceBody], Meta(min_length=2)] | None = None
    levels: Annotated[list[LevelBody], Meta(min_length=2)] | None = None


class DecisionsBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"input": objects(MAX_MESSAGES), "questions": at_most(MAX_QUESTIONS)}
    PARTS: ClassVar = {"questions": QuestionBody}

    model: str
    input: str | list[dict[str, Any]]
    questions: Annotated[list[QuestionBody], Meta(min_length=1)]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class OpenAIDecision(ValidDecision, frozen=True):
    values: tuple[tuple[bool | str, ...], ...] = ()  # values of each question's options, as in the request


def parse_decisions(raw: bytes, resolve: Resolve, *, strict: bool = False) -> OpenAIDecision:
    """Parse a body of /v1/decisions. Raises ApiError."""
    body, ignored = parse_body(DecisionsBody, raw, strict)
    left_out: list[str] = []
    given = body.input if isinstance(body.input, str) else [_with_json_as_text(item) for item in body.input]
    state = conversation_of(list(messages_of(given, left_out)), None)
    return OpenAIDecision(
        model=known_model(body.model, resolve),
        requested_model=body.model,
        prompt=state,
        sampling=Sampling(),
        stream=False,
        ignored=(*ignored, *left_out),
        questions=tuple(_question(each, f"questions[{i}]") for i, each in enumerate(body.questions)),
        values=tuple(_values(each) for each in body.questions),
    )


def _with_json_as_text(item: dict[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if not isinstance(content, list):
        return item
    return {**item, "content": [_as_text(part) if _is_json(part) else part for part in content]}


def _is_json(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_json"


def _as_text(part: dict[str, Any]) -> dict[str, Any]:
    # not with orjson, because integers of any size may be in what looks like a call's arguments (body/exact_json.py)
    return {"type": "input_text", "text": json.dumps(part.get("data"), ensure_ascii=False, separators=(",", ":"))}


def _question(body: QuestionBody, where: str) -> Question:
    instructions = "\n".join(_instructions(body.instructions, f"{where}.instructions"))
    if not instructions:
        raise refused("must not be empty", f"{where}.instructions")
    if body.type == "predicate":
        return predicate(instructions, body.name)
    if body.type == "score":
        if body.levels is None:
            raise refused("is required of a score", f"{where}.levels")
        levels = [f"{level.label}: {level.description}" if level.description else level.label for level in body.levels]
        return score(instructions, levels, body.name)
    if body.choices is None:
        raise refused("is required of a choice", f"{where}.choices")
    options = tuple(Option(_label(choice.value), choice.description or "") for choice in body.choices)
    if "" in (labels := [option.label for option in options]) or len(set(labels)) < len(labels):
        raise refused("the texts must differ, and none may be empty", f"{where}.choices")
    return Question("choice", instructions, options, body.name)


def _instructions(given: str | list[dict[str, Any]], where: str) -> Iterator[str]:
    if isinstance(given, str):
        yield given
        return
    for i, part in enumerate(given):
        if part.get("type") not in ("input_text", "input_json"):
            raise refused("a question is text: send images in the input", f"{where}[{i}]", "unsupported_parameter")
        yield string_in(_as_text(part) if _is_json(part) else part, "text", f"{where}[{i}]")


def _label(value: bool | str) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _values(body: QuestionBody) -> tuple[bool | str, ...]:
    if body.type == "choice":
        return tuple(choice.value for choice in body.choices or ())
    return tuple(level.label for level in body.levels or ())


def decision_object(
    request: ValidDecision, probabilities: Sequence[Sequence[float]], input_tokens: int, cached_tokens: int
) -> bytes:
    """Return the response. `probabilities` has, for each question, the probabilities of its options."""
    assert isinstance(request, OpenAIDecision)
    answers = zip(request.questions, request.values, probabilities, strict=True)
    return msgspec.json.encode({
        "model": request.requested_model,
        "answers": [_answer(*each) for each in answers],
        "usage": {
            "input_tokens": input_tokens, "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": 0, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": input_tokens,
        },
    })  # fmt: skip


def _answer(question: Question, values: Sequence[bool | str], found: Sequence[float]) -> dict[str, Any]:
    named = {"type": question.kind, "name": question.name}
    if question.kind == "predicate":
        return {**named, "probability": found[0]}
    if question.kind == "choice":
        options = [{"value": value, "probability": p} for value, p in zip(values, found, strict=True)]
        chosen = values[likeliest_of(found)]
        return {**named, "choice": chosen, "confidence": choice_confidence(found), "probabilities": options}
    levels = [
        {"label": label, "probability": p, "value": i} for i, (label, p) in enumerate(zip(values, found, strict=True))
    ]
    return {**named, "score": expected_level(found), "confidence": score_confidence(found), "probabilities": levels}
