"""The hash chain that names the content of blocks: it covers exactly what a key or value depends on.

A block's hash covers its tokens, the images that some of them represent and, through the chain, everything before it. The chain starts from (tenant
salt, identity of the cache, adapter), so that no hit crosses tenants, models, weights, arithmetic or layouts. The names stay valid for later
processes, because the tiers keep blocks under them. This module is independent of where a block is.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from pilotlight.engine.images.prompt import SequenceImage, images_name

_DIGEST_BYTES = 32  # long enough to rule out collisions, by which one conversation could use the cache of another


class CacheIdentity(NamedTuple):
    """The properties that two caches must share to exchange blocks."""

    model: str
    dtype: str
    block_size: int
    layout: str = ""  # the layout of a block's bytes, and the device whose arithmetic computed them
    weights: bytes = b""  # fingerprint of the checkpoint


def chain_root(salt: bytes, identity: CacheIdentity, adapter: str = "") -> bytes:
    """Return the hash from which a chain starts. `adapter`: digest of the adapter in use, or ""."""
    model, dtype, block_size, layout, weights = identity
    root = blake2b(digest_size=_DIGEST_BYTES)
    parts = (salt, model.encode(), dtype.encode(), str(block_size).encode(), layout.encode(), weights)
    for part in (*parts, adapter.encode()) if adapter else parts:
        root.update(len(part).to_bytes(8, "little"))  # the length keeps ("a", "bc") and ("ab", "c") apart
        root.update(part)
    return root.digest()


def block_name(block_hash: bytes, group: int) -> bytes:
    """Return the name of a layer group's block for a hash of tokens: the hash itself for group 0."""
    return block_hash if group == 0 else block_hash[:-1] + bytes([block_hash[-1] ^ group])


def extend_chain(
    chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, images: Sequence[SequenceImage] = ()
) -> None:
    """Append the missing hashes of all full blocks of `token_ids` to `chain`.

    `images`: the images that some of the tokens represent.
    """
    parent = chain[-1] if chain else root
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size])
        named = images_name(images, start, start + block_size) if images else b""
        parent = blake2b(parent + tokens.tobytes() + named, digest_size=_DIGEST_BYTES).digest()
        chain.append(parent)
