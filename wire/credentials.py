"""What a request's Authorization header says: the one reading of it, so that a key is one tenant at routers and sites, however it is spelled.

Knows the header's form (RFC 6750) and which keys are known; refuses to know what their holders may have.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import NamedTuple

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


class Key(NamedTuple):
    name: str
    sha256: str
    is_admin: bool


class Access:
    """Whose keys are known. SHA-256 without salt or repetition suffices: a key of `pilotlight keys create` is 256 random bits, which nobody guesses
    from a digest, and a hash made slow for people's passwords would cost every request what it costs an attacker."""

    def __init__(self, keys: Iterable[Key], *, is_required: bool) -> None:
        self.is_required = is_required
        self._keys = tuple(keys)

    def become(self, other: "Access") -> None:
        """From now on the same keys are known as there."""
        self.is_required, self._keys = other.is_required, other._keys

    def check_client(self, authorization: str | None) -> None:
        """Raises ApiError where a key is required and this is none of ours."""
        if self.is_required:
            self._key(authorization)

    def check_admin(self, authorization: str | None) -> None:
        """Raises ApiError for whoever is not known as an operator."""
        if not self._key(authorization).is_admin:
            raise ApiError("forbidden", "this needs an admin key: `pilotlight keys create --admin` makes one")

    def _key(self, authorization: str | None) -> Key:
        token = bearer_token(authorization)
        if not token:
            raise ApiError("unauthorized", "this needs a key: send it as `Authorization: Bearer KEY`")
        digest = hashlib.sha256(token.encode()).hexdigest()
        found = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]  # all, whichever fits
        if not found:
            raise ApiError("unauthorized", "this key is not known here")
        return found[0]
