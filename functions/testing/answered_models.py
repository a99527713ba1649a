"""Models for tests: the test provides the answers of an AI binding. No weights are loaded."""

import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from pilotlight.functions.inference import InferenceResponse
from pilotlight.wire.hop.usage import ResourceUse

Answer = Callable[[str, dict[str, Any]], Any]
"""Maps a model's name and its inputs to the result: a dict, a string, or an iterable of strings; it may be awaitable."""


class AnsweredModels:
    """Implements `Inference` by a function of the test."""

    def __init__(self, answer: Answer | None) -> None:
        self._answer = answer

    def serves(self, model: str) -> bool:
        return False

    def is_busy(self, model: str) -> bool:
        return False

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        asked = json.loads(inputs)
        if self._answer is None:
            sentence = f"the test provides no answers for {model}: give the worker ai=lambda model, inputs: ..."
            body = {"success": False, "result": {}, "messages": [], "errors": [{"code": 5007, "message": sentence}]}
            return InferenceResponse(400, [], json.dumps(body).encode())
        answer = self._answer(model, asked)
        if inspect.isawaitable(answer):
            answer = await answer
        pieces = [answer] if isinstance(answer, str | dict) else list(answer)
        if asked.get("stream") is True:
            return InferenceResponse(200, [("content-type", "text/event-stream")], events=_Events(pieces))
        is_whole = len(pieces) == 1 and isinstance(pieces[0], dict)
        result = pieces[0] if is_whole else {"response": "".join(map(str, pieces))}
        return InferenceResponse(200, [("content-type", "application/json")], json.dumps(result).encode())

    def own_names(self, model: str) -> tuple[str, str]:
        return model, ""

    def models(self, search: str) -> list[dict[str, Any]]:
        return []


class _Events:
    use = ResourceUse()

    def __init__(self, pieces: list[Any]) -> None:
        said = [piece if isinstance(piece, dict) else {"response": piece} for piece in pieces]
        self._events = iter([*(f"data: {json.dumps(each)}\n\n".encode() for each in said), b"data: [DONE]\n\n"])

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return next(self._events)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        self._events = iter(())
