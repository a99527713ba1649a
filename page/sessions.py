"""Sessions of the page: a signed cookie, which scripts cannot read, replaces the key.

A visitor types a key once. The cookie contains the key's name and is valid for a day at most. A session ends when its key is removed from the
configuration, revoked or expired. Reading needs the scope `metrics`: customers, whose keys only have `models`, do not see the network.
"""

import hashlib
import hmac
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pilotlight.wire.credentials import Access, Key
from pilotlight.wire.errors import ApiError

COOKIE = "pilotlight_page"
VIEW = "metrics"  # scope that reading needs
LIFETIME_S = 12 * 3600


class Visitor(NamedTuple):
    name: str
    is_admin: bool


OPERATOR = Visitor("this machine", True)  # the visitor if no key is required: on loopback, or as configured


class Sessions:
    def __init__(self, access: Access, secret: str, clock: Callable[[], float] = time.time) -> None:
        """Sign cookies with a key derived from `secret`.

        `secret` is the network's, so that all its routers accept the cookie; empty for a random key of this process. While the network has two
        secrets the first one signs, and cookies of both are accepted.
        """
        self._access = access
        given = [each.encode() for each in secret.split(",")] if secret else [os.urandom(32)]
        self._secrets = [hmac.digest(each, b"pilotlight page", "sha256") for each in given]
        self._clock = clock

    def visitor(self, request: Request, scope: str = VIEW) -> Visitor:
        """Return the visitor, by key or cookie. Raises ApiError if the key is unknown or lacks `scope`."""
        if not self._access.is_required:
            return OPERATOR
        if (authorization := request.headers.get("authorization")) is not None:
            key = self._access.key(authorization, scope)
            return Visitor(key.name, key.is_admin)
        if (known := self._key_of(request.cookies.get(COOKIE, ""))) is None:
            raise ApiError("unauthorized", "this needs a key: create one with `pilotlight keys create`")
        known.check(scope, self._clock())
        return Visitor(known.name, known.is_admin)

    def actor(self, request: Request) -> Visitor:
        """Return the operator who requests a change.
        Raises ApiError for other visitors, and for requests by scripts of other origins."""
        visitor = self.visitor(request, "admin")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise ApiError("forbidden", "the request came from a page of another origin")
        return visitor

    def open(self, authorization: str, response: Response, *, is_secure: bool) -> Visitor:
        """Set the cookie for the holder of a key. Raises ApiError if the key is unknown."""
        key = self._access.key(authorization, VIEW)
        expires_s = int(self._clock()) + LIFETIME_S
        value = f"{expires_s}.{_mac(self._secrets[0], key, expires_s)}.{key.name}"
        response.set_cookie(COOKIE, value, LIFETIME_S, httponly=True, samesite="strict", secure=is_secure)
        return Visitor(key.name, key.is_admin)

    def close(self, response: Response) -> None:
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")

    def _key_of(self, cookie: str) -> Key | None:
        stamp, _, rest = cookie.partition(".")
        mac, _, name = rest.partition(".")
        if not stamp.isdecimal() or len(stamp) > 12 or int(stamp) < self._clock():
            return None
        known = [key for key in self._access.keys.values() if key.name == name]
        tries = ((key, secret) for key in known for secret in self._secrets)
        return next((key for key, secret in tries if hmac.compare_digest(_mac(secret, key, int(stamp)), mac)), None)


def _mac(secret: bytes, key: Key, expires_s: int) -> str:
    signed = f"{expires_s}\0{key.name}\0{key.sha256}\0{key.is_admin}".encode()
    return hmac.new(secret, signed, hashlib.sha256).hexdigest()
