"""Responses over WebSockets at a router: keys, a site that is lost before its answer, other WebSockets, and the router's end."""

import hashlib
import json
from typing import Any

import pytest
from aiohttp import WSServerHandshakeError

from tests.edge_router.fakes import reset_before_first_byte, routed_sites
from tests.edge_router.test_kept_responses import answered

pytestmark = pytest.mark.process

PATH = "/v1/responses"
KEYS = {
    "door": {"require_key": True},
    "keys": [{"name": "alice", "key_sha256": hashlib.sha256(b"alice").hexdigest()}],
}


async def ask(socket: Any, **fields: Any) -> dict[str, Any]:
    """Return the last event of a response."""
    await socket.send_json({"type": "response.create", "model": "ember", **fields})
    while (event := await socket.receive_json(timeout=60))["type"] not in ("response.completed", "error"):
        continue
    return dict(event)


async def test_a_key_is_checked_at_the_handshake_and_each_request_is_one_of_its_account() -> None:
    async with routed_sites("ams1", tables=KEYS) as (fakes, running):
        fakes[0].behave = answered
        for headers in ({}, {"authorization": "Bearer nobody"}):
            with pytest.raises(WSServerHandshakeError) as refused:
                await running.http.ws_connect(running.url + PATH, headers=headers)
            assert refused.value.status == 401
        async with running.http.ws_connect(running.url + PATH, headers={"authorization": "Bearer alice"}) as socket:
            first = await ask(socket, input="One")
            second = await ask(socket, input="Two", previous_response_id=first["response"]["id"])
        assert second["response"]["store"]
        assert [item["type"] for item in json.loads(fakes[0].bodies[-1])["input"]] == ["message"] * 3
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="ok") == 2


async def test_a_lost_site_costs_no_answer() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave, fakes[1].behave = reset_before_first_byte, answered
        async with running.http.ws_connect(running.url + PATH) as socket:
            assert (await ask(socket, input="One"))["type"] == "response.completed"


async def test_other_paths_have_no_such_websocket() -> None:
    async with routed_sites("ams1") as (_, running):
        for path in ("/v1/chat/completions", "/v1/responses/resp_1", "/v1/responses/input_tokens"):
            with pytest.raises(WSServerHandshakeError) as refused:
                await running.http.ws_connect(running.url + path)
            assert refused.value.status == 400
