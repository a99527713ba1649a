"""AI: a function's calls to the models of this very site, through the routes' own validated path and no socket.

What a model says and refuses is the route's business, and its errors' codes are the route's. This adds who asks (each function is a tenant of its
own), waiting for room, refusing to wait (`rejectIfBusy`), and batches that are answered later.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import orjson

from runtime.functions.bindings.ai_batches import Batches
from runtime.functions.bindings.binding import Binding, BindingError, Declaration, Services, method
from runtime.functions.bindings.place import name_of
from runtime.functions.channel import Answer
from runtime.inprocess import Exchange
from wire.headers import forwardable

CAPACITY = 3040  # Workers AI's code for "no room"
BUSY_STATUS = 429
QUEUE_FOR_S = 60.0  # a call waits so long for room before it is refused
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
ALL = 1_000_000  # models: no site has as many
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
        """Without batches nothing can be queued."""
        assert services.app is not None, "checked when it was opened"
        self._app = services.app
        self._is_busy = services.is_busy
        self._prefix = f"/client/v4/accounts/function-{name_of(services.function)}/ai"
        self._sleep = sleep
        self._batches = batches
        if batches is not None:
            batches.serve(self._result_of)

    @classmethod
    def open(cls, declaration: Declaration, state_dir: Path, services: Services) -> "AI":
        if services.app is None:
            raise BindingError(
                f"{declaration.name}: there are no models here to call; give the site a [[models]] table"
            )
        return cls(services, Batches.open(state_dir, services))

    @method
    async def run(self, request: Run) -> Any:
        """{status, headers} and the body, as `body` or streamed."""
        if not request.model.isprintable():
            raise _refusal(400, 5007, "no model has such a name")
        if request.reject_if_busy and self._is_busy(request.model):
            raise _refusal(BUSY_STATUS, CAPACITY, "all of this model's room is taken, and the call asked not to wait")
        if request.queue and self._batches is not None:
            return await self._batches.put(request.model, request.inputs)
        headers = forwardable(request.extra_headers.items())
        exchange = await self._admitted(request.model, _encoded(request.inputs), headers, not request.reject_if_busy)
        value = {"status": exchange.status, "headers": exchange.headers}
        if _content_type(exchange) == "text/event-stream":
            return Answer(value, exchange)
        body = await _whole(exchange)
        if exchange.status < 400:
            return {**value, "body": _result(body)}
        if not request.raw:
            raise _as_refusal(exchange.status, body)
        return {**value, "body": body}

    @method
    async def poll(self, request: Poll) -> Any:
        """What has become of a batch."""
        found = None if self._batches is None else await self._batches.get(request.request_id)
        if found is None:
            raise _refusal(404, 3042, f"there is no batch {request.request_id[:100]!r}, or it was kept for its time")
        return found

    @method
    async def models(self, request: ModelsQuery) -> Any:
        query = f"per_page={ALL}&search={quote(request.search)}"
        exchange = await Exchange(self._app, "GET", f"{self._prefix}/models/search", query=query).start()
        return msgspec.json.decode(_result(await _whole(exchange)))

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.close()

    async def _admitted(self, model: str, body: bytes, headers: list[tuple[str, str]], waits: bool) -> Exchange:
        """By default a call waits for room, as on the platform."""
        waited_s, pause_s = 0.0, FIRST_PAUSE_S
        while True:
            exchange = await Exchange(self._app, "POST", f"{self._prefix}/run/{model}", headers, body).start()
            if exchange.status != BUSY_STATUS or not waits or waited_s >= QUEUE_FOR_S:
                return exchange
            await exchange.aclose()
            await self._sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)

    async def _result_of(self, model: str, inputs: dict[str, Any]) -> tuple[bool, bytes]:
        """One request of a batch: whether it succeeded, and its result or error in JSON. Waits for room without an end."""
        while True:
            exchange = await self._admitted(model, _encoded(inputs), [], True)
            body = await _whole(exchange)
            if exchange.status != BUSY_STATUS:
                break
        return (True, _result(body)) if exchange.status < 400 else (False, body)


async def _whole(exchange: Exchange) -> bytes:
    try:
        return await exchange.read()
    finally:
        await exchange.aclose()


def _encoded(inputs: dict[str, Any]) -> bytes:
    try:
        body = orjson.dumps(inputs)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise _refusal(400, 5004, f"the inputs are not JSON: {error}; encode bytes as base64 text") from None
    if len(body) > MAX_INPUT_BYTES:
        raise _refusal(413, 3006, f"the inputs have {len(body)} bytes, of at most {MAX_INPUT_BYTES}")
    return body


def _content_type(exchange: Exchange) -> str:
    return next((value for name, value in exchange.headers if name == "content-type"), "").partition(";")[0]


def _result(envelope: bytes) -> bytes:
    """The `result` of an envelope, still in JSON."""
    return bytes(msgspec.json.decode(envelope, type=_Envelope).result)


class _Envelope(msgspec.Struct):
    result: msgspec.Raw


def _as_refusal(status: int, body: bytes) -> BindingError:
    error = msgspec.json.decode(body)["errors"][0]
    return _refusal(status, error["code"], error["message"])


def _refusal(status: int, code: int, sentence: str) -> BindingError:
    return BindingError(f"{code}: {sentence}", code=code, status=status, name="InferenceUpstreamError")
