"""Secrets of deployed functions in transit, and at rest at a router, encrypted with AES-256-GCM.

The key is derived from the network's secret. While a network changes its secret, the one that signs also encrypts, and both decrypt. Each secret is
bound to its function and its name. Imports cryptography when it encrypts or decrypts, because most starts do neither.
"""

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from pilotlight.wire.hop.headers import signing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12
MAX_SECRET_BYTES = 5 << 10  # Cloudflare's limit for a variable


class UnsealedError(Exception):
    """The secret was encrypted under another key, or for another function or name."""


def seal(key: str, function: str, name: str, value: str) -> bytes:
    """Encrypt a value; return nonce, ciphertext and tag. `key` is the network's secret."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _cipher(signing(key)).encrypt(nonce, value.encode(), _bound_to(function, name))


def unseal(key: str, function: str, name: str, sealed: bytes) -> str:
    """Decrypt a value. Raises UnsealedError."""
    from cryptography.exceptions import InvalidTag

    for each in key.split(","):
        with suppress(InvalidTag, ValueError):
            return _cipher(each).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound_to(function, name)).decode()
    raise UnsealedError(f"the secret {name} of {function} does not open with this network's secret")


def _cipher(key: str) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return AESGCM(HKDF(SHA256(), 32, None, b"pilotlight secrets of functions").derive(key.encode()))


def _bound_to(function: str, name: str) -> bytes:
    return f"{len(function)}:{function}:{name}".encode()
