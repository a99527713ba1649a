"""Which path leads where, beside Starlette's router on the same patterns; and an application's life."""

import asyncio
import random

import pytest
from starlette.routing import Match
from starlette.routing import Route as TheirRoute
from starlette.types import Message, Receive, Scope, Send

from runtime.middleware.errors import Errors
from runtime.routing import Route, Router, any_method, get, post, socket
from tests.asgi import call

PATTERNS = (
    "/livez",
    "/v1/models",
    "/v1/models/{id:path}",
    "/client/v4/accounts/{account_id}/ai/run/{model:path}",
    "/fn/@{model:path}",
    "/fn/{name}",
    "/fn/{name}/{path:path}",
    "/{path:path}",
)
PIECES = (
    "livez",
    "v1",
    "models",
    "client",
    "v4",
    "accounts",
    "ai",
    "run",
    "fn",
    "@",
    "{name}",
    "",
    "a b",
    "größe",
    "%",
)


def named(path: str, *, methods: str | None = None) -> Route:
    """Answers with its pattern and what the path named."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        body = repr((path, scope["path_params"])).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return {"get": get, "post": post, None: any_method}[methods](path, endpoint)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_path_names_what_starlette_would_find_in_it(pattern: str) -> None:
    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    dice = random.Random(3)
    theirs, ours = TheirRoute(pattern, Endpoint()), any_method(pattern, endpoint)
    made = ["/" + "/".join(dice.choices(PIECES, k=dice.randrange(8))) for _ in range(3000)]
    told = [pattern.replace("{", "").replace("}", "").replace(":path", ""), pattern, "", "/", pattern + "/"]
    matched = 0
    for path in made + told:
        match, scope = theirs.matches({"type": "http", "method": "GET", "path": path, "root_path": ""})
        expected = None if match is Match.NONE else scope["path_params"]
        assert ours.params(path) == expected, path
        matched += expected is not None
    assert matched


class Endpoint:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


async def test_the_first_route_that_fits_has_the_request() -> None:
    router = Router([named("/fn/@{model:path}"), named("/fn/{name}"), named("/fn/{name}/{path:path}")])
    for path, expected in (
        ("/fn/@org/model", ("/fn/@{model:path}", {"model": "org/model"})),
        ("/fn/digest", ("/fn/{name}", {"name": "digest"})),
        ("/fn/digest/", ("/fn/{name}/{path:path}", {"name": "digest", "path": ""})),
        ("/fn/digest/a/b", ("/fn/{name}/{path:path}", {"name": "digest", "path": "a/b"})),
    ):
        assert (await call(router, path)).body.decode() == repr(expected)


async def test_a_method_is_refused_with_all_that_the_path_takes() -> None:
    app = Errors(Router([named("/a", methods="post"), named("/a", methods="get"), named("/b", methods="get")]))
    refused = await call(app, "/a", method="PUT")
    assert (refused.status, refused.json["error"]["code"]) == (405, "method_not_allowed")
    assert refused.json["error"]["message"] == "PUT is not allowed on /a; allowed: GET, HEAD, POST"
    assert [(await call(app, "/a", method=method)).status for method in ("GET", "HEAD", "POST")] == [200] * 3
    missing = await call(app, "/c")
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")


async def test_a_socket_finds_sockets_alone_and_is_closed_where_there_is_none() -> None:
    taken: list[str] = []

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        taken.append(scope["path_params"]["name"])

    router = Router([named("/fn/{name}"), socket("/fn/{name}", endpoint)])
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    for path in ("/fn/room", "/elsewhere"):
        await router({"type": "websocket", "path": path}, asyncio.Queue[Message]().get, send)
    assert taken == ["room"]
    assert [message["type"] for message in sent] == ["websocket.close"]
