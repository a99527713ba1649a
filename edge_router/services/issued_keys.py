"""Keys and accounts that were created while a router ran.

They are in a file of its state directory, beside those of its configuration, and valid at once. The file has the form of `serve --keys`: `pilotlight
keys` changes it too, and SIGHUP reads it again.
"""

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pilotlight.page.management import KeyRequest
from pilotlight.sites.accounts import check_accounts
from pilotlight.sites.config import ConfigError, parse, read
from pilotlight.sites.key_files import NewKey, UnwritableError, add_key, append, described, revoke_key, toml_table
from pilotlight.sites.network import IssuedKeysFile, NetworkConfig
from pilotlight.wire.errors import ApiError

LIMITS = ("requests_per_min", "tokens_per_min", "tokens_per_day", "cost_per_day")
DAILY = {"tokens_per_day", "cost_per_day"}


class IssuedKeys:
    def __init__(
        self,
        file: Path,
        configured: Callable[[], NetworkConfig],
        check: Callable[[NetworkConfig], None],
        changed: Callable[[], None],
    ) -> None:
        """`configured` returns the configuration of the router's file.
        `check` raises ConfigError if the router cannot keep to a configuration; `changed` is called after each change."""
        self._file = file
        self._configured = configured
        self._check = check
        self._changed = changed
        self._changing = asyncio.Lock()

    def list_keys(self) -> list[dict[str, Any]]:
        """Return all keys: first those of the configuration, which cannot be revoked here."""
        issued = self._issued().keys
        return [
            *({**described(key), "is_issued": False} for key in self._configured().keys),
            *({**described(key), "is_issued": True} for key in issued),
        ]

    async def create(self, new: KeyRequest) -> str:
        async with self._changing:
            try:
                key = await asyncio.to_thread(self._create, new)
            except UnwritableError as error:
                raise _not_changed(error) from None
            except ConfigError as error:
                raise ApiError("invalid_request", str(error)) from None
            self._changed()
            return key

    async def revoke(self, name: str) -> None:
        async with self._changing:
            if any(key.name == name for key in self._configured().keys):
                raise ApiError("conflict", f"the key {name} is in the router's file: revoke it there")
            if all(key.name != name for key in self._issued().keys):
                raise ApiError("not_found", f"there is no key named {name!r}")
            try:
                await asyncio.to_thread(revoke_key, self._file, name)
            except UnwritableError as error:
                raise _not_changed(error) from None
            except ConfigError as error:
                raise ApiError("conflict", str(error)) from None
            self._changed()

    def _create(self, new: KeyRequest) -> str:
        """Create a key; return the key itself, of which only the digest is stored.

        Raises ConfigError, OSError and ApiError."""
        configured, issued = self._configured(), self._issued()
        if any(key.name == new.name for key in (*configured.keys, *issued.keys)):
            raise ConfigError(f"there is a key named {new.name!r} already: choose another name")
        key, table = add_key(NewKey(new.name, new.scopes, new.account, new.expires_days), None)
        account = new.account or new.name
        limits = {name: value for name in LIMITS if (value := getattr(new, name)) is not None}
        is_known = any(each.name == account for each in (*configured.accounts, *issued.accounts))
        if is_known and limits:
            raise ConfigError(f"the account {account} has its limits already: leave them out, or name another account")
        if DAILY & limits.keys() and configured.ledger.directory is None:
            raise ConfigError("a daily limit needs a ledger: set ledger.directory in the router's file")
        if not is_known and (limits or new.account):
            table = f"{toml_table('accounts', {'name': account, **limits})}\n{table}"
        added = parse(IssuedKeysFile, tomllib.loads(table), "the new key")
        self._check(replace(configured, accounts=(*configured.accounts, *issued.accounts, *added.accounts)))
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        append(self._file, new.name, table)
        return key

    def _issued(self) -> IssuedKeysFile:
        """Read the file. Raises ApiError if it is damaged."""
        try:
            return _read(self._file)
        except ConfigError as error:
            raise ApiError("internal_error", str(error)) from None


def _not_changed(error: UnwritableError) -> ApiError:
    return ApiError("overloaded", f"{error}; nothing was changed", retry_after_s=60)


def with_issued_keys(network: NetworkConfig, file: Path) -> NetworkConfig:
    """Return the configuration with issued keys and accounts.
    Raises ConfigError if a name is in both."""
    issued = _read(file)
    accounts, keys = (*network.accounts, *issued.accounts), (*network.keys, *issued.keys)
    try:
        check_accounts([account.name for account in accounts], keys)
    except ValueError as error:
        raise ConfigError(f"{file} and the router's file disagree: {error}") from None
    return replace(network, accounts=accounts, keys=keys)


def _read(file: Path) -> IssuedKeysFile:
    """Read the file of issued keys, if it exists. Raises ConfigError."""
    return parse(IssuedKeysFile, read(file), str(file)) if file.is_file() else IssuedKeysFile()
