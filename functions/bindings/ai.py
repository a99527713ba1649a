"""The AI binding: a function's calls to the models of its site (inference.py).

Results, refusals and error codes come from the site. This module adds the caller's identity (each function is a tenant), waiting for capacity,
immediate refusal (`rejectIfBusy`), and batches that are answered later.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta
from msgspec.structs import replace

from pilotlight.functions.bindings.ai_batches import Batches
from pilotlight.functions.bindings.binding import Binding, BindingError, Services, method
from pilotlight.functions.bindings.place import name_of
from pilotlight.functions.bindings.storage.response_cache import ResponseMemory
from pilotlight.functions.bindings.usage import FunctionUsage
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.inference import EventStream, InferenceResponse
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import ACCOUNT, forwardable
from pilotlight.wire.hop.meters import MeterSlot
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import Outcome

CAPACITY = 3040  # Workers AI's error code: no capacity
NO_MODEL = 5007  # Workers AI's error code: unknown model
MAX_NAMED = 20  # model names that an error message lists
BUSY_STATUS = 429
AWAY_STATUS = 503  # no site with the model is up
TIMED_OUT, TIMEOUT_STATUS = 3007, 408  # Workers AI's error code and status: the model took too long
CACHE_STATUS = "cf-aig-cache-status"  # response header of AI Gateway: HIT or MISS
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
MAX_INPUT_BYTES = 8 << 20

Sleep = Callable[[float], Awaitable[None]]


class Retries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of attempts, and the pauses between them, for a call that fails with 408, 429 or 5xx."""

    max_attempts: Annotated[int, Meta(ge=1, le=5)] = 5
    retry_delay_ms: Annotated[float, Meta(ge=0, le=5000)] = 0.0
    backoff: Literal["constant", "linear", "exponential"] = "constant"

    def pause_s(self, attempt: int) -> float:
        """Return the pause in seconds after an attempt; attempts count from 1."""
        times = {"constant": 1.0, "linear": float(attempt), "exponential": 2.0 ** (attempt - 1)}[self.backoff]
        return self.retry_delay_ms * times / 1000


class Gateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of AI Gateway for one call.
    `metadata`, `collect_log` and `event_id` are accepted and ignored: AI Gateway's log does not exist here. The router's ledger records calls
    instead."""

    id: Annotated[str, Meta(min_length=1, max_length=200)] = "default"
    cache_ttl: Annotated[float, Meta(ge=0)] | None = None  # seconds
    cache_key: Annotated[str, Meta(max_length=4096)] | None = None
    skip_cache: bool = False
    request_timeout_ms: Annotated[float, Meta(gt=0)] | None = None
    retries: Retries = Retries(max_attempts=1)
    metadata: dict[str, Any] = {}
    collect_log: bool = True
    event_id: str = ""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    inputs: dict[str, Any]
    raw: bool = False
    queue: bool = False
    reject_if_busy: bool = False
    extra_headers: dict[str, str] = {}
    gateway: Gateway | None = None


class Poll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    request_id: str


class ModelsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    search: str = ""


class AI(Binding):
    kind = "ai"

    def __init__(
        self,
        services: Services,
        batches: Batches | None,
        sleep: Sleep = asyncio.sleep,
        memory: ResponseMemory | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Open the binding.
        Without `batches` nothing can be queued. `memory` caches responses of calls with `cache_ttl`. `aliases` maps a model's name to the model
        that runs instead if this site has none of that name."""
        assert services.inference is not None, "checked when it was opened"
        self._inference = services.inference
        self._account = f"function-{name_of(services.function)}"
        self._function, self._usage = services.function, services.usage
        self._sleep = sleep
        self._wait_s = services.limits.ai_wait_s
        self._batches = batches
        self._memory = memory or ResponseMemory()
        self._aliases = aliases or {}
        if batches is not None:
            batches.serve(self._result_of)

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "AI":
        if services.inference is None:
            raise BindingError(f"{declaration.name}: the site has no models; add a [[models]] table to its file")
        batches, memory = Batches.open(state_dir, services), ResponseMemory.of(state_dir, services)
        return cls(services, batches, memory=memory, aliases=declaration.options.get("aliases"))

    @method
    async def run(self, request: Run) -> Any:
        """Run a model; return {status, headers} and the body, either as `body` or as a stream."""
        if not request.model.isprintable():
            raise _refusal(400, 5007, "no model has such a name")
        if request.model in self._aliases and not self._inference.serves(request.model):
            request = replace(request, model=self._aliases[request.model])
        if request.reject_if_busy and self._inference.is_busy(request.model):
            raise _refusal(BUSY_STATUS, CAPACITY, "the model is busy, and the call asked not to wait")
        if request.queue and self._batches is not None:
            return await self._batches.put(request.model, request.inputs)
        headers = dict(forwardable(request.extra_headers.items()))
        if request.gateway is None:
            response = await self._counted(request.model, request.inputs, headers, not request.reject_if_busy)
        else:
            response = await self._through(request.gateway, request, headers)
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
        """Return the state of a batch; its results are included once all are available."""
        found = None if self._batches is None else await self._batches.get(request.request_id)
        if found is None:
            raise _refusal(404, 3042, f"there is no batch {request.request_id[:100]!r}, or it has expired")
        return found

    @method
    async def models(self, request: ModelsQuery) -> Any:
        return self._inference.models(request.search)

    def _as_refusal(self, response: InferenceResponse) -> BindingError:
        error = msgspec.json.decode(response.body)["errors"][0]
        code, sentence = error["code"], error["message"]
        if code == NO_MODEL:
            there = ", ".join(card["name"] for card in self._inference.models("")[:MAX_NAMED])
            further = (
                "models.aliases of a site's file, ai.aliases of the manifest and `pilotlight dev --model NAME=MODEL` "
                "give a model further names"
            )
            sentence = f"{sentence}; it has {there or 'none'}; {further}"
        return _refusal(response.status, code, sentence)

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.close()

    async def _through(self, gateway: Gateway, request: Run, headers: dict[str, str]) -> InferenceResponse:
        """Run a model with AI Gateway's options: response cache, retries, time limit."""
        key = gateway.cache_key or hashlib.sha256(_encoded({"model": request.model, **request.inputs})).hexdigest()
        place = self._function, f"AI {gateway.id}", key
        is_kept = bool(gateway.cache_ttl) and not gateway.skip_cache and request.inputs.get("stream") is not True
        if is_kept and (found := self._memory.get(place)) is not None:
            return InferenceResponse(found.status, [*found.headers, (CACHE_STATUS, "HIT")], found.content)
        for attempt in range(1, gateway.retries.max_attempts + 1):
            try:
                async with asyncio.timeout(gateway.request_timeout_ms and gateway.request_timeout_ms / 1000):
                    response = await self._counted(request.model, request.inputs, headers, not request.reject_if_busy)
            except TimeoutError:
                sentence = f"the model has not answered within {gateway.request_timeout_ms:g} ms"
                response = InferenceResponse(TIMEOUT_STATUS, [], _errors(TIMED_OUT, sentence))
            if response.status != BUSY_STATUS and response.status < 500 and response.status != TIMEOUT_STATUS:
                break
            if attempt < gateway.retries.max_attempts:
                await self._sleep(gateway.retries.pause_s(attempt))
        if is_kept and response.status == 200 and response.events is None:
            self._memory.put(place, 200, response.headers, response.body, gateway.cache_ttl or 0.0)
            return response._replace(headers=[*response.headers, (CACHE_STATUS, "MISS")])
        return response

    async def _counted(
        self, model: str, inputs: dict[str, Any], headers: dict[str, str], waits: bool
    ) -> InferenceResponse:
        """Run a model and record its usage before the function gets the result. Raises BindingError."""
        body = _encoded(inputs)
        if self._usage is None:
            return await self._admitted(model, body, headers, waits)
        # If another site has the model, or the account has limits, the router records the usage.
        if not self._inference.serves(model) or self._usage.is_limited(self._function):
            account = self._usage.account_of(self._function)
            return await self._admitted(model, body, {**headers, ACCOUNT: account} if account else headers, waits)
        name, adapter = self._inference.own_names(model)
        lora = inputs.get("lora")
        try:
            meter = self._usage.begin(self._function, name, lora if isinstance(lora, str) else adapter, len(body))
        except ApiError as error:
            raise _refusal(BUSY_STATUS, CAPACITY, error.message) from None
        response: InferenceResponse | None = None
        outcome: Outcome = "cut"
        try:
            response = await self._admitted(model, body, headers, waits)
            if meter is not None and response.events is not None:
                return response._replace(events=CountedEvents(response.events, meter, self._usage))
            if meter is not None:
                meter.count(response.use)
                meter.sends(len(response.body))
            outcome = "complete"
            return response
        finally:
            if response is None or response.events is None:
                self._usage.end(meter, outcome)

    async def _admitted(self, model: str, body: bytes, headers: dict[str, str], waits: bool) -> InferenceResponse:
        """Run a model. If `waits`, retry for `ai_wait_s` while the model is busy, as the platform does."""
        waited_s, pause_s = 0.0, FIRST_PAUSE_S
        while True:
            response = await self._inference.run(self._account, model, body, headers)
            if not _is_busy(response) or not waits or waited_s >= self._wait_s:
                return response
            await self._sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)

    async def _result_of(self, model: str, inputs: dict[str, Any]) -> tuple[bool, bytes]:
        """Run one request of a batch; return whether it succeeded, and its result or its error as JSON.
        Retries without a time limit while the model is busy, or away at other sites."""
        while True:
            try:
                response = await self._counted(model, inputs, {}, True)
            except BindingError as error:  # the inputs are too large, or usage cannot be recorded at the moment
                response = InferenceResponse(error.status, [], _errors(error.code, error.message.partition(": ")[2]))
            if response.status not in (BUSY_STATUS, AWAY_STATUS):
                return response.status < 400, response.body
            await self._sleep(LONGEST_PAUSE_S)


