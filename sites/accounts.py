"""Accounts and their keys, as a router's, a site's and a keys file hold them.

A key is not written down, only a digest by which it is known (`pilotlight keys create`). Refuses to know what a scope opens.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta

from pilotlight.sites.rules import refuse_twice
from pilotlight.sites.table import Table

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\Z")]  # Python's $ would let a line's end pass
KeyDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="SHA-256 of its key, in hexadecimal digits")]
Moment = Annotated[datetime, Meta(tz=True, description="with its zone, as 2027-01-01T00:00:00Z")]
Scope = Literal["models", "deploy", "metrics", "admin"]
AllowedModels = Annotated[
    tuple[str, ...] | None, Meta(description="names, with *, of the models that it may use; unset: all")
]


class AccountConfig(Table, frozen=True, kw_only=True):
    """An account, where it is not free to use every model."""

    name: Name
    models: AllowedModels = None


class KeyConfig(Table, frozen=True, kw_only=True):
    """A key that is known, by its digest."""

    name: Name
    key_sha256: KeyDigest
    account: Annotated[Name | None, Meta(description="whose it is; unset: an account of the key's own name")] = None
    scopes: Annotated[
        tuple[Scope, ...],
        Meta(
            min_length=1,
            description="models: ask models; deploy: deploy functions; metrics: read /metrics, /status and the page; admin: all of it",
        ),
    ] = ("models",)
    expires: Annotated[Moment | None, Meta(description="known no longer from then on")] = None
    revoked: Annotated[bool, Meta(description="refused by name, by `pilotlight keys revoke`")] = False
    former_sha256: Annotated[
        KeyDigest | None, Meta(description="of the key before it, by `pilotlight keys rotate`")
    ] = None
    former_expires: Annotated[Moment | None, Meta(description="until when that one is known as well")] = None

    def agree(self) -> None:
        if (self.former_sha256 is None) != (self.former_expires is None):
            raise ValueError("former_sha256 and former_expires belong together: set both or neither")


class KeysFile(Table, frozen=True, kw_only=True):
    """Accounts and keys alone, for `pilotlight serve --keys`."""

    accounts: tuple[AccountConfig, ...] = ()
    keys: tuple[KeyConfig, ...] = ()

    def agree(self) -> None:
        check_accounts([account.name for account in self.accounts], self.keys)


def check_accounts(accounts: Sequence[str], keys: Sequence[KeyConfig]) -> None:
    """Raise ValueError for a name or a digest that is there twice, and for a key of an account that is not there."""
    refuse_twice([*accounts], "account name")
    refuse_twice([key.name for key in keys], "key name")
    digests = [digest for key in keys for digest in (key.key_sha256, key.former_sha256) if digest is not None]
    refuse_twice(digests, "key's digest")
    for key in keys:
        if key.account is not None and key.account not in accounts:
            raise ValueError(
                f"the key {key.name!r} is of the account {key.account!r}, and no [[accounts]] has that name"
            )


def refuse_tenants(values: dict[str, Any]) -> str | None:
    """Return what to change in a file of the form before accounts; None: it is not one."""
    if "tenants" not in values:
        return None
    return (
        '[[tenants]] is no longer read: write each as [[keys]] with name and key_sha256, scopes = ["admin"] in the place of '
        "admin = true, and its limits, where it has any, as [[accounts]] of the same name"
    )
