"""WebSockets through a router and a site to a FastAPI application in an isolate, and how they end when any of these ends."""

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, WSServerHandshakeError

from load_tests.attacks import Neighbour
from load_tests.local_network import free_ports
from pilotlight.sites.config import SERVER_ENV
from tests.e2e.one_site import NETWORK, PLACE
from tests.handshakes import handshake_of

SITE = """
name = "ams1"
{place}
listen = {{ port = {site}, require_hop = true }}
engine = {{ standby = false, weights_host_gib = 0.0 }}
limits = {{ drain_timeout_s = 5.0 }}
[[models]]
name = "ember"
source = "embedded:ember"
[functions]
state_dir = "{folder}/state"
[[functions.serve]]
name = "live"
path = "{folder}/live"
layer = "{layer}"
"""
ENTRY = """
import asgi
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from workers import WorkerEntrypoint

app = FastAPI()
rooms = set()

@app.get("/")
async def index():
    return {"open": len(rooms)}

@app.websocket("/items/{item_id}")
async def items(socket: WebSocket, item_id: int, q: str = "none"):
    await socket.accept()
    rooms.add(socket)
    try:
        while True:
            text = await socket.receive_text()
            if text == "close":
                await socket.close(code=4242, reason="as asked")
                return
            await socket.send_json({"item": item_id, "q": q, "said": text})
    except WebSocketDisconnect:
        pass
    finally:
        rooms.discard(socket)

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)
"""


class Processes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(("site", "router"), free_ports(2), strict=True))
        self.url = f"http://127.0.0.1:{self.ports['router']}"
        names = {**self.ports, "place": PLACE, "folder": folder, "layer": sysconfig.get_path("purelib")}
        (folder / "live").mkdir()
        (folder / "live/entry.py").write_text(ENTRY)
        (folder / "live/wrangler.toml").write_text('name = "live"\nmain = "entry.py"\n')
        (folder / "site.toml").write_text(SITE.format(**names))
        (folder / "network.toml").write_text(NETWORK.format(**names))
        self.env = {**os.environ, "PILOTLIGHT_HOP_SECRET": "s" * 32}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        module, file = {
            "site": ("pilotlight.runtime", "site.toml"),
            "router": ("pilotlight.edge_router", "network.toml"),
        }[role]
        with (self.folder / f"{role}.log").open("ab") as log:
            command = [sys.executable, "-m", module, str(self.folder / file)]
            self.running[role] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/fn/live/", timeout=30).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    pytest.importorskip("fastapi")
    made = Processes(tmp_path)
    for role in ("site", "router"):
        made.start(role)
    try:
        ends_at = time.monotonic() + 90
        while not made.is_ready():
            assert time.monotonic() < ends_at, "the network did not become ready"
            time.sleep(0.1)
        yield made
    finally:
        for process in made.running.values():
            process.terminate()
        for process in made.running.values():
            process.wait(60)


async def end_of(socket: ClientWebSocketResponse) -> tuple[int | None, str]:
    message = await socket.receive(timeout=60)
    assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED), message
    return socket.close_code, message.extra or ""


async def frames_without_end_hold_up_nobody(processes: Processes) -> None:
    """Send empty frames of six bytes without end; other clients must still be served. (Once a router did nothing but read them.)"""
    reader, writer = await asyncio.open_connection("127.0.0.1", processes.ports["router"])
    asked = {"host": "localhost", "connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    head = "".join(f"{name}: {value}\r\n" for name, value in asked.items())
    writer.write(f"GET /fn/live/items/7 HTTP/1.1\r\n{head}sec-websocket-key: {'A' * 22}==\r\n\r\n".encode())
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\x01\x80\0\0\0\0")
    async with Neighbour(processes.url) as neighbour:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            writer.write(b"\0\x80\0\0\0\0" * 10_000)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await writer.drain()
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()
    assert max(neighbour.waits_ms, default=2000.0) < 2000.0, "other clients waited too long"


async def test_a_fastapi_socket_through_router_and_site(processes: Processes) -> None:
    live = f"{processes.url}/fn/live"
    async with aiohttp.ClientSession() as client:
        async with client.ws_connect(f"{live}/items/7?q=x") as socket:
            assert handshake_of(socket).headers["x-pilotlight-site"] == "ams1"
            for text in ("a", "ü" * 100_000):
                await socket.send_str(text)
                assert await socket.receive_json(timeout=60) == {"item": 7, "q": "x", "said": text}
            async with client.get(f"{live}/") as answer:
                assert await answer.json() == {"open": 1}
            await socket.send_str("close")
            assert await end_of(socket) == (4242, "as asked")
        with pytest.raises(WSServerHandshakeError) as refused:  # FastAPI refuses a value that is not a number
            await client.ws_connect(f"{live}/items/seven")
        assert refused.value.status == 403
        with pytest.raises(WSServerHandshakeError) as refused:
            await client.ws_connect(f"http://127.0.0.1:{processes.ports['site']}/fn/live/items/7")
        assert refused.value.status == 403  # this site accepts only routers
        if os.environ.get(SERVER_ENV, "own") == "own":
            await frames_without_end_hold_up_nobody(processes)

        socket = await client.ws_connect(f"{live}/items/1")
        processes.running["site"].send_signal(signal.SIGTERM)
        assert await end_of(socket) == (1012, "the site is restarting")
        await asyncio.to_thread(processes.running.pop("site").wait, 30)


async def test_sockets_end_with_their_router_and_with_a_killed_site(processes: Processes) -> None:
    live = f"{processes.url}/fn/live"
    async with aiohttp.ClientSession() as client:
        socket = await client.ws_connect(f"{live}/items/1")
        await socket.send_str("x")
        await socket.receive_json(timeout=60)
        killed = processes.running.pop("site")
        killed.kill()
        await asyncio.to_thread(killed.wait)
        assert await end_of(socket) == (1011, "the site ams1 was lost")
        processes.start("site")
        ends_at = time.monotonic() + 60
        while not await asyncio.to_thread(processes.is_ready):
            assert time.monotonic() < ends_at
            await asyncio.sleep(0.1)
        socket = await client.ws_connect(f"{live}/items/1")
        processes.running["router"].send_signal(signal.SIGTERM)
        assert (await end_of(socket))[0] == 1012
        await asyncio.to_thread(processes.running.pop("router").wait, 30)
