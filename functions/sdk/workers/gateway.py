"""The parts that `asgi.fetch` and `wsgi.fetch` share.

These are their options, with the platform's names, and the prefix below which a request came.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from workers.http.request import Request

EncodeBody = Literal["automatic", "manual"]


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """`encode_body` is checked but has no effect.
    Bodies are sent unchanged, in the coding that their headers name."""

    encode_body: EncodeBody = "automatic"

    def __post_init__(self) -> None:
        if self.encode_body not in get_args(EncodeBody):
            raise ValueError(f"encode_body is one of {', '.join(get_args(EncodeBody))}, and not {self.encode_body!r}")


def prefix_of(request: Request) -> str:
    """Return the path below which a shared host serves the function, such as /fn/NAME.
    At the function's own host it is empty."""
    return str(request.headers.get("x-pilotlight-prefix", ""))
