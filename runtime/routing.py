"""Which path leads where: routes of ASGI applications, the router that finds them, and the whole application with its life.

An endpoint is called with (scope, receive, send), like every layer; `scope["path_params"]` has what its path names. Starlette does the same and more,
and takes 20 ms to import: form parsers, mail headers, threads. What nothing leads to is an ApiError; how that is written is middleware/errors.py's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from wire.errors import ApiError

Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]


class Part(NamedTuple):
    """Of a pattern: its characters as they are, and the parameter behind them."""

    literal: str
    name: str = ""  # none, at the end of a pattern
    takes_rest: bool = False  # of the path, slashes and all; else it ends before the next one


class Route(NamedTuple):
    pattern: tuple[Part, ...]
    app: ASGIApp
    methods: frozenset[str] | None  # None: every one
    kind: Literal["http", "websocket"] = "http"

    def params(self, path: str) -> dict[str, str] | None:
        """None: it is not this route's path."""
        params: dict[str, str] = {}
        at = 0
        for part in self.pattern:
            if not path.startswith(part.literal, at):
                return None
            at += len(part.literal)
            if part.name:
                slash = -1 if part.takes_rest else path.find("/", at)
                end = slash if slash >= 0 else len(path)
                if end == at and not part.takes_rest:
                    return None
                params[part.name] = path[at:end]
                at = end
        return params if at == len(path) else None


def get(path: str, app: ASGIApp) -> Route:
    return Route(_pattern(path), app, frozenset({"GET", "HEAD"}))


def post(path: str, app: ASGIApp) -> Route:
    return Route(_pattern(path), app, frozenset({"POST"}))


def any_method(path: str, app: ASGIApp) -> Route:
    return Route(_pattern(path), app, None)


def socket(path: str, app: ASGIApp) -> Route:
    return Route(_pattern(path), app, None, "websocket")


def _pattern(path: str) -> tuple[Part, ...]:
    """`{name}` stands for one segment, or what is left of one; `{name:path}`, at the end, for all that is left."""
    parts: list[Part] = []
    literal, brace, rest = path.partition("{")
    while brace:
        named, _, rest = rest.partition("}")
        name, _, kind = named.partition(":")
        parts.append(Part(literal, name, kind == "path"))
        literal, brace, rest = rest.partition("{")
    return (*parts, Part(literal))


class Router:
    """The first route that fits has the request."""

    def __init__(self, routes: Sequence[Route], lifespan: Lifespan | None = None) -> None:
        self.routes = list(routes)
        self.lifespan_context: Lifespan = lifespan or (lambda app: nullcontext())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed: set[str] = set()
        for route in self.routes:
            if route.kind != scope["type"] or (params := route.params(scope["path"])) is None:
                continue
            if route.methods is None or scope["method"] in route.methods:
                scope["path_params"] = {**scope.get("path_params", {}), **params}
                return await route.app(scope, receive, send)
            allowed |= route.methods
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1000, "reason": ""})  # before it is accepted: a 403
        raise _refusal(scope, allowed)


def _refusal(scope: Scope, allowed: set[str]) -> ApiError:
    method, path = scope["method"], scope["path"]
    if allowed:
        sentence = f"{method} is not allowed on {path}; allowed: {', '.join(sorted(allowed))}"
        return ApiError("method_not_allowed", sentence)
    return ApiError("not_found", f"there is nothing at {path}; the API is under /ai/v1, /v1, /client/v4 and /fn")


class Application:
    """What a server is given; whoever starts that enters `router.lifespan_context` before. `state` holds the parts that others look for."""

    def __init__(self, router: Router, app: ASGIApp) -> None:
        """`app` is the router behind its layers."""
        self.router = router
        self.state: Any = SimpleNamespace()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
