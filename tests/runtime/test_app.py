"""The paths and methods that a site answers under any ASGI server, and the refusal of others."""

import asyncio

import pytest
from starlette.types import Message

from pilotlight.sites.key_files import new_key
from tests.asgi import Exchange, call
from tests.runtime.conftest import Site, SiteMaker


@pytest.mark.parametrize("path", ["/v1/models/@test/tiny", "/ai/v1/models/@test/tiny"])
async def test_a_models_name_may_have_slashes(site: Site, path: str) -> None:
    assert (await call(site.app, path)).json["id"] == "tiny"


@pytest.mark.parametrize("path", ["/client/v4/accounts/me/ai/run/@test/tiny", "/fn/@test/tiny"])
async def test_a_models_path_names_it(site: Site, path: str) -> None:
    answer = await call(site.app, path, {"prompt": "Once", "raw": True})
    assert answer.status == 200, answer.body


async def test_a_key_sees_the_models_of_its_account(make_site: SiteMaker) -> None:
    made = [new_key(name, account=name) for name in ("some", "none")]
    keys = [{"name": key.name, "key_sha256": key.key_sha256, "account": key.name} for _, key in made]
    accounts = [{"name": "some", "models": ["@test/*"]}, {"name": "none", "models": ["x"]}]
    async with make_site(keys=keys, accounts=accounts, door={"require_key": True}) as site:
        for (key, _), listed, statuses in zip(made, (["tiny"], []), ([200, 200, 200], [404, 404, 400]), strict=True):
            headers = {"authorization": f"Bearer {key}"}
            for path, field in (("/v1/models", "data"), ("/client/v4/accounts/me/ai/models/search", "result")):
                assert [model["id"] for model in (await call(site.app, path, **headers)).json[field]] == listed
            cards = (await call(site.app, "/v1/models", **headers, **{"anthropic-version": "2023-06-01"})).json["data"]
            assert [card["id"] for card in cards] == listed
            paths = ("/v1/models/tiny", "/v1/models/@test/tiny", "/client/v4/accounts/me/ai/models/schema?model=tiny")
            assert [(await call(site.app, path, **headers)).status for path in paths] == statuses


async def test_a_method_is_refused_with_those_that_the_path_takes(site: Site) -> None:
    refused = await call(site.app, "/v1/models", method="PUT")
    assert (refused.status, refused.json["error"]["code"]) == (405, "method_not_allowed")
    assert refused.json["error"]["message"] == "PUT is not allowed on /v1/models; allowed: GET, HEAD"
    assert [(await call(site.app, "/v1/models", method=method)).status for method in ("GET", "HEAD")] == [200, 200]
    native = await call(site.app, "/client/v4/accounts/me/ai/run/tiny")
    assert (native.status, native.json["errors"][0]["code"]) == (405, 5005)


@pytest.mark.parametrize("prefix", ["/v1", "/ai/v1", "/client/v4/accounts/me/ai/v1"])
async def test_a_slash_at_the_end_of_an_apis_path_changes_nothing(site: Site, prefix: str) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    assert (await call(site.app, f"{prefix}/chat/completions/", chat)).status == 200
    assert (await call(site.app, f"{prefix}/responses/", {"model": "tiny", "input": "Hi"})).status == 200
    assert (await call(site.app, f"{prefix}/models/")).json == (await call(site.app, f"{prefix}/models")).json


@pytest.mark.parametrize("path", ["/v1/models/nope", "/v1/complete", "/v1/messages/batches", "/nothing"])
async def test_errors_have_anthropics_shape_for_clients_that_name_its_version(site: Site, path: str) -> None:
    told = await call(site.app, path, **{"anthropic-version": "2023-06-01"})
    assert (told.status, told.json["type"], told.json["error"]["type"]) == (404, "error", "not_found_error")
    chat = await call(site.app, "/v1/chat/completions", {}, **{"anthropic-version": "2023-06-01"})
    assert (chat.status, "type" in chat.json) == (400, False)


async def test_whether_anything_is_here_may_be_asked(site: Site) -> None:
    assert (await call(site.app, "/", method="HEAD")).status == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/chat/", "/livez/", "/fn", "/fn/none", "//v1/models", "/größe"])
async def test_a_path_that_leads_nowhere_is_refused_and_never_redirected(site: Site, path: str) -> None:
    missing = await call(site.app, path)
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    assert f"there is nothing at {'/v1/chat' if path == '/v1/chat/' else path}:" in missing.json["error"]["message"]


async def test_a_socket_is_closed_where_none_is_taken(site: Site) -> None:
    exchange = Exchange(site.app, "GET", "/v1/models", b"", {})
    await exchange.done()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {**exchange.scope, "type": "websocket", "scheme": "ws", "subprotocols": []}
    await site.app(scope, asyncio.Queue[Message]().get, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
