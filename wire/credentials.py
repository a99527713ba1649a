"""Read a request's Authorization header, and find the key's account.

A key is the same tenant in every spelling of the header. This module parses the header (RFC 6750), and holds the configured keys with their accounts
and scopes. Limits of accounts are enforced elsewhere.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple, Protocol

from pilotlight.wire.errors import ApiError

API_KEYS = (b"x-api-key", b"api-key")  # headers of Anthropic's clients, and of Azure's clients

_BEARER = re.compile(r"bearer +([\x21-\x7e]+)", re.IGNORECASE)


def with_bearer(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return a request's headers with its key as an Authorization header.

    The key may come in a dialect's own header, such as Anthropic's `x-api-key`.
    """
    names = dict(headers)
    if b"authorization" in names or (found := next((name for name in API_KEYS if name in names), None)) is None:
        return headers
    return [(b"authorization", b"Bearer " + value) if name == found else (name, value) for name, value in headers]


@lru_cache(4096)  # a client sends the same value with every request
def bearer_token(authorization: str | None) -> str:
    """Return the bearer token; empty if there is none.
    Other credentials are ignored, because a function may check them. So is `Bearer ` without a token, as a client sends it if its variable is empty.
    """
    found = _BEARER.fullmatch(authorization.strip(" \t")) if authorization else None
    return "" if found is None else found[1]


class Tenant(NamedTuple):
    """The owner of a request: a known account, or all users of one unknown key.

    Each account id of Cloudflare's paths is a separate tenant. A tenant's prefix cache is found only with its salt, so two tenants never share cached
    blocks (invariant I4 of tests/README.md).
    """

    id: str  # a hash and not the key, so it may be logged
    salt: bytes  # seed of the engine's prefix cache
    owner: str  # id of the account or key, independent of the account in the path; uploads belong to it


def owner_of(authorization: str | None, account: str) -> str:
    """Return the caller's id: `account NAME` if its account is known, otherwise its key; "" without a key.
    Keys have no spaces, so the two cannot be confused."""
    return f"account {account}" if account else bearer_token(authorization)


@lru_cache(4096)
def tenant_of(owner: str, account_id: str | None) -> Tenant:
    """Return the tenant of an owner (`owner_of`) and a path's account id; ANONYMOUS without either."""
    if not owner and not account_id:
        return ANONYMOUS
    # The length comes first, so that two pairs of owner and account never have the same text.
    identity = f"{len(owner)}:{owner}:{account_id or ''}".encode()
    digest = hashlib.sha256(b"pilotlight tenant\0" + identity).digest()
    id = digest[:8].hex()
    return Tenant(id, digest[8:24], tenant_of(owner, None).id if account_id else id)


def salted(salt: bytes, cache_salt: object) -> bytes:
    """Return the salt of a request's prefix cache.
    It is the tenant's `salt`, or one derived from that and the request's `cache_salt`."""
    if not isinstance(cache_salt, str) or not cache_salt:
        return salt
    return hashlib.blake2b(cache_salt.encode(), key=salt, digest_size=len(salt)).digest()


ANONYMOUS = Tenant("anonymous", hashlib.sha256(b"pilotlight anonymous tenant").digest()[8:24], "anonymous")


class Account(NamedTuple):
    name: str
    models: tuple[str, ...] | None = None  # patterns of the models that it may use; None if all
    functions: tuple[str, ...] = ("*",)  # patterns of functions that its keys may deploy

    def may_use(self, *names: str) -> bool:
        """Tell whether the account may use the model with these names."""
        return self.models is None or any(fnmatchcase(name, pattern) for name in names for pattern in self.models)

    def check_model(self, model: str | None) -> None:
        """Raise ApiError if the account may not use the model.
        `model` is the name in the request; None if it names none."""
        if self.models is not None and (model is None or not self.may_use(model)):
            named = f"the model {model[:200]!r}" if model is not None else "a request that names no model"
            sentence = (
                f"{named} is not available to the account {self.name}, which may use {', '.join(self.models) or 'none'}"
            )
            raise ApiError("forbidden", sentence, param="model")

    def check_function(self, name: str) -> None:
        """Raise ApiError if the account's keys may not deploy the function."""
        if not any(fnmatchcase(name, pattern) for pattern in self.functions):
            allowed = ", ".join(self.functions) or "none"
            raise ApiError("forbidden", f"the account {self.name} may deploy {allowed}, and not {name[:64]!r}")