class CountedEvents:
    """A stream of a model's events that records usage before it passes each event on."""

    def __init__(self, events: EventStream, meter: MeterSlot, usage: FunctionUsage) -> None:
        self._events, self._meter, self._usage = events, meter, usage
        self._has_ended = False

    @property
    def use(self) -> ResourceUse:
        return self._events.use

    def __aiter__(self) -> "CountedEvents":
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await anext(self._events)
        except StopAsyncIteration:
            self._end("complete")
            raise
        self._meter.count(self._events.use)
        self._meter.sends(len(chunk))
        return chunk

    async def aclose(self) -> None:
        try:
            await self._events.aclose()
        finally:
            self._end("cut")

    def _end(self, outcome: Outcome) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._meter.count(self._events.use)  # includes tokens that were generated but not consumed
            self._usage.end(self._meter, outcome)


def _encoded(inputs: dict[str, Any]) -> bytes:
    try:
        body = orjson.dumps(inputs)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise _refusal(400, 5004, f"the inputs are not JSON: {error}; encode bytes as base64 text") from None
    if len(body) > MAX_INPUT_BYTES:
        raise _refusal(413, 3006, f"the inputs have {len(body)} bytes, of at most {MAX_INPUT_BYTES}")
    return body


def _errors(code: int | str, sentence: str) -> bytes:
    """Return an error as JSON in Workers AI's format."""
    return orjson.dumps(
        {"success": False, "result": {}, "messages": [], "errors": [{"code": code, "message": sentence}]}
    )


def _is_busy(response: InferenceResponse) -> bool:
    """Tell whether a model has no capacity now; a quota that is used up has another code."""
    return response.status == BUSY_STATUS and msgspec.json.decode(response.body)["errors"][0]["code"] == CAPACITY


def _refusal(status: int, code: int, sentence: str) -> BindingError:
    return BindingError(f"{code}: {sentence}", code=code, status=status, name="InferenceUpstreamError")
