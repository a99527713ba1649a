"""What a request's Authorization header says: the one reading of it, so that a key is one tenant at routers and sites, however it is spelled.

Knows the header's form (RFC 6750); refuses to know whose a key is.
"""

import re

from wire.errors import ApiError

_BEARER = re.compile(r"bearer +([\x21-\x7e]+)", re.IGNORECASE)


def bearer_token(authorization: str | None) -> str:
    """The key; empty where the header is missing or empty. Raises ApiError for anything but `Bearer KEY`."""
    if not authorization or not authorization.strip(" \t"):
        return ""
    if (found := _BEARER.fullmatch(authorization.strip(" \t"))) is None:
        raise ApiError("unauthorized", "the Authorization header must be `Bearer KEY`, where KEY has no spaces")
    return found[1]


def bearer_token_or_none(authorization: str | None) -> str:
    """As `bearer_token`, where other schemes are somebody else's to judge, a function's: they say nothing to us."""
    try:
        return bearer_token(authorization)
    except ApiError:
        return ""
