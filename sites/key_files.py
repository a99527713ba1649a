"""Keys of clients in the files of routers, sites and `serve`, which hold their digests.

Single lines are changed, so that the rest of a file keeps its form. The changed text is parsed before it is written, and refused if its meaning is
not the intended one.
"""

import hashlib
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.sites import toml_text
from pilotlight.sites.accounts import KeyConfig
from pilotlight.sites.config import ConfigError, parse

PREFIX = "pl-"  # makes a key recognizable in a log or a commit
KEY_BYTES = 32


class UnwritableError(ConfigError):
    """A file of keys cannot be written, for example because its disk is full."""


class NewKey(NamedTuple):
    """The fields of a key to be made."""

    name: str
    scopes: tuple[str, ...] = ("models",)
    account: str | None = None
    expires_days: float | None = None


def new_key(name: str, scopes: Sequence[str] = ("models",), **more: Any) -> tuple[str, KeyConfig]:
    """Make a key; return it with its entry for a file. Raises ConfigError for an invalid name or scope."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, key_config(name, key, scopes, **more)


def key_config(name: str, key: str, scopes: Sequence[str], **more: Any) -> KeyConfig:
    values = {"name": name, "key_sha256": _digest_of(key), "scopes": list(scopes), **more}
    return parse(KeyConfig, values, "pilotlight keys")


def add_key(new: NewKey, file: Path | None) -> tuple[str, str]:
    """Make a key, and add it to a file if one is given. Raises ConfigError.
    Returns the key, and the table with its digest."""
    more: dict[str, Any] = {} if new.account is None else {"account": new.account}
    if new.expires_days is not None:
        more["expires"] = _from_now(timedelta(days=new.expires_days))
    key, known = new_key(new.name, new.scopes, **more)
    fields = {"name": new.name, "key_sha256": known.key_sha256, "scopes": [*new.scopes], **more}
    table = toml_table("keys", fields)
    if file is not None:
        append(file, new.name, table, new.account)
    return key, table


def rotate_key(file: Path, name: str, grace_h: float) -> str:
    """Replace a key and return the new one.
    The previous key is accepted for `grace_h` hours. Raises ConfigError."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    before = _entry(file, name)
    if before.get("revoked"):
        raise ConfigError(f"{name} was revoked: create a key of another name.")
    changes = {
        "key_sha256": _digest_of(key),
        "former_sha256": before["key_sha256"],
        "former_expires": _from_now(timedelta(hours=grace_h)),
    }
    _change(file, name, changes)
    return key


def revoke_key(file: Path, name: str) -> None:
    """Revoke a key and its predecessor. Raises ConfigError."""
    _change(file, name, {"revoked": True})


def keys_of(file: Path) -> list[dict[str, Any]]:
    """Return a file's keys in the form that is printed. Raises ConfigError."""
    return [described(parse(KeyConfig, entry, "pilotlight keys")) for entry in _entries(_read(file), file)]


def described(known: KeyConfig) -> dict[str, Any]:
    """Return a key's name, account, scopes, digest and state."""
    now = datetime.now(UTC)
    state = "known"
    if known.revoked:
        state = "revoked"
    elif known.expires is not None:
        state = f"{'expired' if known.expires <= now else 'expires'} {known.expires.astimezone(UTC):%Y-%m-%d %H:%MZ}"
    if known.former_expires is not None and known.former_expires > now and not known.revoked:
        state += f", the previous key until {known.former_expires.astimezone(UTC):%Y-%m-%d %H:%MZ}"
    return {
        "name": known.name,
        "account": known.account or known.name,
        "scopes": [*known.scopes],
        "key_sha256": known.key_sha256,
        "state": state,
    }


def toml_table(name: str, fields: Mapping[str, Any]) -> str:
    """Return an entry of an array of tables as TOML."""
    return f"[[{name}]]\n" + "".join(f"{field} = {_toml(value)}\n" for field, value in fields.items())


def append(file: Path, name: str, table: str, account: str | None = None) -> None:
    """Append the table of a new key to a TOML file.
    Raises ConfigError, for example for an account that the file does not have."""
    before = _read(file) if file.exists() else ""
    known = _entries(before, file)
    accounts = [each.get("name") for each in tomllib.loads(before).get("accounts", []) if isinstance(each, dict)]
    if account is not None and account not in accounts:
        raise ConfigError(f"{file} has no account named {account!r}: add [[accounts]] with that name first.")
    if any(entry.get("name") == name for entry in known):
        raise ConfigError(f"{file} has a key named {name!r} already: `pilotlight keys rotate`, or choose another name.")
    after = toml_text.with_table(before, table)
    (added,) = tomllib.loads(table)["keys"]
    if _entries(after, file) != [*known, added]:
        raise ConfigError(f"{file} cannot take a key: keys must be written as [[keys]] there.")
    _write(file, after)


def _change(file: Path, name: str, changes: dict[str, Any]) -> None:
    """Set fields of one key in its file.
    Raises ConfigError, and changes nothing, if the table does not have one line per field."""
    text = _read(file)
    entries = _entries(text, file)
    number = next((i for i, entry in enumerate(entries) if entry.get("name") == name), None)
    if number is None:
        known = ", ".join(str(entry.get("name")) for entry in entries) or "none"
        raise ConfigError(f"{file} has no key named {name!r}; it has {known}.")
    wanted = [*entries[:number], {**entries[number], **changes}, *entries[number + 1 :]]
    after = _with_fields(text, number, changes)
    try:
        parse(KeyConfig, wanted[number], str(file))
        is_right = _entries(after, file) == wanted
    except ConfigError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{file} does not write {name} as a [[keys]] table with a line for each field: change it by hand."
        )
    _write(file, after)


def _with_fields(text: str, number: int, changes: dict[str, Any]) -> str:
    if (found := toml_text.split_at_table(text, "keys", number)) is None:
        return text
    before, block, after = found
    if not block[-1].endswith("\n"):
        block[-1] += "\n"
    for field, value in changes.items():
        line = f"{field} = {_toml(value)}\n"
        at = next((i for i, old in enumerate(block) if re.match(rf"[ \t]*{field}[ \t]*=", old)), None)
        if at is not None:
            block[at] = line
        else:
            last = max(i for i, old in enumerate(block) if old.strip())
            block.insert(last + 1, line)
    return "".join([*before, *block, *after])


def _entry(file: Path, name: str) -> dict[str, Any]:
    found = [entry for entry in _entries(_read(file), file) if entry.get("name") == name]
    if not found:
        raise ConfigError(f"{file} has no key named {name!r}.")
    return found[0]


def _entries(text: str, file: Path) -> list[dict[str, Any]]:
    try:
        found = tomllib.loads(text).get("keys", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} cannot take a key: {error}") from None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ConfigError(f"{file} cannot take a key: keys must be written as [[keys]] there.")
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _write(file: Path, text: str) -> None:
    try:
        toml_text.write(file, text)
    except OSError as error:
        raise UnwritableError(f"{file} cannot be written: {error.strerror}") from None


def _digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _from_now(span: timedelta) -> datetime:
    try:
        return (datetime.now(UTC) + span).replace(microsecond=0)
    except OverflowError:
        raise ConfigError("pilotlight keys: the time of expiry is too late for a date") from None


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case datetime():
            return value.strftime("%Y-%m-%dT%H:%M:%SZ")
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
    return toml_text.literal(value)
