"""Answers to every failure of a route, in the dialect of its path; an unforeseen one is also logged with its traceback."""

import logging
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from runtime.connection import AnswerCut, answering, send_error
from wire.errors import ApiError, dialect_of

BEGINNINGS = ("http.response.start", "websocket.accept", "websocket.http.response.start")

log = logging.getLogger("pilotlight.http")


class ErrorMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watching(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] in BEGINNINGS
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except (ClientDisconnect, AnswerCut):
            return
        except ApiError as error:
            if is_started:
                raise
            await send_error(answering(scope, send), error, dialect_of(scope["path"]))
        except Exception:
            if is_started:
                raise
            log.exception(
                "%s %s (request %s)",
                scope.get("method", "WebSocket"),
                scope["path"],
                scope.get("pilotlight.request_id"),
            )
            failure = ApiError("internal_error", "something went wrong inside this site; its log has the details")
            await send_error(answering(scope, send), failure, dialect_of(scope["path"]))


async def _no_path(request: Request, error: Exception) -> NoReturn:
    path = request.scope["path"]
    raise ApiError("not_found", f"there is nothing at {path}; the API is under /ai/v1, /v1, /client/v4 and /fn")


async def _no_method(request: Request, error: Exception) -> NoReturn:
    assert isinstance(error, HTTPException)
    allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
    raise ApiError(
        "method_not_allowed", f"{request.method} is not allowed on {request.scope['path']}; allowed: {allowed}"
    )


UNROUTED: dict[int, ExceptionHandler] = {404: _no_path, 405: _no_method}  # of an application behind this layer
