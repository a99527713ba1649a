"""WebSockets through a real router: messages, refusals, lost and full sites, signatures, silent and slow peers, and the router's end."""

import asyncio
from typing import Any, cast

import pytest
from aiohttp import WSMsgType, WSServerHandshakeError, web

from pilotlight.edge_router.assembly import RouterLimits
from pilotlight.edge_router.forwarding.websockets import Tunnel
from pilotlight.wire.hop.headers import HOP_SECRET_ENV, Hop, hop_is_genuine
from pilotlight.wire.http.websocket import SocketTimings, WebSocketClose
from tests.edge_router.fakes import FakeSite, answer, refuse, reset_before_first_byte, routed_sites, router, sites
from tests.edge_router.raw import wire
from tests.handshakes import handshake_of

pytestmark = pytest.mark.process

ASK = (
    b"GET /fn/f/ws HTTP/1.1\r\nhost: localhost\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def echo(site: FakeSite, request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse(protocols=("chat",), max_msg_size=0)
    socket.headers["x-of"] = site.name
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.ERROR:
            break
        if message.type is WSMsgType.TEXT and message.data == "close":
            await socket.close(code=4002, message=b"done")
        elif message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)
    site.bodies.append(f"closed {socket.close_code}".encode())
    return socket


async def silent(site: FakeSite, request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse(autoping=False)
    await socket.prepare(request)
    await site.go_on.wait()
    return socket


async def flood(site: FakeSite, request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    for _ in range(2000):
        await socket.send_bytes(b"f" * 50_000)
        site.bodies.append(b"")
    return socket


async def test_messages_pass_in_both_directions_and_so_does_the_close() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = echo
        async with running.http.ws_connect(running.url + "/fn/f/ws?a=b", protocols=("chat",), max_msg_size=0) as socket:
            assert socket.protocol == "chat"
            assert handshake_of(socket).headers["x-of"] == "ams1"
            assert "site=ams1" in handshake_of(socket).headers["x-pilotlight-route"]
            for size in (0, 1, 70_000, 3_000_000):
                await socket.send_bytes(b"b" * size)
                assert await socket.receive_bytes(timeout=60) == b"b" * size
            assert running.counted("pilotlight_router_sockets") == 1
            assert running.counted("pilotlight_router_tries_total", site="ams1", result="answered") == 1
            assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="ok") == 1
            await socket.send_str("close")
            assert (await socket.receive(timeout=60)).type is WSMsgType.CLOSE
            assert socket.close_code == 4002
        assert fakes[0].seen[0].path_qs == "/fn/f/ws?a=b"
        await running.until(lambda: running.counted("pilotlight_router_sockets") == 0)
        await running.until(lambda: not running.server.connections)


async def test_a_site_that_refuses_is_heard_and_one_that_cannot_is_passed_over() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave, fakes[1].behave = answer(403, {"no": "entry"}), echo
        with pytest.raises(WSServerHandshakeError) as refused:
            await running.http.ws_connect(running.url + "/fn/f/ws")
        assert refused.value.status == 403
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="client_error") == 1
        for behave in (refuse("draining"), reset_before_first_byte):
            fakes[0].behave = behave
            async with running.http.ws_connect(running.url + "/fn/f/ws") as socket:
                assert handshake_of(socket).headers["x-of"] == "iad1"
        fakes[1].behave = refuse("draining")
        with pytest.raises(WSServerHandshakeError) as refused:
            await running.http.ws_connect(running.url + "/fn/f/ws")
        assert refused.value.status == 503


async def test_the_hop_is_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, "s" * 32)
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = echo
        async with running.http.ws_connect(running.url + "/fn/f/ws", headers={"x-pilotlight-hop": "forged"}):
            pass
        headers = fakes[0].seen[0].headers
        stamp = float(headers["x-pilotlight-hop"].partition(".")[0])
        assert hop_is_genuine(
            headers["x-pilotlight-hop"], "s" * 32, stamp, Hop("GET", "/fn/f/ws", headers["x-request-id"], "ams1")
        )
        assert headers["cf-connecting-ip"] == "127.0.0.1"


