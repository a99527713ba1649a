"""Routes of the page: `/` for browsers, files and data in `/page/`. A router or site mounts them.

Its application handles their ApiErrors.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from pilotlight.page.bodies import read_body, respond
from pilotlight.page.feed import Feed
from pilotlight.page.history import RANGES
from pilotlight.page.sessions import Sessions, Visitor
from pilotlight.page.source import FunctionsSource
from pilotlight.wire.errors import ApiError

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
GUARDS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated at each use, with 304 if unchanged
}

Timeline = Callable[[str], Awaitable[bytes]]  # site's name -> {"spans": [{name, began_s, ended_s, what}]}


class PageRoutes:
    def __init__(
        self,
        feed: Feed,
        sessions: Sessions,
        *,
        functions: FunctionsSource | None = None,
        timeline: Timeline | None = None,
        requests: Callable[[], Awaitable[bytes]] | None = None,
        has_usage: bool = False,
        has_keys: bool = False,
        has_joining: bool = False,
    ) -> None:
        """Serve the page.
        `requests` returns the newest requests as JSON. `has_usage`, `has_keys` and `has_joining` are True if GET /usage, /manage/keys and
        /manage/join exist."""
        self._timeline = timeline
        self._requests = requests
        self._has_keys = has_keys
        self._has_joining = has_joining
        self._functions = functions
        self._has_usage = has_usage
        self._index = (STATIC / "index.html").read_bytes()
        self._feed = feed
        self._sessions = sessions

    def routes(self, at: str = "") -> list[BaseRoute]:
        return [
            Route(f"{at}/", self.front),
            Route(f"{at}/page/session", self.session, methods=["GET", "POST", "DELETE"]),
            Route(f"{at}/page/feed", self.feed),
            Route(f"{at}/page/history", self.history),
            Route(f"{at}/page/timeline", self.spans),
            Route(f"{at}/page/functions", self.versions),
            Route(f"{at}/page/tail", self.tail),
            Route(f"{at}/page/logs", self.logs),
            Route(f"{at}/page/faults", self.faults),
            Route(f"{at}/page/requests", self.requests),
            Mount(f"{at}/page", _Files(directory=STATIC)),
        ]

    async def front(self, request: Request) -> Response:
        """Return the page to browsers, and a line to other programs.

        Claude Code and clients of Ollama's API check here that a server exists."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Pilotlight is running")
        return Response(self._index, headers=GUARDS, media_type="text/html")

    async def session(self, request: Request) -> Response:
        """GET returns the visitor, POST {"key": KEY} starts a session, DELETE ends it."""
        if request.method == "DELETE":
            response = respond({})
            self._sessions.close(response)
            return response
        if request.method == "GET":
            visitor = self._sessions.visitor(request)
            return respond(self._told(visitor))
        try:
            key = msgspec.json.decode(await read_body(request), type=dict[str, str]).get("key", "")
        except msgspec.MsgspecError as error:
            raise ApiError("invalid_request", f"the body has an invalid form: {error}") from None
        response = Response(media_type="application/json")
        visitor = self._sessions.open(f"Bearer {key}", response, is_secure=request.url.scheme == "https")
        response.body = msgspec.json.encode(self._told(visitor))
        response.headers["content-length"] = str(len(response.body))
        return response

    def _told(self, visitor: Visitor) -> dict[str, Any]:
        return {
            "name": visitor.name,
            "is_admin": visitor.is_admin,
            "sees_usage": self._has_usage and visitor.is_admin,
            "issues_keys": self._has_keys and visitor.is_admin,
            "adds_machines": self._has_joining and visitor.is_admin,
        }

    async def feed(self, request: Request) -> Response:
        self._sessions.visitor(request)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(request), media_type="text/event-stream", headers=headers)

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        """Yield events until the session ends or its key is revoked."""
        async for event in self._feed.events():
            try:
                self._sessions.visitor(request)
            except ApiError:
                return
            yield event

    async def history(self, request: Request) -> Response:
        self._sessions.visitor(request)
        name = request.query_params.get("range", "5m")
        if name not in RANGES:
            raise ApiError("invalid_request", f"range must be one of {', '.join(RANGES)}", param="range")
        samples = msgspec.to_builtins(self._feed.history.samples(name))
        return respond({"range": name, "step_s": RANGES[name].step, "samples": samples})

    async def spans(self, request: Request) -> Response:
        """Return the spans of a site's start and its models' wakes: `?site=`."""
        self._sessions.visitor(request)
        if self._timeline is None:
            raise ApiError("not_found", "this process has no timelines")
        found = await self._timeline(request.query_params.get("site", ""))
        return Response(found, headers={"cache-control": "no-store"}, media_type="application/json")

    async def versions(self, request: Request) -> Response:
        """Return the deployed functions with their versions and traffic shares."""
        is_admin = self._sessions.visitor(request).is_admin
        found = b"[]" if self._functions is None else self._functions.versions(is_admin=is_admin)
        return Response(found, headers={"cache-control": "no-store"}, media_type="application/json")

    async def tail(self, request: Request) -> Response:
        """Stream a function's output: `?name=`. For operators, because it may be private."""
        self._sessions.actor(request)
        if self._functions is None:
            raise ApiError("not_found", "this process has no functions to follow")
        events = self._functions.lines(request.query_params.get("name", ""))
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def logs(self, request: Request) -> Response:
        """Return a function's stored invocations: `?name=`, `grep`, `status`, `since_s`, `limit`.
        For operators, because they may be private."""
        self._sessions.visitor(request, "admin")
        if self._functions is None:
            raise ApiError("not_found", "this process has no functions")
        asked = QueryParams([pair for pair in request.query_params.multi_items() if pair[0] != "name"])
        found = await self._functions.invocations(request.query_params.get("name", ""), asked)
        return Response(found, headers={"cache-control": "no-store"}, media_type="application/json")

    async def faults(self, request: Request) -> Response:
        """Return the faults of sites in the last day, the newest first."""
        self._sessions.visitor(request)
        return respond({"faults": self._feed.newest_faults()})

    async def requests(self, request: Request) -> Response:
        """Return the newest requests, oldest first. For operators, because they name accounts."""
        self._sessions.visitor(request, "admin")
        found = b'{"requests":[]}' if self._requests is None else await self._requests()
        return Response(found, headers={"cache-control": "no-store"}, media_type="application/json")


class _Files(StaticFiles):
    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers.update(GUARDS)
        return response
