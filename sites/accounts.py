"""Accounts and their keys, as configured in a router's, a site's or a keys file.

Files hold a digest of each key, never the key (`pilotlight keys create`). What a scope allows is decided elsewhere.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta

from pilotlight.sites.rules import refuse_twice
from pilotlight.sites.table import Table

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\Z")]  # $ would also match before a final line end
KeyDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="SHA-256 of the key, in hexadecimal digits.")]
Moment = Annotated[datetime, Meta(tz=True, description="A time with its zone, such as 2027-01-01T00:00:00Z.")]
Scope = Literal["models", "deploy", "metrics", "admin"]


class AccountConfig(Table, frozen=True, kw_only=True):
    """An account of a site, and the models that it may use."""

    name: Name
    """Name of the account."""
    models: tuple[str, ...] | None = None
    """Names of the models that the account may use; * matches any text. Unset: all models."""


class KeyConfig(Table, frozen=True, kw_only=True):
    """An API key, by its digest."""

    name: Name
    """Name of the key."""
    key_sha256: KeyDigest
    """SHA-256 of the key, in hexadecimal digits."""
    account: Name | None = None
    """Account of the key; unset: an account with the key's own name."""
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = ("models",)
    """models: use models; deploy: deploy functions; metrics: read /metrics, /status and the page; admin: everything."""
    expires: Moment | None = None
    """Time from which the key is refused; unset: never."""
    revoked: bool = False
    """Refuse the key, with its name in the error (`pilotlight keys revoke`)."""
    former_sha256: KeyDigest | None = None
    """SHA-256 of the previous key (`pilotlight keys rotate`)."""
    former_expires: Moment | None = None
    """Time until which the previous key is accepted."""

    def agree(self) -> None:
        if (self.former_sha256 is None) != (self.former_expires is None):
            raise ValueError("former_sha256 and former_expires belong together: set both or neither")


class KeysFile(Table, frozen=True, kw_only=True):
    """A file with only accounts and keys, for `pilotlight serve --keys`."""

    accounts: tuple[AccountConfig, ...] = ()
    """Accounts and the models that they may use."""
    keys: tuple[KeyConfig, ...] = ()
    """API keys, by their digests."""

    def agree(self) -> None:
        check_accounts([account.name for account in self.accounts], self.keys)


def check_accounts(accounts: Sequence[str], keys: Sequence[KeyConfig]) -> None:
    """Raise ValueError for a duplicate name or digest, or a key of an unknown account."""
    refuse_twice([*accounts], "account name")
    refuse_twice([key.name for key in keys], "key name")
    digests = [digest for key in keys for digest in (key.key_sha256, key.former_sha256) if digest is not None]
    refuse_twice(digests, "key's digest")
    for key in keys:
        if key.account is not None and key.account not in accounts:
            raise ValueError(f"the key {key.name!r} names the account {key.account!r}, which is not among [[accounts]]")