class Key(NamedTuple):
    name: str
    sha256: str
    scopes: frozenset[str] = frozenset({"models"})
    account: Account = Account("")
    expires_s: float | None = None  # seconds since the epoch
    is_revoked: bool = False

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    def opens(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def check(self, scope: str, now_s: float) -> None:
        """Raise ApiError if the key is no longer valid or lacks the scope."""
        if self.is_revoked:
            raise ApiError("unauthorized", f"the key {self.name} was revoked: ask its issuer for a new one")
        if self.expires_s is not None and now_s >= self.expires_s:
            when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(self.expires_s))
            raise ApiError("unauthorized", f"the key {self.name} expired at {when}: ask its issuer for a new one")
        if not self.opens(scope):
            has = ", ".join(sorted(self.scopes))
            sentence = f"this needs a key with the scope {scope}, and {self.name} has {has}: `pilotlight keys create --scope {scope}` makes one"
            raise ApiError("forbidden", sentence)


class AccountEntry(Protocol):
    """An account in a configuration file. (The router's entries have patterns of functions, too.)"""

    @property
    def name(self) -> str: ...
    @property
    def models(self) -> tuple[str, ...] | None: ...


class KeyEntry(Protocol):
    """A key in a configuration file."""

    @property
    def name(self) -> str: ...
    @property
    def key_sha256(self) -> str: ...
    @property
    def account(self) -> str | None: ...
    @property
    def scopes(self) -> Sequence[str]: ...
    @property
    def expires(self) -> datetime | None: ...
    @property
    def revoked(self) -> bool: ...
    @property
    def former_sha256(self) -> str | None: ...
    @property
    def former_expires(self) -> datetime | None: ...


def known_keys(accounts: Iterable[AccountEntry], keys: Iterable[KeyEntry]) -> list[Key]:
    """Return the keys of a configuration file, including old keys that are still valid during a rotation."""
    named = {each.name: Account(each.name, each.models, getattr(each, "functions", ("*",))) for each in accounts}
    known: list[Key] = []
    for each in keys:
        owner = each.account or each.name
        account = named.get(owner) or Account(owner)
        expires_s = None if each.expires is None else each.expires.timestamp()
        key = Key(each.name, each.key_sha256, frozenset(each.scopes), account, expires_s, each.revoked)
        known.append(key)
        if each.former_sha256 is not None and each.former_expires is not None:
            until_s = each.former_expires.timestamp()
            known.append(key._replace(sha256=each.former_sha256, expires_s=min(until_s, expires_s or until_s)))
    return known


class Access:
    """The configured keys.
    SHA-256 without salt or repetition suffices, because a key of `pilotlight keys create` has 256 random bits and cannot be guessed from its digest.
    A slow hash would cost the server as much for each request as an attacker for each guess. The time of a look-up depends only on digests, so it
    reveals no key."""

    def __init__(self, keys: Iterable[Key], *, is_required: bool, clock: Callable[[], float] = time.time) -> None:
        self.is_required = is_required
        self.keys: Mapping[str, Key] = {key.sha256: key for key in keys}
        self._clock = clock

    def update_from(self, other: "Access") -> None:
        """Copy the other object's keys."""
        self.is_required, self.keys = other.is_required, other.keys

    def holder(self, authorization: str | None) -> Key | None:
        """Return the key of a request for a model; None if keys are not required and it has no valid one.
        If keys are required, raises ApiError for a missing or invalid key, and for one without the scope `models`."""
        return self.key(authorization, "models") if self.is_required else self.find(bearer_token(authorization))

    def find(self, token: str) -> Key | None:
        """Return the valid key with this token, whatever its scopes; None without one."""
        key = self.keys.get(_digest_of(token)) if token else None
        if key is None or key.is_revoked or (key.expires_s is not None and self._clock() >= key.expires_s):
            return None
        return key

    def of_account(self, name: str) -> Key | None:
        """Return a key for a process that acts for an account, with its limits; None if `name` is empty.
        An account without a configured key has no limits."""
        accounts = (key.account for key in self.keys.values() if key.account.name == name)
        return Key("", "", account=next(accounts, Account(name))) if name else None

    def named(self, name: str | None, account: str) -> Key | None:
        """Return the key with this name, or one for its account if it was deleted."""
        return next((key for key in self.keys.values() if name and key.name == name), None) or self.of_account(account)

    def key(self, authorization: str | None, scope: str) -> Key:
        """Return the key of a request.
        Raises ApiError if it is missing, unknown, no longer valid, or lacks `scope`."""
        token = bearer_token(authorization)
        if not token and authorization and authorization.strip(" \t"):
            raise ApiError("unauthorized", "the Authorization header must be `Bearer KEY`, where KEY has no spaces")
        if not token:
            raise ApiError("unauthorized", "this needs a key: send it as `Authorization: Bearer KEY`")
        key = self.keys.get(_digest_of(token))
        if key is None:
            raise ApiError("unauthorized", "this key is unknown")
        key.check(scope, self._clock())
        return key


@lru_cache(4096)
def _digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
