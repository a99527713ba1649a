"""Bodies of the page's own requests, and of the responses to them."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pilotlight.wire.errors import ApiError

MAX_BODY = 4096


async def read_body(request: Request) -> bytes:
    """Return a small JSON body.
    Raises ApiError if it is large, or has another content type, which a form on another origin's page could send."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError("invalid_request", "the body must be application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise ApiError("body_too_large", f"the body is larger than {MAX_BODY} bytes")
    return bytes(body)


def respond(fields: object, status: int = 200) -> Response:
    """Return a JSON response that must not be cached."""
    return Response(msgspec.json.encode(fields), status, {"cache-control": "no-store"}, "application/json")
