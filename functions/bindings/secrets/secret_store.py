"""Secrets of functions at rest: AES-256-GCM with a key of this site that only its owner can read.

Each secret is bound to its function and name: a copy under another name does not decrypt. The key file has one key, or two while the key is being
replaced: the first one encrypts, both decrypt. This module does not check which function may read a secret.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pilotlight.functions.bindings.place import name_of
from pilotlight.support import atomic_files

KEY_BYTES = 32
NONCE_BYTES = 12
MAX_SECRET_BYTES = 5 << 10  # the platform's limit for a variable
END = ".sealed"


class SecretError(Exception):
    """A secret cannot be stored or decrypted; the message names the file and the remedy."""


class SealedSecrets(msgspec.Struct, array_like=True):
    """The content of a file: the name of a function, and its encrypted secrets by name."""

    function: str
    secrets: dict[str, bytes]  # nonce, ciphertext and tag


class SecretStore:
    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / "bindings" / "secret"

    def put(self, function: str, name: str, value: str) -> None:
        if len(value.encode()) > MAX_SECRET_BYTES:
            raise SecretError(f"the secret {name} has more than {MAX_SECRET_BYTES} bytes")
        with self._locked():
            sealed = self._sealed(function)
            keys = self._keys() or self._write_keys([secrets.token_bytes(KEY_BYTES)])
            self._write(function, {**sealed, name: _encrypted(keys[0], function, name, value.encode())})

    def delete(self, function: str, name: str) -> bool:
        """Delete a secret; return False if there was none."""
        with self._locked():
            sealed = self._sealed(function)
            if sealed.pop(name, None) is None:
                return False
            self._write(function, sealed)
        return True

    def revision(self) -> int:
        """Return a number that changes when a secret is put or deleted.

        Two changes within one tick of the clock may have the same number."""
        try:
            return self.directory.stat().st_mtime_ns  # each change renames a file in this folder
        except FileNotFoundError:
            return 0

    def names(self, function: str) -> list[str]:
        return sorted(self._sealed(function))

    def values(self, function: str) -> dict[str, str]:
        sealed = self._sealed(function)
        while True:
            try:
                return {name: value.decode() for name, value in self._decrypted(function, sealed).items()}
            except SecretError:
                before, sealed = sealed, self._sealed(function)
                if sealed == before:  # otherwise the key was replaced between the reads of the file and of the key
                    raise

    def rotate_key(self) -> Iterator[str]:
        """Encrypt all secrets with a new key, file by file; yield each file's function once it is written.

        The key file has both keys until all files are written, so every secret can be read at every moment. If an earlier rotation was interrupted,
        this one continues with its key. Raises OSError, and SecretError, with nothing changed, if a secret cannot be decrypted.
        """
        with self._locked():
            for unfinished in self.directory.glob(".*"):  # of a process that was killed; such a file may have a key
                unfinished.unlink()
            plain = {}
            for path in sorted(self.directory.glob(f"*{END}")):
                function = _function_of(path)
                plain[function] = self._decrypted(function, self._sealed(function))
            if not (keys := self._keys()):
                return
            if len(keys) == 1:
                keys = self._write_keys([secrets.token_bytes(KEY_BYTES), *keys])
            for function, values in plain.items():
                self._write(
                    function, {name: _encrypted(keys[0], function, name, each) for name, each in values.items()}
                )
                yield function
            self._write_keys(keys[:1])

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Open a scope in which no process changes a secret or the key."""
        with self._locked(fcntl.LOCK_SH) if self.directory.is_dir() else nullcontext():
            yield

    def _decrypted(self, function: str, sealed: dict[str, bytes]) -> dict[str, bytes]:
        if not sealed:
            return {}
        ciphers = [AESGCM(key) for key in self._keys()]
        return {name: self._opened(ciphers, function, name, each) for name, each in sealed.items()}

    def _opened(self, ciphers: list[AESGCM], function: str, name: str, sealed: bytes) -> bytes:
        for cipher in ciphers:
            with suppress(InvalidTag, ValueError):
                return cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound_to(function, name))
        raise SecretError(
            f"the secret {name} of {function} cannot be decrypted with this site's key ({self._key_file}); put it again"
        )

    def _sealed(self, function: str) -> dict[str, bytes]:
        found = _read(self._file_of(function))
        return found.secrets if isinstance(found, SealedSecrets) else found

    @contextmanager
    def _locked(self, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Lock the store against changes by other threads and processes.
        Otherwise two concurrent read-modify-writes would lose one of the changes."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, how)
            yield
        finally:
            os.close(directory)

    def _write(self, function: str, sealed: dict[str, bytes]) -> None:
        atomic_files.write(self._file_of(function), msgspec.msgpack.encode(SealedSecrets(function, sealed)))

    def _file_of(self, function: str) -> Path:
        return self.directory / f"{name_of(function)}{END}"

    @property
    def _key_file(self) -> Path:
        return self.directory / "key"

    def _keys(self) -> list[bytes]:
        """Return the keys, the encrypting one first; an empty list without a key file. Raises SecretError."""
        try:
            with open(self._key_file, "rb") as file:
                mode, data = os.fstat(file.fileno()).st_mode, file.read()
        except FileNotFoundError:
            return []
        if mode & 0o077:
            raise SecretError(f"{self._key_file} can be read by others; run: chmod 600 {self._key_file}")
        if len(data) not in (KEY_BYTES, 2 * KEY_BYTES):
            raise SecretError(
                f"{self._key_file} has {len(data)} bytes instead of {KEY_BYTES}; restore it from a backup"
            )
        return [data[:KEY_BYTES], *([data[KEY_BYTES:]] if len(data) > KEY_BYTES else [])]

    def _write_keys(self, keys: list[bytes]) -> list[bytes]:
        atomic_files.write(self._key_file, b"".join(keys))
        return keys


def _encrypted(key: bytes, function: str, name: str, value: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, value, _bound_to(function, name))


def _read(path: Path) -> SealedSecrets | dict[str, bytes]:
    """Read a file; return only its secrets if an earlier version wrote it, without the function's name.

    Raises SecretError if it is damaged."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=SealedSecrets | dict[str, bytes])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise SecretError(f"{path} is damaged ({error}); remove it and put the secrets again") from None


def _function_of(path: Path) -> str:
    """Return the function whose secrets a file has. Raises SecretError."""
    found, name = _read(path), path.name.removesuffix(END)
    function = found.function if isinstance(found, SealedSecrets) else name
    if name_of(function) != name:
        raise SecretError(f"{path} does not name the function or store that has these secrets; put one of them again")
    return function


def _bound_to(function: str, name: str) -> bytes:
    return f"{len(function)}:{function}:{name}".encode()
