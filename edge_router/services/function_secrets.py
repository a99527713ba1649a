"""Secrets of deployed functions, which this router stores encrypted for the sites that serve them."""

import uuid
from pathlib import Path

import msgspec

from pilotlight.sites.config import ConfigError
from pilotlight.support import atomic_files
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.sealed_secrets import MAX_SECRET_BYTES, seal

MAX_SECRETS = 64  # secrets of one function


class FunctionSecrets:
    def __init__(self, directory: Path, key: str) -> None:
        """`key` encrypts the secrets, and sites decrypt them with it; empty if none can be stored.
        Raises ConfigError if the file cannot be read."""
        self._path = directory / "secrets.json"
        self._key = key
        self._sealed: dict[str, dict[str, bytes]] = {}
        if self._path.is_file():
            try:
                self._sealed = msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, bytes]])
            except msgspec.DecodeError as error:
                raise ConfigError(f"{self._path} is damaged ({error}); remove it and put the secrets again") from None

    def of(self, function: str) -> dict[str, bytes]:
        return self._sealed.get(function, {})

    def put(self, function: str, name: str, value: str) -> str:
        """Store a secret. Return a new random revision of the function's secrets. Raises ApiError."""
        if not self._key:
            raise ApiError("not_found", "this router has no key to encrypt secrets for its sites")
        if not value or len(value.encode()) > MAX_SECRET_BYTES:
            raise ApiError("invalid_request", f"a secret has 1 to {MAX_SECRET_BYTES} bytes")
        if not (name.isidentifier() and len(name) <= 128):
            raise ApiError("invalid_request", f"{name[:64]!r} is not a name of a secret: use letters, digits and _")
        kept = {**self.of(function), name: seal(self._key, function, name, value)}
        if len(kept) > MAX_SECRETS:
            raise ApiError("invalid_request", f"a function has at most {MAX_SECRETS} secrets")
        return self._write(function, kept)

    def delete(self, function: str, name: str) -> str:
        """Delete a secret. Return a new random revision of the function's secrets. Raises ApiError."""
        kept = dict(self.of(function))
        if kept.pop(name, None) is None:
            raise ApiError("not_found", f"{function} has no secret {name[:64]!r} that was set through a router")
        return self._write(function, kept)

    def _write(self, function: str, kept: dict[str, bytes]) -> str:
        changed = {**self._sealed, function: kept}
        atomic_files.write(self._path, msgspec.json.encode(changed))
        self._sealed = changed
        return uuid.uuid4().hex
