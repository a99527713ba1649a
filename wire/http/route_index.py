"""An index of routes by the start of their paths.

Starlette tries one route after the other, in 1 to 2 us each, and a site has a hundred.
"""

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

_SEGMENTS = 2  # of a path, which the index knows


class RouteIndex(BaseRoute):
    """Routes, of which the first that matches a request answers it."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        """Index routes, each of which has a path."""
        self.routes = list(routes)
        starts = [_start(route.path) for route in routes]  # type: ignore[attr-defined]
        self._fitting: dict[tuple[str, ...], list[BaseRoute]] = {
            key: [route for route, start in zip(routes, starts, strict=True) if start == key[: len(start)]]
            for key in {(), *(start[:length] for start in starts for length in range(1, _SEGMENTS + 1))}
        }

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "lifespan":
            return Match.NONE, {}
        found: tuple[Match, Scope] = Match.NONE, {}
        for route in self._near(scope["path"]):
            match, child = route.matches(scope)
            if match is Match.FULL:
                return match, {**child, "route": route}
            if match is Match.PARTIAL and found[0] is Match.NONE:  # another method's
                found = match, {**child, "route": route}
        return found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].handle(scope, receive, send)

    def _near(self, path: str) -> Sequence[BaseRoute]:
        """Return the routes whose paths may start as `path` does, in their order."""
        key = tuple(path.split("/", _SEGMENTS + 1)[1 : _SEGMENTS + 1])
        return next(self._fitting[key[:length]] for length in range(len(key), -1, -1) if key[:length] in self._fitting)


def _start(path: str) -> tuple[str, ...]:
    """Return the first segments of a route's path, up to one with a parameter."""
    segments = path.split("/", _SEGMENTS + 1)[1 : _SEGMENTS + 1]
    literal = next((i for i, segment in enumerate(segments) if "{" in segment), len(segments))
    return tuple(segments[:literal])
