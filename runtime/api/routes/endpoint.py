"""Generating endpoints of every dialect: parse, validate, generate, and write one object or a stream.

Each endpoint has a parser that makes a `Valid...` value of a body, and a ResponseBuilder that renders deltas in its dialect. A stream to a router of
the network has resume points (wire/hop/continuation.py), and a notice when the site starts to drain.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Generic, Protocol, TypeVar, TypeVarTuple
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from pilotlight.dialects.requests import INLINE_BYTES, TextRequest, ValidGeneration
from pilotlight.runtime.api.connection import EventWriter
from pilotlight.runtime.api.router_context import body_limit, check_model, router_context, tenant_in
from pilotlight.runtime.generation.generator import EMPTY_DELTA, Generation, Generator
from pilotlight.runtime.generation.output_processor import Delta
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.credentials import Tenant
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.continuation import RESUME_POINTS, ResumePoint, with_resume_point
from pilotlight.wire.hop.headers import IGNORED, ROUTE
from pilotlight.wire.hop.usage import USAGE, WORK, ResourceUse, encode_use
from pilotlight.wire.http.asgi import read_body, send_json, until_disconnect
from pilotlight.wire.paths import with_deployment
from pilotlight.wire.sse import HEARTBEAT

log = logging.getLogger("pilotlight.http")

PREFIXES = ("/ai/v1", "/v1", "/client/v4/accounts/{account_id}/ai/v1")  # path prefixes, except Workers AI's
MOST_NAMED, MOST_NAMED_BYTES = 32, 1024  # limits of the header that lists ignored fields: number of names, bytes


class ResponseBuilder(Protocol):
    """One response in one dialect."""

    @property
    def num_events(self) -> int:
        """Number of events so far, in a dialect that numbers its events."""

    def events(self, delta: Delta, generation: Generation) -> bytes:
        """Return the server-sent events of a delta."""

    def ending(self, generation: Generation) -> bytes:
        """Return the events after the last delta."""

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        """Return the JSON object that carries the entire answer, one delta per choice."""


RequestT = TypeVar("RequestT", bound=ValidGeneration)


class Endpoint(Generic[RequestT]):
    """A pure ASGI application for one path."""

    def __init__(
        self,
        generator: Generator,
        dialect: Dialect,
        parse: Callable[..., RequestT],
        build: Callable[[RequestT, Generator], ResponseBuilder],
        limits: LimitsConfig,
    ) -> None:
        """Parse bodies by `parse` and render answers by `build`.

        `parse` is called with the body, a function that resolves a model's name, and the model's name if the path has one."""
        self._generator = generator
        self._registry = generator.models.registry
        self._dialect = dialect
        self._parse = partial(parse, strict=limits.strict_fields)
        self._build = build
        self._max_body_bytes = limits.max_body_bytes
        self._heartbeat_s = limits.heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, body_limit(scope, self._max_body_bytes))
        await self.answer(with_deployment(scope, raw), scope, receive, send)

    async def answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send, *model: str) -> None:
        """Answer a request whose body `raw` has been read. `model` is the name in the path, if any."""
        context, raw = router_context(scope, raw)
        request = await parsed(self._parse, raw, self._registry.resolve, *model)
        request = context.applied_to(request, len(raw))
        context.check_queue(self._registry.load(request.model))
        check_model(scope, request.asked_model)
        tenant = tenant_in(scope)
        if request.stream:
            work = self._stream(request, tenant, send, is_continuable=context.name is not None)
        else:
            work = self._send_whole(request, tenant, send, is_metered=context.name is not None)
        await until_disconnect(receive, work)

    async def _send_whole(self, request: RequestT, tenant: Tenant, send: Send, *, is_metered: bool) -> None:
        async with self._generator.generate(request, tenant) as generation:
            deltas = await generation.whole()
        body = self._build(request, self._generator).whole(deltas, generation)
        headers = naming_ignored(request, generation.left_out)
        if generation.route:
            headers.append((ROUTE, generation.route))
        if is_metered:
            headers += counting(generation.counter.resource_use())
        await send_json(send, body, headers=headers)

    async def _stream(self, request: RequestT, tenant: Tenant, send: Send, *, is_continuable: bool) -> None:
        headers = naming_ignored(request) + ([(RESUME_POINTS, "1")] if is_continuable else [])
        drains = self._generator.admission.drains if is_continuable else None
        async with EventWriter(send, self._heartbeat_s, headers, drains) as writer:
            try:
                await self._write_deltas(request, tenant, writer, is_continuable)
            except ApiError as error:
                if not writer.started.is_set():
                    raise
                await writer.write(error.event(self._dialect))
            except Exception:
                if not writer.started.is_set():
                    raise
                log.exception("a stream of %s failed", request.model)
                failure = ApiError("internal_error", "internal error at this site; see its log")
                await writer.write(failure.event(self._dialect))
            await writer.close()

    async def _write_deltas(self, request: RequestT, tenant: Tenant, writer: EventWriter, is_continuable: bool) -> None:
        builder = self._build(request, self._generator)
        async with self._generator.generate(request, tenant) as generation:
            if generation.route:
                writer.add_headers([(ROUTE, generation.route)])
            writer.add_headers(_ignored_header(request.requested_model, generation.left_out))
            async for delta in generation.deltas():
                events = events_of(delta, generation, builder)
                if is_continuable and delta is not EMPTY_DELTA:
                    events = with_resume_point(events, _resume_point(delta, generation, builder.num_events))
                await writer.write(events)


def naming_ignored(request: ValidGeneration | TextRequest, left_out: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the header that lists the fields of a request that this site ignores, if any.

    `left_out` names fields that are not enforced on the answer."""
    return _ignored_header(request.requested_model, (*request.ignored, *left_out))


def _ignored_header(model: str, ignored: Sequence[str]) -> list[tuple[str, str]]:
    """Return the header, if any fields are ignored. The same fields of a model are logged only once."""
    if not ignored:
        return []
    names = ", ".join(quote(name, safe="[]{}$@-_.~ ") for name in ignored[:MOST_NAMED])[:MOST_NAMED_BYTES]
    _log_ignored(model, names)
    return [(IGNORED, names)]


def counting(use: ResourceUse) -> list[tuple[str, str]]:
    """Return the headers with the resource use of an answer that is not streamed; the router meters it."""
    tokens, work = encode_use(use)
    return [(USAGE, tokens), (WORK, work)]


@lru_cache(256)
def _log_ignored(model: str, names: str) -> None:
    log.info("requests of %s have fields that are ignored: %s", model, names)


ParsedT = TypeVar("ParsedT")
Arguments = TypeVarTuple("Arguments")


async def parsed(parse: Callable[[bytes, *Arguments], ParsedT], raw: bytes, *args: *Arguments) -> ParsedT:
    """Parse a body; large ones are parsed in a thread."""
    return parse(raw, *args) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse, raw, *args)


def events_of(delta: Delta, generation: Generation, builder: ResponseBuilder) -> bytes:
    """Return the server-sent events of a delta; for the last delta they include the response's ending.

    A delta without content gives a heartbeat."""
    if delta is EMPTY_DELTA:
        return HEARTBEAT
    return builder.events(delta, generation) + (builder.ending(generation) if generation.is_finished else b"")


def _resume_point(delta: Delta, generation: Generation, num_events: int) -> ResumePoint:
    use = generation.counter.resource_use()
    return ResumePoint(
        delta.choice,
        delta.new_token_ids,
        delta.finish_reason,
        use.cached,
        num_events,
        use.prompt,
        use.reasoning,
        use.drafted,
        use.accepted,
        use.device_us,
    )
