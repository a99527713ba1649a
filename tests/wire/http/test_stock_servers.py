"""The same application under each supported ASGI server."""

from typing import Any

import aiohttp
import pytest

from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.listen import ListenError, bind, url_of
from pilotlight.wire.http.stock_servers import SERVERS, check_installed, make_server
from tests.wire.http.test_websocket import App as SocketApp


async def echo(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        return await SocketApp()(scope, receive, send)
    assert scope["type"] == "http", "the application is not started a second time"
    message = await receive()
    parts = [message["body"]]
    while message["more_body"]:
        message = await receive()
        parts.append(message["body"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["raw_path"])]})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.process
@pytest.mark.parametrize("name", SERVERS)
async def test_requests_and_websockets_are_served_until_the_stop(name: str) -> None:
    if name != "own":
        pytest.importorskip(name)
    listener = bind("127.0.0.1", 0)
    url = url_of(listener)
    server = make_server(name, echo, HttpLimits())
    await server.start(listener)
    async with aiohttp.ClientSession() as client:
        for size in (0, 10, 300_000):
            async with client.post(f"{url}/a%20b?c=d", data=b"x" * size) as answer:
                assert await answer.read() == b"x" * size
                assert answer.headers["x-path"] == "/a%20b"
        async with client.ws_connect(f"{url}/chat", protocols=("a", "b")) as socket:
            assert socket.protocol == "b"
            await socket.send_str("ü")
            assert await socket.receive_str(timeout=60) == "ü"
    await server.stop(0.2)
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(url)


def test_a_server_that_there_is_not_is_refused_with_a_sentence() -> None:
    with pytest.raises(ListenError, match="choose one of own, hypercorn"):
        check_installed("apache")
    with pytest.raises(ListenError, match="pip install hypercorn"):
        check_installed("hypercorn", lambda name: None)
    check_installed("own")