async def test_other_paths_are_refused() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        with pytest.raises(WSServerHandshakeError) as refused:
            await running.http.ws_connect(running.url + "/v1/chat/completions")
        assert refused.value.status == 400
        with pytest.raises(WSServerHandshakeError) as refused:
            await running.http.ws_connect(running.url + "/fn/../v1/x")
        assert refused.value.status in (400, 404)
        assert fakes[0].seen == []


async def test_a_wish_for_another_protocol_is_passed_over() -> None:
    async with sites("ams1") as fakes, router(fakes) as running, wire(running.url) as client:
        fakes[0].behave = answer(200, "plain")
        await client.say(ASK.replace(b"websocket\r", b"mqtt\r"))
        assert (await client.hear_until(b"plain")).startswith(b"HTTP/1.1 200")
        assert "upgrade" not in fakes[0].seen[0].headers


async def test_the_router_is_an_asgi_application_under_hypercorn() -> None:
    async with sites("ams1") as fakes, router(fakes, tables={"door": {"server": "hypercorn"}}) as running:
        fakes[0].behave = echo
        async with running.http.ws_connect(running.url + "/fn/f/ws", protocols=("chat",)) as socket:
            assert socket.protocol == "chat"
            await socket.send_str("hello")
            assert await socket.receive_str(timeout=60) == "hello"
            await socket.send_str("close")
            assert (await socket.receive(timeout=60)).type is WSMsgType.CLOSE
            assert socket.close_code == 4002
        fakes[0].behave = answer(403, {"no": "entry"})
        with pytest.raises(WSServerHandshakeError) as refused:
            await running.http.ws_connect(running.url + "/fn/f/ws")
        assert refused.value.status == 403


async def test_a_client_that_leaves_during_the_handshake_ends_it() -> None:
    async def late(site: FakeSite, request: web.Request) -> web.StreamResponse:
        await site.go_on.wait()
        return web.Response()

    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = late
        async with wire(running.url) as client:
            await client.say(ASK)
            await running.until(lambda: bool(fakes[0].seen))
        async with asyncio.timeout(60):  # at once: the router must not wait until the site is lost
            await running.until(lambda: not running.server.connections)
            await running.until(lambda: running.proxy.selector.backends["ams1"].outstanding == 0)
        fakes[0].go_on.set()


async def test_a_silent_site_is_given_up() -> None:
    limits = RouterLimits(sockets=SocketTimings(ping_s=0.05, lost_s=0.4))
    async with sites("ams1") as fakes, router(fakes, limits=limits) as running:
        fakes[0].behave = silent
        socket = await running.http.ws_connect(running.url + "/fn/f/ws")
        message = await socket.receive(timeout=60)
        assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, 1011, "the site ams1 was lost")
        fakes[0].go_on.set()


async def test_a_client_that_does_not_read_holds_the_site_up_and_is_cut_off() -> None:
    async with sites("ams1") as fakes, router(fakes, idle_timeout_s=1.5) as running:
        fakes[0].behave = flood
        async with wire(running.url) as client:
            await client.say(ASK)
            await client.hear_until(b"\r\n\r\n")
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await running.until(lambda: bool(running.server.connections))
            await running.until(lambda: not running.server.connections)
            assert len(fakes[0].bodies) < 1000  # 50 MB


async def test_the_end_of_the_router_ends_the_sockets() -> None:
    async with sites("ams1") as fakes:
        fakes[0].behave = echo
        async with router(fakes) as running:
            socket = await running.http.ws_connect(running.url + "/fn/f/ws")
            await running.proxy.drain(0.1)
            with pytest.raises(WSServerHandshakeError) as refused:
                await running.http.ws_connect(running.url + "/fn/f/ws")
            assert refused.value.status == 503
            running.tunnels.end()
            assert (await socket.receive(timeout=60)).type is WSMsgType.CLOSE
            assert socket.close_code == 1012
            await running.until(lambda: not running.server.connections)


