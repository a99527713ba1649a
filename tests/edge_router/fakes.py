"""Sites that are real HTTP servers on ephemeral ports and misbehave on command, and a real router in front of them.

A behaviour is a coroutine that gets the request and answers it, or does not. The router runs with its own server and application, as in production;
on leaving its scope everything it counts must be zero.
"""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from pilotlight.edge_router.app import RouterApp, build_app
from pilotlight.edge_router.assembly import RouterLimits
from pilotlight.edge_router.routing.views import Policy
from pilotlight.edge_router.serve import serving
from pilotlight.wire.hop.continuation import (
    ANSWER,
    NOTHING_DELIVERED,
    RESUME_POINTS,
    ResumePoint,
    decode_answer,
    decode_delivery,
    with_resume_point,
)
from pilotlight.wire.hop.headers import CLOCK, HOP, REFUSAL, REQUEST_ID, Hop, age_of_hop, hop_is_genuine, tell_clock
from pilotlight.wire.hop.status import encode_status
from pilotlight.wire.http.listen import bind
from tests.edge_router.builders import network, site_status
from tests.edge_router.nearest import NearestPolicy

Behaviour = Callable[["FakeSite", web.Request], Awaitable[web.StreamResponse]]
SSE = {"content-type": "text/event-stream; charset=utf-8"}
DONE = b"data: [DONE]\n\n"


