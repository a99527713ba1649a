"""AI: a function's calls to the models of its site (runtime/functions/inference.py).

What a model says and refuses is the site's business, and its errors' codes are the site's. This adds who asks (each function is a tenant of its
own), waiting for room, refusing to wait (`rejectIfBusy`), and batches that are answered later.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson

from runtime.functions.bindings.ai_batches import Batches
from runtime.functions.bindings.binding import Binding, BindingError, Declaration, Services, method
from runtime.functions.bindings.place import name_of
from runtime.functions.channel import StreamingReply
from runtime.functions.inference import InferenceResponse
from wire.headers import forwardable

CAPACITY = 3040  # Workers AI's code for "no room"
NO_MODEL = 5007  # its code for a name that no model has
MAX_NAMED = 20  # models in a sentence
BUSY_STATUS = 429
QUEUE_FOR_S = 60.0  # a call waits so long for room before it is refused
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
MAX_INPUT_BYTES = 8 << 20

Sleep = Callable[[float], Awaitable[None]]


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    inputs: dict[str, Any]
    raw: bool = False
    queue: bool = False
    reject_if_busy: bool = False
    extra_headers: dict[str, str] = {}


class Poll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    request_id: str


class ModelsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    search: str = ""


class AI(Binding):
    kind = "ai"

    def __init__(self, services: Services, batches: Batches | None, sleep: Sleep = asyncio.sleep) -> None:
        """`batches`: without them nothing can be queued."""
        assert services.inference is not None, "checked when it was opened"
        self._inference = services.inference
        self._account = f"function-{name_of(services.function)}"
        self._sleep = sleep
        self._batches = batches
        if batches is not None:
            batches.serve(self._result_of)

    @classmethod
    def open(cls, declaration: Declaration, state_dir: Path, services: Services) -> "AI":
        if services.inference is None:
            raise BindingError(
                f"{declaration.name}: there are no models here to call; give the site a [[models]] table"
            )
        return cls(services, Batches.open(state_dir, services))

    @method
    async def run(self, request: Run) -> Any:
        """Run a model: {status, headers} and the body, as `body` or streamed."""
        if not request.model.isprintable():
            raise _refusal(400, 5007, "no model has such a name")
        if request.reject_if_busy and self._inference.is_busy(request.model):
            raise _refusal(BUSY_STATUS, CAPACITY, "all of this model's room is taken, and the call asked not to wait")
        if request.queue and self._batches is not None:
            return await self._batches.put(request.model, request.inputs)
        headers = dict(forwardable(request.extra_headers.items()))
        response = await self._admitted(request.model, _encoded(request.inputs), headers, not request.reject_if_busy)
        value = {"status": response.status, "headers": response.headers}
        if response.events is not None:
            return StreamingReply(value, response.events)
        if response.status >= 400:
            if request.raw:
                return {**value, "body": response.body}
            raise self._as_refusal(response)
        return {**value, "body": response.body}

    @method
    async def poll(self, request: Poll) -> Any:
        """Tell what has become of a batch."""
        found = None if self._batches is None else await self._batches.get(request.request_id)
        if found is None:
            raise _refusal(404, 3042, f"there is no batch {request.request_id[:100]!r}, or it was kept for its time")
        return found

    @method
    async def models(self, request: ModelsQuery) -> Any:
        return self._inference.models(request.search)

    def _as_refusal(self, response: InferenceResponse) -> BindingError:
        error = msgspec.json.decode(response.body)["errors"][0]
        code, sentence = error["code"], error["message"]
        if code == NO_MODEL:
            there = ", ".join(card["name"] for card in self._inference.models("")[:MAX_NAMED])
            sentence = f"{sentence}; it has {there or 'none'}"
        return _refusal(response.status, code, sentence)

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.close()

    async def _admitted(self, model: str, body: bytes, headers: dict[str, str], waits: bool) -> InferenceResponse:
        """Run a model; by default the call waits for room, as on the platform."""
        waited_s, pause_s = 0.0, FIRST_PAUSE_S
        while True:
            response = await self._inference.run(self._account, model, body, headers)
            if response.status != BUSY_STATUS or not waits or waited_s >= QUEUE_FOR_S:
                return response
            await self._sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)

    async def _result_of(self, model: str, inputs: dict[str, Any]) -> tuple[bool, bytes]:
        """Answer one request of a batch: whether it succeeded, and its result or error in JSON. Waits for room without an end."""
        while True:
            response = await self._admitted(model, _encoded(inputs), {}, True)
            if response.status != BUSY_STATUS:
                return response.status < 400, response.body


def _encoded(inputs: dict[str, Any]) -> bytes:
    try:
        body = orjson.dumps(inputs)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise _refusal(400, 5004, f"the inputs are not JSON: {error}; encode bytes as base64 text") from None
    if len(body) > MAX_INPUT_BYTES:
        raise _refusal(413, 3006, f"the inputs have {len(body)} bytes, of at most {MAX_INPUT_BYTES}")
    return body


def _refusal(status: int, code: int, sentence: str) -> BindingError:
    return BindingError(f"{code}: {sentence}", code=code, status=status, name="InferenceUpstreamError")
