"""Functions that use models of other sites, through the network's router."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pilotlight.functions.bindings.usage import FunctionUsage
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.network_inference import NetworkInference
from pilotlight.functions.router_client import RouterClient
from pilotlight.runtime.generation.inference import SiteInference
from pilotlight.wire.hop.headers import ACCOUNT, FOR_ROUTERS, HOP, REQUEST_ID, Hop, signed_body
from pilotlight.wire.hop.usage_records import UsageAsked
from tests.asgi import eventually
from tests.functions.bindings.conftest import Wire, wire  # noqa: F401
from tests.runtime.conftest import Site, site  # noqa: F401

pytestmark = pytest.mark.process

LIMITED: set[str] = set()  # functions whose account has limits
MODEL, ASKED = "@far/Größe 1%", {"prompt": "Hi"}
CHUNKS = [b'data: {"response":"a"}\n\n', b'data: {"resp', b'onse":"b"}\n\ndata: [DONE]\n\n']


class Router:
    """A router that relays to another site, played by the test."""

    def __init__(self) -> None:
        self.seen: list[tuple[web.Request, bytes]] = []
        self.status, self.told = 200, '{"result": {"response": "from afar"}, "success": true}'
        self.is_left = False
        self.chunks: list[bytes] | None = None
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request, await request.read()))
        if self.chunks is None:
            return web.Response(status=self.status, text=self.told, content_type="application/json")
        stream = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        try:
            for chunk in self.chunks:
                await stream.write(chunk)
            await stream.write_eof()
        except ConnectionError:
            self.is_left = True
        return stream


@pytest.fixture
async def far() -> AsyncIterator[Router]:
    made = Router()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def ai(far: Router, site: Site, wire: Wire, tmp_path: Path) -> AsyncIterator[Any]:  # noqa: F811
    client = RouterClient(far.url, "secret")
    usage = FunctionUsage(
        tmp_path / "usage",
        "ams1",
        lambda function: "acme" if function == "hello" else "",
        is_limited=LIMITED.__contains__,
    )
    usage.hand_out(UsageAsked("ledger", ()))
    inference = NetworkInference(SiteInference(site.app.site), client)
    made = await wire(("ai", "AI", {}), inference=inference, usage=usage, function="hello")
    yield made.env["AI"]
    assert usage.hand_out(UsageAsked("ledger", ())).records == (), "what the router counts is not counted here"
    usage.close()
    await client.close()


async def test_a_model_that_is_not_here_is_asked_of_the_router_in_the_name_of_the_functions_account(
    ai: Any, far: Router
) -> None:
    assert (await ai.run(MODEL, ASKED)).response == "from afar"
    request, body = far.seen[0]
    assert request.path == f"/client/v4/accounts/function-hello/ai/run/{MODEL}"
    assert request.headers[ACCOUNT] == "acme"
    hop = Hop("POST", request.path, request.headers[REQUEST_ID], FOR_ROUTERS)
    assert signed_body(request.headers[HOP], "secret", time.time(), hop) is not None
    assert body == b'{"prompt":"Hi"}'


async def test_a_limited_accounts_calls_to_a_model_that_is_here_go_through_the_router(ai: Any, far: Router) -> None:
    LIMITED.add("hello")
    try:
        assert (await ai.run("tiny", ASKED)).response == "from afar"
    finally:
        LIMITED.clear()
    assert far.seen[0][0].headers[ACCOUNT] == "acme"


async def test_a_stream_from_afar_is_a_stream_here(ai: Any, far: Router) -> None:
    far.chunks = CHUNKS
    assert (await (await ai.run(MODEL, {**ASKED, "stream": True})).text()).encode() == b"".join(CHUNKS)


async def test_a_function_that_leaves_a_stream_ends_it(ai: Any, far: Router) -> None:
    far.chunks = [CHUNKS[0], *[b"data: " + b"x" * 65536 + b"\n\n"] * 4000]
    stream = await ai.run(MODEL, {**ASKED, "stream": True})
    await anext(aiter(stream))
    await stream.cancel()
    await eventually(lambda: far.is_left)


async def test_a_refusal_from_afar_is_the_functions_error(ai: Any, far: Router) -> None:
    far.status, far.told = 400, '{"errors": [{"code": 5007, "message": "no model is named so"}], "success": false}'
    with pytest.raises(
        Failure, match=r"5007: no model is named so; it has tiny; models.aliases of a site.s file, ai.aliases"
    ):
        await ai.run(MODEL, ASKED)


async def test_a_router_that_is_away_or_talks_nonsense_is_named(site: Site, far: Router) -> None:  # noqa: F811
    far.told = "no JSON"
    for url, why in ((far.url, "JSON is malformed"), ("http://127.0.0.1:1", "Cannot connect")):
        client = RouterClient(url, "")
        answer = await NetworkInference(SiteInference(site.app.site), client).run("function-hello", "m", b"{}", {})
        assert answer.status == 503
        message = json.loads(answer.body)["errors"][0]["message"]
        assert message.startswith(f"this site has no model named 'm', and {url} could not be reached: ")
        assert why in message
        await client.close()
