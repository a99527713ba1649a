"""Responses over WebSockets around any application, also one that breaks off."""

import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from pilotlight.response_store.sockets import ResponseSockets
from pilotlight.wire.http.asgi import response_start
from tests.asgi import eventually

SCOPE: Scope = {
    "type": "websocket", "path": "/v1/responses", "query_string": b"", "scheme": "ws", "headers": [], "subprotocols": [],
}  # fmt: skip
CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'


@pytest.mark.parametrize("sent", [None, b"", CREATED])
async def test_a_client_learns_that_a_response_broke_off(sent: bytes | None) -> None:
    told: list[Any] = []
    messages = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": '{"type":"response.create","model":"m","input":"Hi"}'},
    ]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if sent is not None:
            await send(response_start(200, [("content-type", "text/event-stream")]))
            await send({"type": "http.response.body", "body": sent, "more_body": True})

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await eventually(lambda: told and told[-1]["type"] == "error")
        return {"type": "websocket.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            told.append(json.loads(message["text"]))

    await ResponseSockets(app)(SCOPE, receive, send)
    assert (told[-1]["status"], told[-1]["error"]["code"]) == (502, "upstream_lost")
