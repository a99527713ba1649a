"""The index of routes finds for each request the route that Starlette's own search finds."""

from itertools import product

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Match, Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import Scope
from starlette.websockets import WebSocket

from pilotlight.wire.http.route_index import RouteIndex

PATHS = (
    "/",
    "/v1",
    "/v1/chat",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{id:path}",
    "/v1/{anything}",
    "/{account}/v1/models",
    "/client/v4/accounts/{account}/ai/v1/models",
    "/client/v4/{rest:path}",
    "/fn/{name}{path:path}",
    "/fn-{name}",
    "/{last:path}",
)
ASKED = [path.replace("{", "").replace("}", "").replace(":path", "") for path in PATHS] + [
    "",
    "/v1/",
    "/v1//",
    "//v1/models",
    "/v1/chat/completions/",
    "/v1/models/a/b",
    "/client",
    "/client/v4",
    "/client/v4/",
    "/fn/",
    "/fn/plain/deep/er",
    "/mounted/x/y",
    "/mounted",
    "/v2/chat",
]


async def answer(request: Request) -> PlainTextResponse:
    route = request.scope["route"]
    return PlainTextResponse(f"{route.path} {sorted(route.methods)} {request.path_params}")


async def greet(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(socket.scope["route"].path)
    await socket.close()


def routes(paths: tuple[str, ...]) -> list[BaseRoute]:
    """Return routes of which some accept other methods, and whose end answers everything."""
    made: list[BaseRoute] = [
        Route(path, answer, methods=["POST"] if number % 3 == 0 else ["GET", "DELETE"])
        for number, path in enumerate(paths)
    ]
    return [*made, Mount("/mounted", routes=[Route("/{deep:path}", answer)]), WebSocketRoute("/fn/{path:path}", greet)]


@pytest.mark.parametrize("paths", [PATHS, PATHS[:-1], PATHS[::-1], PATHS[3:6]], ids=["all", "no rest", "turned", "few"])
def test_the_route_is_the_one_that_starlette_finds(paths: tuple[str, ...]) -> None:
    plain, indexed = (TestClient(Starlette(routes=given)) for given in (routes(paths), [RouteIndex(routes(paths))]))
    for method, path in product(("GET", "POST", "PUT"), ASKED):
        one, other = (
            client.request(method, f"http://host{path}", follow_redirects=False) for client in (plain, indexed)
        )
        assert (one.status_code, one.text) == (other.status_code, other.text), (method, path)


def test_a_websocket_finds_its_route() -> None:
    with TestClient(Starlette(routes=[RouteIndex(routes(PATHS))])).websocket_connect("/fn/plain/room") as socket:
        assert socket.receive_text() == "/fn/{path:path}"


def test_routes_that_start_otherwise_are_not_tried() -> None:
    tried: list[str] = []

    class Noted(Route):
        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            tried.append(self.path)
            return super().matches(scope)

    index = RouteIndex([Noted(path, answer) for path in PATHS[:-1]])
    index.matches({"type": "http", "path": "/v1/models", "method": "PUT", "headers": []})
    assert tried == [
        "/v1",
        "/v1/models",
        "/v1/models/{id:path}",
        "/v1/{anything}",
        "/{account}/v1/models",
        "/fn-{name}",
    ]