class FakeSite:
    def __init__(self, name: str) -> None:
        self.name = name
        self.behave: Behaviour = stream_of(4)
        self.status_fields: dict[str, Any] = {}
        self.status_body: bytes | None = None  # sent instead of a real status
        self.secret = ""  # if set, unsigned requests are refused, as by sites
        self.clock_ahead_s = 0.0
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.active = 0
        self.cancelled = 0  # number of handlers whose connection the router has closed
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()  # releases a waiting behaviour
        self.port = 0
        self.num_probes = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/status", self._status)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=75, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections from now on, and cut open ones."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        self.num_probes += 1
        body = self.status_body
        if body is None:
            body = encode_status(site_status(self.name, self.num_probes, **self.status_fields))
        return web.Response(body=body, content_type="application/json")

    def _refusal(self, request: web.Request) -> web.Response | None:
        signature, name = request.headers.get(HOP, ""), request.headers.get(REQUEST_ID, "")
        hop = Hop(request.method, request.path, name, self.name, request.query_string)
        now_s = time.time() + self.clock_ahead_s
        if not self.secret or hop_is_genuine(signature, self.secret, now_s, hop):
            return None
        headers = {REFUSAL: "signature"}
        if hop_is_genuine(signature, self.secret, now_s - (age_of_hop(signature, now_s) or 0.0), hop):
            headers = {REFUSAL: "clock", CLOCK: tell_clock(self.secret, now_s, self.name, name)}
        return web.json_response({"error": {"code": "forbidden"}}, status=403, headers=headers)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        self.seen.append(request)
        self.active += 1
        try:
            self.bodies.append(await request.read())
            self.asked.set()
            return await self.behave(self, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1


PROMPT_TOKENS, CACHED_TOKENS = 7, 3  # reported for every continued stream


def event(i: int) -> bytes:
    return b'data: {"i":%d}\n\n' % i


async def begin(request: web.Request, headers: Mapping[str, str] = SSE) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


def reset_connection(request: web.Request) -> None:
    """Reset the connection with RST instead of closing it with FIN."""
    assert request.transport is not None
    request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()


def stream_of(count: int) -> Behaviour:
    async def behave(site: FakeSite, request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for i in range(count):
            await response.write(event(i))
        await response.write(DONE)
        return response

    return behave


def refuse(word: str, status: int = 503, message: str = "", **headers: str) -> Behaviour:
    """Refuse requests with a header that marks the site as the cause."""
    return answer(status, {"error": {"message": message, "code": word}}, **{REFUSAL: word, **headers})


def answer(status: int, body: object, **headers: str) -> Behaviour:
    async def behave(site: FakeSite, request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(
            body=json.dumps(body).encode(), status=status, content_type="application/json", headers=named
        )

    return behave


def raw_stream(*parts: bytes, end: str = "clean") -> Behaviour:
    """Return a behaviour that writes the parts and then ends as `end` says.
    `end` is clean, reset, half-close (without the last chunk), hang, or on command (`FakeSite.go_on`)."""

    async def behave(site: FakeSite, request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        assert request.transport is not None
        if end == "reset":
            reset_connection(request)
        elif end == "half-close":
            request.transport.write_eof()
            await asyncio.Event().wait()
        elif end == "hang":
            await asyncio.Event().wait()
        elif end == "on command":
            await site.go_on.wait()
            await response.write(event(99) + DONE)
        return response

    return behave


async def hang(site: FakeSite, request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def reset_before_first_byte(site: FakeSite, request: web.Request) -> web.StreamResponse:
    reset_connection(request)
    return web.Response()


class Router:
    def __init__(self, url: str, app: RouterApp, session: aiohttp.ClientSession, server: Any) -> None:
        self.url = url
        self.server = server
        self.proxy = app.edge.proxy
        self.edge = app.edge
        self.responses = app.responses
        self.http = session

    @property
    def tunnels(self) -> Any:
        return self.edge.tunnels

    def chat(
        self, path: str = "/ai/v1/chat/completions", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> "aiohttp.client._RequestContextManager":
        body = {"model": "ember", "stream": True, "messages": [{"role": "user", "content": "hello"}], **fields}
        return self.http.post(self.url + path, json=body, headers=headers)

    async def until(self, condition: Callable[..., bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    async def until_states(self, **states: str) -> None:
        await self.until(
            lambda: all(self.proxy.selector.backends[name].state == state for name, state in states.items())
        )

    def counted(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def sites(*names: str) -> AsyncIterator[list[FakeSite]]:
    running = [FakeSite(name) for name in names]
    for site in running:
        await site.start()
    try:
        yield running
    finally:
        for site in running:
            await site.stop()


async def start_its_store(url: str) -> None:
    """Let a site start the task of its store of responses, which must not be taken for one of a router that starts later."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/responses/resp_1") as response:
        assert response.status == 404, await response.text()


@asynccontextmanager
async def router(
    fakes: list[FakeSite],
    *,
    policy: Policy | None = None,
    probe_interval_s: float = 0.05,
    tables: Mapping[str, Any] | None = None,
    until: Mapping[str, str] | None = None,
    limits: RouterLimits | None = None,
    **relay: Any,
) -> AsyncIterator[Router]:
    """Start a router and wait for its sites.
    `until` has the state of each site to wait for; by default all must be healthy."""
    health = {"interval_s": probe_interval_s, "timeout_s": 0.5, "unhealthy_after": 2}
    timeouts = {
        "connect_timeout_s": 1.0,
        "first_byte_timeout_s": 5.0,
        "answer_timeout_s": 5.0,
        "idle_timeout_s": 5.0,
        **relay,
    }
    config = network({site.name: site.url for site in fakes}, health=health, relay=timeouts, **(tables or {}))
    before = asyncio.all_tasks()
    app = build_app(config, policy=policy, limits=limits)
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(app, config, listener) as server, aiohttp.ClientSession() as session:
        running = Router(url, app, session, server)
        async with asyncio.timeout(60):
            await running.until_states(**(until or {site.name: "healthy" for site in fakes}))
        yield running
        await _assert_nothing_is_left(running)
    leaked = {
        task
        for task in asyncio.all_tasks() - before - {asyncio.current_task()}
        if "aiohttp" not in repr(task)  # a task of aiohttp's server, which is ending
    }
    if leaked:  # a fake site may still answer the router's last request
        _, leaked = await asyncio.wait(leaked, timeout=60)
    assert not leaked, f"tasks outlive the router: {leaked}"


async def _assert_nothing_is_left(router: Router) -> None:
    def settled() -> bool:
        views = [backend.view() for backend in router.proxy.selector.backends.values()]
        return router.counted("pilotlight_router_open_requests") == 0 and all(
            (view.outstanding, view.pending_requests, view.pending_tokens) == (0, 0, 0) for view in views
        )

    try:
        async with asyncio.timeout(60):
            await router.until(settled)
    except TimeoutError:
        raise AssertionError(
            f"the router still counts {[b.view() for b in router.proxy.selector.backends.values()]}"
        ) from None


Ending = Callable[[FakeSite, web.Request, web.StreamResponse], Awaitable[None]]


def continued_stream(count: int, *, until: int | None = None, ending: Ending | None = None) -> Behaviour:
    """Return a behaviour that answers as a real site answers a router.

    Event i brings token 100 + i, after the delivered ones, with two drafts, one of them accepted, and 1 ms of device time. Before event `until` the
    stream ends with `ending`.
    """

    async def behave(site: FakeSite, request: web.Request) -> web.StreamResponse:
        _, length = decode_answer(request.headers[ANSWER])
        delivery = decode_delivery(site.bodies[-1][:length]) if length else NOTHING_DELIVERED
        delivered = delivery.choices[0].token_ids if delivery.choices else ()
        assert delivered == tuple(range(100, 100 + len(delivered)))
        response = await begin(request, {**SSE, RESUME_POINTS: "1"})
        for i in range(len(delivered), count):
            if i == until and ending is not None:
                await ending(site, request, response)
                return response
            await response.write(marked_event(i, i + 1 - len(delivered)))
            await asyncio.sleep(0)
        made = count - len(delivered)
        usage = (CACHED_TOKENS, 0, PROMPT_TOKENS, 1, 2 * made, made, 1000 * made)
        await response.write(with_resume_point(DONE, ResumePoint(0, (), "stop", *usage)))
        return response

    return behave


def marked_event(i: int, made: int = 0) -> bytes:
    usage = (CACHED_TOKENS, 0, PROMPT_TOKENS, 0, 2 * made, made, 1000 * made)
    return with_resume_point(event(i), ResumePoint(0, (100 + i,), None, *usage))


async def reset_it(site: FakeSite, request: web.Request, response: web.StreamResponse) -> None:
    await asyncio.sleep(0.01)
    reset_connection(request)


async def end_it(site: FakeSite, request: web.Request, response: web.StreamResponse) -> None:
    """End the body normally, although the stream is incomplete."""


async def fall_silent(site: FakeSite, request: web.Request, response: web.StreamResponse) -> None:
    await asyncio.Event().wait()


def write_and_wait(data: bytes) -> Ending:
    async def ending(site: FakeSite, request: web.Request, response: web.StreamResponse) -> None:
        await response.write(data)
        await asyncio.Event().wait()

    return ending


def write_and_end(data: bytes) -> Ending:
    async def ending(site: FakeSite, request: web.Request, response: web.StreamResponse) -> None:
        await response.write(data)

    return ending


WHOLE = b"".join(event(i) for i in range(4)) + DONE
DRAINING = {"error": {"message": "the site drains", "type": "server_error", "param": None, "code": "draining"}}


class FirstThen(NearestPolicy):
    """A policy with a fixed order of names, so that a test knows which site comes first."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def rank(self, request: Any, backends: Any) -> Any:
        order = {name: i for i, name in enumerate(self._names)}
        return sorted(super().rank(request, backends), key=lambda preference: order[preference.backend.name])


@asynccontextmanager
async def routed_sites(*names: str, **options: Any) -> AsyncIterator[tuple[list[FakeSite], Router]]:
    """Start sites and a router that prefers them in this order; `options` are those of `router`."""
    policy = FirstThen(*names) if len(names) > 1 else None
    async with sites(*names) as fakes, router(fakes, policy=policy, **options) as running:
        yield fakes, running


def last_error(body: bytes) -> dict[str, Any]:
    """Return the error event that ends a stream; only whole events precede it."""
    assert body.endswith(b"\n\n")
    data = body.rstrip(b"\n").rpartition(b"\n")[2]
    assert data.startswith(b"data: ")
    fields: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    return fields
