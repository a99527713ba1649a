"""Secrets of deployed functions, which this router stores encrypted for the sites that serve them."""

import uuid
from pathlib import Path

import msgspec

from pilotlight.sites.config import ConfigError
from pilotlight.support import atomic_files
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import signing
from pilotlight.wire.hop.sealed_secrets import MAX_SECRET_BYTES, UnsealedError, seal, unseal

MAX_SECRETS = 64  # secrets of one function


class FunctionSecrets:
    def __init__(self, directory: Path, key: str) -> None:
        """Read the stored secrets, and encrypt them again if the network is changing its secret.

        `key` encrypts the secrets, and sites decrypt them with it. It is empty if none can be stored. While the network has two secrets, `key`
        has both.

        Raises ConfigError if the file cannot be read."""
        self._path = directory / "secrets.json"
        self._key = key
        self._encrypt_again()

    def of(self, function: str) -> dict[str, bytes]:
        """Return a function's encrypted secrets by name.

        The file is read each time, because an earlier worker of this router may have changed it since this one started."""
        return self._stored().get(function, {})

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
        return self._write({**self._stored(), function: kept})

    def delete(self, function: str, name: str) -> str:
        """Delete a secret. Return a new random revision of the function's secrets. Raises ApiError."""
        kept = self.of(function)
        if kept.pop(name, None) is None:
            raise ApiError("not_found", f"{function} has no secret {name[:64]!r} that was set through a router")
        return self._write({**self._stored(), function: kept})

    def _encrypt_again(self) -> None:
        """Encrypt with the secret that signs what was encrypted with the other one, which will be removed."""
        stored = self._stored()
        if self._key == signing(self._key):
            return
        changed = {
            function: {name: self._with_new_key(function, name, sealed) for name, sealed in secrets.items()}
            for function, secrets in stored.items()
        }
        if changed != stored:
            self._write(changed)

    def _with_new_key(self, function: str, name: str, sealed: bytes) -> bytes:
        try:
            unseal(signing(self._key), function, name, sealed)
        except UnsealedError:
            try:
                return seal(self._key, function, name, unseal(self._key, function, name, sealed))
            except UnsealedError:
                return sealed  # of neither secret: sites log that it cannot be decrypted
        return sealed

    def _stored(self) -> dict[str, dict[str, bytes]]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, bytes]])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path} is damaged ({error}); remove it and put the secrets again") from None

    def _write(self, changed: dict[str, dict[str, bytes]]) -> str:
        atomic_files.write(self._path, msgspec.json.encode(changed))
        return uuid.uuid4().hex
