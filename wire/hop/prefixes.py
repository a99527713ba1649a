"""The digest of cached prefixes that a site publishes: four bytes for each conversation prefix.

A prefix is known by the salted digest that routers compute over its text (edge_router/requests/session.py), so that another tenant's prompt never
matches. Only the first SHORT_BYTES of a digest are sent: with 8,192 published prefixes, one look-up in half a million takes an uncached prefix for
cached, which costs a misplaced prefill, never a wrong answer.
"""

import struct
from array import array
from base64 import b64decode
from binascii import b2a_base64
from collections.abc import Iterable
from functools import lru_cache
from sys import byteorder

SHORT_BYTES = 4
MAX_PUBLISHED = 8192  # 32 KiB per status and model; beyond it the least recently used are left out, and the digest counts as incomplete


MAX_PROMPT_PREFIXES = 48  # prefixes that a request lists: 512 characters of header


_NAMED = struct.Struct(">II")


def short_digest(digest: bytes) -> int:
    return int.from_bytes(digest[:SHORT_BYTES], "big")


def encode_prefixes(digests: Iterable[int]) -> bytes:
    """Encode digests, sorted, big-endian, so that equal sets have equal bytes."""
    packed = array("I", sorted(digests))
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


@lru_cache(maxsize=64)  # a digest is decoded repeatedly: for several statuses, and by a simulation's many routers
def decode_prefixes(raw: bytes) -> frozenset[int]:
    """Decode a site's digest. Raises ValueError on bytes that `encode_prefixes` cannot have written."""
    if len(raw) % SHORT_BYTES or len(raw) > MAX_PUBLISHED * SHORT_BYTES:
        raise ValueError(
            f"a prefix digest has at most {MAX_PUBLISHED} entries of {SHORT_BYTES} bytes; this one has {len(raw)} bytes"
        )
    packed = array("I", raw)
    if byteorder == "little":
        packed.byteswap()
    return frozenset(packed)


@lru_cache(maxsize=64)  # all routers of a network ask for the same changes
def changed_prefixes(before: bytes, after: bytes) -> tuple[bytes, bytes]:
    """Encode the prefixes that were added and removed between two digests."""
    old, new = decode_prefixes(before), decode_prefixes(after)
    return encode_prefixes(new - old), encode_prefixes(old - new)


def apply_changes(held: frozenset[int], came: bytes, gone: bytes) -> frozenset[int]:
    """Return the set after changes.
    Raises ValueError for bytes that `changed_prefixes` cannot have written, and above MAX_PUBLISHED."""
    if not held:
        return decode_prefixes(came)  # the cached set itself: it may have 8,192 entries, so it is not copied
    found = held - decode_prefixes(gone) | decode_prefixes(came)
    if len(found) > MAX_PUBLISHED:
        raise ValueError(f"a prefix digest has at most {MAX_PUBLISHED} entries; with these changes it has {len(found)}")
    return found


def encode_prompt_prefixes(prefixes: Iterable[tuple[int, int]]) -> str:
    """Encode a prompt's prefixes as a header's value: (short digest, estimated tokens up to there) each."""
    packed = b"".join([_NAMED.pack(digest, min(tokens, 2**32 - 1)) for digest, tokens in prefixes])
    return b2a_base64(packed[: 8 * MAX_PROMPT_PREFIXES], newline=False).decode()


def decode_prompt_prefixes(value: str) -> tuple[tuple[int, int], ...]:
    """Decode a prompt's prefixes.
    Raises ValueError for values that `encode_prompt_prefixes` cannot produce."""
    raw = b64decode(value, validate=True)
    if len(raw) % 8 or len(raw) > 8 * MAX_PROMPT_PREFIXES:
        raise ValueError(
            f"named prefixes have 8 bytes each and are at most {MAX_PROMPT_PREFIXES}; these have {len(raw)} bytes"
        )
    return tuple(_NAMED.iter_unpack(raw))
