"""Routes by which other sites have their prompts computed here (wire/hop/lending.py).

Every request must be signed with the network's secret."""

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pilotlight.runtime.api.connection import AnswerCut, json_response, read_json
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.dispatch.lending import Lending
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.lending import (
    LENDING_PATH,
    PROBE_BYTES,
    PROBE_PATH,
    PROMPT_PATH,
    BorrowedPrompt,
    PromptAccepted,
    PromptComputed,
    encode_line,
)
from pilotlight.wire.http.asgi import response_start, until_disconnect

MAX_BODY = 32 << 20  # in bytes: about four million tokens; the engine checks the model's own limit
MAX_SALT = 64
_HAND_OVER = re.compile(r"[0-9a-f]{32}")
_PROBE = bytes(PROBE_BYTES)


class LendingRoutes:
    def __init__(self, lending: Lending, first_port: int) -> None:
        """Serve prompts of other sites.

        `first_port` is the port where the site's first host serves blocks to them; the next hosts use the next ports."""
        self._lending = lending
        self._first_port = first_port

    def routes(self) -> list[Route]:
        return [
            Route(LENDING_PATH, self.lendable),
            Route(PROBE_PATH, self.probe),
            Route(PROMPT_PATH, _PromptRoute(self._lending, self._first_port), methods=["POST"]),
        ]

    async def lendable(self, request: Request) -> Response:
        _check(request.scope)
        return json_response(msgspec.json.encode(self._lending.lendable()))

    async def probe(self, request: Request) -> Response:
        _check(request.scope)
        return Response(_PROBE, media_type="application/octet-stream")


class _PromptRoute:
    def __init__(self, lending: Lending, first_port: int) -> None:
        self._lending = lending
        self._first_port = first_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check(scope)
        prompt = await read_json(Request(scope, receive), BorrowedPrompt, MAX_BODY, "the body must be a prompt")
        if not _HAND_OVER.fullmatch(prompt.hand_over) or len(prompt.salt) > MAX_SALT:
            raise ApiError("invalid_request", "hand_over must be 32 hexadecimal digits, and salt at most 64 bytes")
        await until_disconnect(receive, self._compute(prompt, send))

    async def _compute(self, prompt: BorrowedPrompt, send: Send) -> None:
        num_cached, device_us, has_started = 0, 0, False
        try:
            async with self._lending.lend(prompt) as lent:
                has_started = True
                await send(response_start(200, [("content-type", "application/x-ndjson")]))
                await _send_line(send, PromptAccepted(self._first_port + lent.host))
                async for output in lent.outputs:
                    num_cached = num_cached if output.num_cached_tokens is None else output.num_cached_tokens
                    device_us += output.device_us
        except ApiError:
            if has_started:
                raise AnswerCut from None  # the borrower computes the missing blocks itself
            raise
        await _send_line(send, PromptComputed(num_cached, device_us), is_last=True)


async def _send_line(send: Send, line: msgspec.Struct, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": encode_line(line), "more_body": not is_last})


def _check(scope: Scope) -> None:
    if not scope.get(GENUINE_HOP, False):
        raise ApiError("forbidden", "only sites of this network, which share its secret, may borrow from this one")
