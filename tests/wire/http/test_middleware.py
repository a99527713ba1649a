"""Protection against pages of other origins: which requests are refused, and which responses they may read. A memory budget limits request bodies."""

import asyncio
import socket
from typing import Any

import pytest

from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.middleware import BodyBudget, OriginCheck, Origins
from tests.edge_router.raw import status_of
from tests.wire.http.test_server import App, client_of

EVIL = b"http://evil.example"
LOCAL = Origins(is_local=True, hosts=["pilot.example"], cors_origins=["https://app.example"], api_paths=("/v1/",))


def refused(origins: Origins, method: str = "GET", **headers: bytes) -> int | None:
    refusal = origins.refusal(method, {name.replace("_", "-").encode(): value for name, value in headers.items()})
    return None if refusal is None else refusal.status(Dialect.OPENAI)


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LOCALHOST:8787", b"127.0.0.1", b"127.0.0.1:1", b"[::1]", b"[::1]:80", b"Pilot.example:443",
     b"host.docker.internal:8787", b"gateway.containers.internal", b"box.local", b"app.localhost:3000", b"0.0.0.0:8787",
     b"172.17.0.1:8787", b"192.168.1.7", b"10.0.0.3", b"[fd00::1]:80", socket.gethostname().encode()],
)  # fmt: skip
def test_a_local_listener_answers_to_local_and_configured_names(host: bytes) -> None:
    assert refused(LOCAL, host=host) is None


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"evil.example:8787", b"", b"localhost.evil.example", b"127.0.0.1.evil.example",
     b"8.8.8.8", b"localhost.", b"internal.evil.example", b"evil.example.local.", b"internal", b"notlocal", b"[2606:4700::1]"],
)  # fmt: skip
def test_a_local_listener_answers_to_no_other_name(host: bytes) -> None:
    assert refused(LOCAL, host=host) == 421
    assert refused(Origins(is_local=False), host=host) is None


@pytest.mark.parametrize(
    "host",
    [b"[::1", b"[", b"localhost:70000", b"localhost:x", b"localhost/a", b"evil.example#127.0.0.1", b"a?b", b"127.0.0.1@evil.example", b"a b",
     b"a\\b", b"caf\xe9"],
)  # fmt: skip
def test_no_listener_takes_an_invalid_host(host: bytes) -> None:
    """The request.url of a function contains the host."""
    assert refused(LOCAL, host=host) == refused(Origins(is_local=False), host=host) == 400


@pytest.mark.parametrize(
    "kind",
    [
        b"text/plain",
        b"TEXT/PLAIN; charset=utf-8",
        b"application/x-www-form-urlencoded",
        b"multipart/form-data; boundary=x",
        b"",
    ],
)
def test_a_form_of_another_page_is_refused(kind: bytes) -> None:
    for origin, status in (
        (EVIL, 403),
        (b"null", 403),
        (b"https://app.example", None),
        (b"http://localhost:5173", None),
    ):
        assert refused(LOCAL, "POST", host=b"localhost:8787", origin=origin, content_type=kind) == status
    assert refused(LOCAL, "POST", host=b"localhost:8787", content_type=kind) is None, (
        "browsers do not send such a request"
    )
    assert refused(LOCAL, "POST", host=b"host.docker.internal", origin=EVIL, content_type=kind) == 403
    assert refused(LOCAL, "POST", host=b"localhost", origin=b"http://printer.local", content_type=kind) == 403
    assert refused(LOCAL, "POST", host=b"pilot.example", origin=EVIL, content_type=kind) is None, (
        "a proxy in front must decide"
    )


def test_what_a_browser_asks_about_first_is_not_refused_and_sockets_are() -> None:
    assert refused(LOCAL, "POST", host=b"localhost", origin=EVIL, content_type=b"application/json") is None
    assert refused(LOCAL, "GET", host=b"localhost", origin=EVIL) is None
    assert refused(LOCAL, "GET", host=b"localhost", origin=EVIL, upgrade=b"websocket") == 403
    assert refused(LOCAL, "GET", host=b"localhost", origin=b"http://localhost", upgrade=b"websocket") is None


PREFLIGHT = (
    b"OPTIONS %s HTTP/1.1\r\nhost: localhost\r\norigin: %s\r\naccess-control-request-method: POST\r\n"
    b"access-control-request-headers: authorization\r\n\r\n"
)