RESTARTING = b"\x88\x1a\x03\xf4the router is restarting"


async def test_a_router_that_stops_in_the_middle_of_a_message_says_so_and_nothing_of_that() -> None:
    async def half(site: FakeSite, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        assert request.transport is not None
        request.transport.write(b"\x81\x05he")
        await socket.receive()
        return socket

    async with sites("ams1") as fakes, router(fakes) as running, wire(running.url) as client:
        fakes[0].behave = half
        await client.say(ASK)
        await client.hear_until(b"\r\n\r\n")
        await running.until(lambda: len(running.tunnels) == 1)
        running.tunnels.end()
        assert await client.hear_all() == RESTARTING


async def test_a_close_of_the_sites_own_is_the_last_that_a_client_hears() -> None:
    async def closes(site: FakeSite, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(autoclose=False)
        await socket.prepare(request)
        assert request.transport is not None
        request.transport.write(b"\x88\x02\x03\xe8")
        await site.go_on.wait()
        return socket

    async with sites("ams1") as fakes, router(fakes) as running, wire(running.url) as client:
        fakes[0].behave = closes
        await client.say(ASK)
        await client.hear_until(b"\x88\x02\x03\xe8")
        running.tunnels.end()
        assert await client.hear_all() == b""
        fakes[0].go_on.set()


class Site:
    """A site's WebSocket that sends `says` and then waits. With `full` it accepts no bytes."""

    def __init__(self, *says: Any, full: bool = False) -> None:
        self.says = list(says)
        self.full = full
        self.told: list[Any] = []

    async def receive(self) -> Any:
        if not self.says:
            await asyncio.Event().wait()
        return self.says.pop(0)

    async def send(self, message: str | bytes) -> None:
        if self.full:
            await asyncio.Event().wait()
        self.told.append(message)

    def close(self, code: int, reason: str) -> None:
        self.told.append((code, reason))

    def abort(self) -> None:
        self.told.append("aborted")


async def ended(site: Site, *said: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Run a tunnel between a site and a client that sends `said`. Return the reason of its end, and the client's messages."""
    messages, told = list(said), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Any) -> None:
        told.append(message)

    async with asyncio.timeout(60):
        return await Tunnel("ams1", cast("Any", site), cast("Any", receive), cast("Any", send), 0.05).run(), told


@pytest.mark.parametrize(
    ("disconnect", "told"),
    [
        ({"code": 4000, "reason": "bye"}, (4000, "bye")),
        ({"code": 1000}, (1000, "")),
        ({"code": 1001, "reason": None}, (1001, "")),
        ({"code": 1006}, "aborted"),
        ({"code": None}, "aborted"),
        ({}, "aborted"),
    ],
)
async def test_a_site_hears_how_its_client_ended(disconnect: dict[str, Any], told: object) -> None:
    site = Site()
    texts = [{"type": "websocket.receive", "text": "a"}, {"type": "websocket.receive", "bytes": b"b", "text": None}]
    await ended(site, *texts, {"type": "websocket.disconnect", **disconnect})
    assert site.told == ["a", b"b", told]


@pytest.mark.parametrize(
    ("close", "why", "code"),
    [
        (WebSocketClose(4002, "done"), "the site closed it with 4002", 4002),
        (WebSocketClose(1006), "the site was lost", 1011),
    ],
)
async def test_a_client_hears_how_its_site_ended(close: WebSocketClose, why: str, code: int) -> None:
    told = await ended(Site("a", b"b", close))
    assert told[0] == why
    assert [message.get("text", message.get("bytes")) for message in told[1][:-1]] == ["a", b"b"]
    assert (told[1][-1]["type"], told[1][-1]["code"]) == ("websocket.close", code)


async def test_a_site_that_takes_nothing_is_left() -> None:
    site = Site(full=True)
    assert (await ended(site, {"type": "websocket.receive", "text": "a"}))[0] == "one side did not read for 0.05 s"
    assert site.told == ["aborted"]
