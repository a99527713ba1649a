"""The hash chain that names a block's content: everything a key or value depends on, and nothing else.

A block's hash covers its tokens, the images that some of them stand for and, through the chain, all before it; the chain starts from (tenant salt,
identity of the cache, adapter), so that no hit crosses tenants, models, weights, arithmetic or layouts. The names outlive the
process that made them: blocks wait under them in the tiers for the next one. Refuses to know where a block lies.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from pilotlight.engine.images.prompt import SequenceImage, images_name

_DIGEST_BYTES = 32  # a collision would show one conversation's cache to another: as strong as the salt is secret


class CacheIdentity(NamedTuple):
    """All that must agree before the bytes of one cache mean anything to another."""

    model: str
    dtype: str
    block_size: int
    layout: str = ""  # how the bytes of a block are ordered, and which device's arithmetic made them
    weights: bytes = b""  # the checkpoint's fingerprint


def chain_root(salt: bytes, identity: CacheIdentity, adapter: str = "") -> bytes:
    """Return where a chain begins. `adapter`: the digest of the one that changes the weights; "": none does."""
    model, dtype, block_size, layout, weights = identity
    root = blake2b(digest_size=_DIGEST_BYTES)
    parts = (salt, model.encode(), dtype.encode(), str(block_size).encode(), layout.encode(), weights)
    for part in (*parts, adapter.encode()) if adapter else parts:
        root.update(len(part).to_bytes(8, "little"))  # length first: ("a", "bc") must not equal ("ab", "c")
        root.update(part)
    return root.digest()


def block_name(block_hash: bytes, group: int) -> bytes:
    """Return the name of the block that one group of layers has for the tokens of a hash: the hash itself for the first."""
    return block_hash if group == 0 else block_hash[:-1] + bytes([block_hash[-1] ^ group])


def extend_chain(
    chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, images: Sequence[SequenceImage] = ()
) -> None:
    """Append to `chain` the hash of every full block of `token_ids` that it lacks. `images`: that some of them stand for."""
    parent = chain[-1] if chain else root
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size])
        named = images_name(images, start, start + block_size) if images else b""
        parent = blake2b(parent + tokens.tobytes() + named, digest_size=_DIGEST_BYTES).digest()
        chain.append(parent)
