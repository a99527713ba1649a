"""Secrets of deployed functions in transit and at rest at a router, encrypted by AES-256-GCM.

The key is derived from the network's secret.

Each is bound to its function and its name.
"""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

NONCE_BYTES = 12
MAX_SECRET_BYTES = 5 << 10  # the platform's limit for a variable


class UnsealedError(Exception):
    """It was sealed under another key, or for something else."""


def seal(key: str, function: str, name: str, value: str) -> bytes:
    """Return nonce, ciphertext and tag. `key`: the network's secret."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _cipher(key).encrypt(nonce, value.encode(), _bound_to(function, name))


def unseal(key: str, function: str, name: str, sealed: bytes) -> str:
    """Raises UnsealedError."""
    try:
        return _cipher(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound_to(function, name)).decode()
    except (InvalidTag, ValueError):
        raise UnsealedError(f"the secret {name} of {function} does not open with this network's secret") from None


def _cipher(key: str) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, None, b"pilotlight secrets of functions").derive(key.encode()))


def _bound_to(function: str, name: str) -> bytes:
    return f"{len(function)}:{function}:{name}".encode()
