"""The options of `asgi.fetch` and `wsgi.fetch`, with the platform's names."""

from dataclasses import dataclass
from typing import Literal, get_args

EncodeBody = Literal["automatic", "manual"]


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """`encode_body` is checked but has no effect.
    Bodies are sent unchanged, in the coding that their headers name."""

    encode_body: EncodeBody = "automatic"

    def __post_init__(self) -> None:
        if self.encode_body not in get_args(EncodeBody):
            raise ValueError(f"encode_body is one of {', '.join(get_args(EncodeBody))}, and not {self.encode_body!r}")
