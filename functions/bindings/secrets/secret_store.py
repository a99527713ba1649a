"""Secrets of functions at rest: AES-256-GCM with a key of this site that only its owner can read.

Each secret is bound to its function and name: a copy under another name does not decrypt. This module does not check which function may read a
secret.
"""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pilotlight.functions.bindings.place import name_of
from pilotlight.support import atomic_files

KEY_BYTES = 32
NONCE_BYTES = 12
MAX_SECRET_BYTES = 5 << 10  # the platform's limit for a variable


class SecretError(Exception):
    """A secret cannot be stored or decrypted; the message names the file and the remedy."""


class SecretStore:
    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "bindings" / "secret"
        self._cipher: AESGCM | None = None

    def put(self, function: str, name: str, value: str) -> None:
        if len(value.encode()) > MAX_SECRET_BYTES:
            raise SecretError(f"the secret {name} has more than {MAX_SECRET_BYTES} bytes")
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed_value = nonce + self._key().encrypt(nonce, value.encode(), _bound_to(function, name))
        with self._locked():
            self._write(function, {**self._sealed(function), name: sealed_value})

    def delete(self, function: str, name: str) -> bool:
        """Delete a secret; return False if there was none."""
        with self._locked():
            sealed = self._sealed(function)
            if sealed.pop(name, None) is None:
                return False
            self._write(function, sealed)
        return True

    def revision(self) -> int:
        """Return a number that changes whenever a secret is put or deleted."""
        try:
            return self._directory.stat().st_mtime_ns  # each change renames a file in this folder
        except FileNotFoundError:
            return 0

    def names(self, function: str) -> list[str]:
        return sorted(self._sealed(function))

    def values(self, function: str) -> dict[str, str]:
        sealed = self._sealed(function)
        return {name: self._opened(function, name, value) for name, value in sealed.items()}

    def _opened(self, function: str, name: str, sealed: bytes) -> str:
        try:
            plain = self._key().decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound_to(function, name))
        except (InvalidTag, ValueError):
            raise SecretError(
                f"the secret {name} of {function} cannot be decrypted with this site's key ({self._key_file}); put it again"
            ) from None
        return plain.decode()

    def _sealed(self, function: str) -> dict[str, bytes]:
        path = self._file_of(function)
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=dict[str, bytes])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            raise SecretError(f"{path} is damaged ({error}); remove it and put the secrets again") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the store against changes by other threads and processes.
        Otherwise two concurrent read-modify-writes would lose one of the changes."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _write(self, function: str, sealed: dict[str, bytes]) -> None:
        atomic_files.write(self._file_of(function), msgspec.msgpack.encode(sealed))

    def _file_of(self, function: str) -> Path:
        return self._directory / f"{name_of(function)}.sealed"

    @property
    def _key_file(self) -> Path:
        return self._directory / "key"

    def _key(self) -> AESGCM:
        if self._cipher is None:
            self._cipher = AESGCM(self._read_or_make_key())
        return self._cipher

    def _read_or_make_key(self) -> bytes:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=self._directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            atomic_files.sync(Path(temporary))
            os.link(temporary, self._key_file)  # fails if a key exists, so only one of two starting processes makes it
            atomic_files.sync(self._directory)
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
        if self._key_file.stat().st_mode & 0o077:
            raise SecretError(f"{self._key_file} can be read by others; run: chmod 600 {self._key_file}")
        key = self._key_file.read_bytes()
        if len(key) != KEY_BYTES:
            raise SecretError(f"{self._key_file} has {len(key)} bytes instead of {KEY_BYTES}; restore it from a backup")
        return key


def _bound_to(function: str, name: str) -> bytes:
    return f"{len(function)}:{function}:{name}".encode()
