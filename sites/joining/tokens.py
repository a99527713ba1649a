"""Tokens for joining a network: each is valid once, for minutes, and can be revoked.

The network's folder keeps their digests. A token contains the fingerprint of the network's authority, so a machine needs nothing else to authenticate
the router.
"""

import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from pilotlight.support import atomic_files

PREFIX = "pj-"
KEPT_S = 30 * 86_400.0  # used and expired tokens are deleted after this time


class TokenError(Exception):
    """A token is not accepted; the message has the reason."""


class JoinToken(NamedTuple):
    secret: str
    fingerprint: str  # fingerprint of the authority

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Parse a token. Raises TokenError."""
        secret, _, fingerprint = text.strip().partition(".")
        if not secret.startswith(PREFIX) or len(fingerprint) != 64:
            raise TokenError("this is not a token of `pilotlight network token`: paste the whole line")
        return cls(secret, fingerprint)

    def __str__(self) -> str:
        return f"{self.secret}.{self.fingerprint}"


class KeptToken(msgspec.Struct, frozen=True):
    """A token in the folder's list, without its secret."""

    id: str  # its name for `pilotlight network revoke`
    sha256: str
    expires_s: float
    used_by: str = ""
    revoked: bool = False

    def state(self, now_s: float) -> str:
        if self.used_by:
            return f"used by {self.used_by}"
        return "revoked" if self.revoked else "expired" if now_s >= self.expires_s else "open"


class Tokens:
    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "tokens.json"

    def create(self, minutes: float, fingerprint: str) -> JoinToken:
        secret, now_s = PREFIX + secrets.token_urlsafe(24), time.time()
        kept = KeptToken(secrets.token_hex(3), _digest_of(secret), now_s + 60 * minutes)
        with self._locked():
            recent = [each for each in self.kept() if each.expires_s + KEPT_S > now_s]
            self._write([*recent, kept])
        return JoinToken(secret, fingerprint)

    def kept(self) -> list[KeptToken]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[KeptToken])
        except FileNotFoundError:
            return []

    def redeem(self, secret: str, site: str, admit: Callable[[], None] = lambda: None) -> None:
        """Mark a token as used and call `admit`; if that fails, the token stays valid.

        Raises TokenError if the token is unknown, used, revoked or expired.
        """
        digest = _digest_of(secret)
        with self._locked():
            tokens = self.kept()
            found = next((i for i, each in enumerate(tokens) if secrets.compare_digest(each.sha256, digest)), None)
            if found is None:
                raise TokenError("this token is not known here: `pilotlight network token` makes one")
            state = tokens[found].state(time.time())
            if state != "open":
                raise TokenError(f"this token is {state}: `pilotlight network token` makes another")
            used = msgspec.structs.replace(tokens[found], used_by=site)
            self._write([*tokens[:found], used, *tokens[found + 1 :]])
            try:
                admit()
            except BaseException:
                self._write(tokens)
                raise

    def revoke(self, id: str) -> bool:
        """Revoke the token with this id. Return whether there was one that could still be revoked."""
        with self._locked():
            tokens = self.kept()
            changed = [msgspec.structs.replace(each, revoked=True) if each.id == id else each for each in tokens]
            self._write(changed)
        return changed != tokens

    def _write(self, tokens: list[KeptToken]) -> None:
        atomic_files.write(self._file, msgspec.json.encode(tokens))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Open a scope in which no other process changes the tokens, so that a token lets in only one machine."""
        directory = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)


def join_line(folder: Path, port: int, minutes: float, fingerprint: str) -> str:
    """Make a token and return the command with which one machine joins.
    `folder` is the network's. Raises OSError if its files cannot be read or written."""
    host = (folder / "host").read_text()
    made = Tokens(folder).create(minutes, fingerprint)
    return f"pilotlight join https://{f'[{host}]' if ':' in host else host}:{port} {made}"


def _digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