@pytest.mark.process
@pytest.mark.parametrize(
    "origin",
    [
        b"https://app.example",
        b"http://localhost:3000",
        b"http://127.0.0.1:5173",
        b"https://app.localhost",
        b"http://[::1]:3000",
        b"app://obsidian.md",
        b"tauri://localhost",
        b"vscode-webview://1pdjk2m3",
        b"file://",
    ],
)
async def test_pages_of_this_machine_and_of_a_configured_origin_may_ask_and_read(origin: bytes) -> None:
    app = App()
    async with client_of(OriginCheck(app, LOCAL)) as client:
        await client.say(PREFLIGHT % (b"/v1/x", origin))
        head = await client.hear_until(b"\r\n\r\n")
        assert status_of(head) == 204
        assert b"access-control-allow-origin: %s\r\n" % origin in head
        assert b"access-control-allow-headers: authorization\r\n" in head
        assert app.scopes == []
        await client.say(b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\norigin: %s\r\n\r\n" % origin)
        answer = await client.hear_until(b"ok")
        assert b"access-control-allow-origin: %s\r\nvary: origin\r\n" % origin in answer


@pytest.mark.process
async def test_a_function_answers_for_other_pages_itself() -> None:
    app = App()
    async with client_of(OriginCheck(app, LOCAL)) as client:
        await client.say(PREFLIGHT % (b"/fn/f/", b"https://app.example"))
        assert b"access-control" not in await client.hear_until(b"ok")
        assert len(app.scopes) == 1


@pytest.mark.process
async def test_another_pages_question_is_answered_with_what_to_write_where() -> None:
    app = App()
    async with client_of(OriginCheck(app, LOCAL)) as client:
        await client.say(PREFLIGHT % (b"/v1/x", EVIL))
        answer = await client.hear_until(b"}}")
        assert status_of(answer) == 403
        assert b"add the origin to cors_origins under [door]" in answer
        assert b"access-control" not in answer
        await client.say(b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\norigin: %s\r\n\r\n" % EVIL)
        assert b"access-control" not in await client.hear_until(b"ok")


def test_what_operators_ask_for_is_read_by_pages_of_a_configured_origin_alone() -> None:
    asked = {b"access-control-request-method": b"POST"}
    for path in ("/deployments/f", "/page/action", "/status"):
        with pytest.raises(ApiError, match="may not read answers"):
            LOCAL.cors("OPTIONS", path, {b"origin": b"http://localhost:3000", **asked})
        assert LOCAL.cors("GET", path, {b"origin": b"http://localhost:3000"}) == ([], False)
        assert LOCAL.cors("OPTIONS", path, {b"origin": b"https://app.example", **asked})[1]


@pytest.mark.process
async def test_cors_headers_of_a_site_are_sent_once_at_a_router() -> None:
    async with client_of(OriginCheck(OriginCheck(App(), LOCAL), LOCAL)) as client:
        await client.say(b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost:3000\r\n\r\n")
        assert (await client.hear_until(b"ok")).count(b"access-control-allow-origin") == 1


def test_without_origins_in_the_file_pages_of_this_machine_alone_may_read() -> None:
    assert Origins(is_local=True).cors("OPTIONS", "/v1/x", {b"origin": EVIL}) == ([], False)
    for origin in (b"null", b"chrome-extension://app", b"https://app", b"app.evil://x"):
        assert Origins(is_local=True).cors("GET", "/v1/x", {b"origin": origin}) == ([], False)
    anybody = Origins(is_local=False, cors_origins=["*"])
    assert (b"access-control-allow-origin", b"*") in anybody.cors("GET", "/v1/x", {b"origin": EVIL})[0]


@pytest.mark.process
async def test_a_refused_name_is_answered_with_a_sentence() -> None:
    app = App()
    async with client_of(OriginCheck(app, LOCAL)) as client:
        await client.say(b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n")
        answer = await client.hear_until(b"}}")
        assert status_of(answer) == 421
        assert b"add it to hosts under [door]" in answer
    assert app.scopes == []


@pytest.mark.process
async def test_a_websocket_of_another_page_is_refused_with_a_sentence() -> None:
    app = App()
    async with client_of(OriginCheck(app, LOCAL)) as client:
        await client.say(
            b"GET / HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        answer = await client.hear_all()
        assert status_of(answer) == 403
        assert b"add the origin to cors_origins under [door]" in answer
    assert app.scopes == []


class Bodies:
    """An application with a memory budget; its requests keep their bodies in memory until `may_end` is set."""

    def __init__(self, max_bytes: int) -> None:
        self.budget = BodyBudget(self._app, max_bytes)
        self.may_end = asyncio.Event()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        await self.may_end.wait()

    async def ask(self, *parts: int, kind: str = "http") -> None:
        messages = [{"body": bytes(size), "more_body": True} for size in parts] + [{"more_body": False}]

        async def receive() -> Any:
            return messages.pop(0)

        async with asyncio.timeout(60):
            await self.budget({"type": kind}, receive, None)


async def test_bodies_of_all_requests_together_may_hold_so_much_and_no_more() -> None:
    bodies = Bodies(10)
    at_work = asyncio.create_task(bodies.ask(4, 2))
    await asyncio.sleep(0)
    assert bodies.budget.held_bytes == 6
    for parts in ((5,), (2, 3)):
        with pytest.raises(ApiError, match="the bodies of other requests") as told:
            await bodies.ask(*parts)
        assert (told.value.word, told.value.retry_after_s) == ("overloaded", 1)
        assert bodies.budget.held_bytes == 6
    full = asyncio.create_task(bodies.ask(4))
    await asyncio.sleep(0)
    assert bodies.budget.held_bytes == 10
    empty = asyncio.create_task(bodies.ask())
    socket = asyncio.create_task(bodies.ask(99, kind="websocket"))
    await asyncio.sleep(0)
    assert bodies.budget.held_bytes == 10, "requests without a body, and WebSockets, need no budget"
    bodies.may_end.set()
    await asyncio.gather(at_work, full, empty, socket)
    assert bodies.budget.held_bytes == 0
