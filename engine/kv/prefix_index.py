"""The hash chain that names a block's content: everything a key or value depends on, and nothing else.

A block's hash covers its tokens and, through the chain, all tokens before it; the chain starts from (tenant salt,
model, dtype), so that no hit crosses tenants, models or arithmetic. Refuses to know where a block lies.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 32  # a collision would show one conversation's cache to another: as strong as the salt is secret


def chain_root(salt: bytes, model: str, dtype: str) -> bytes:
    root = blake2b(digest_size=_DIGEST_BYTES)
    for part in (salt, model.encode(), dtype.encode()):
        root.update(len(part).to_bytes(8, "little"))  # length first: ("a", "bc") must not equal ("ab", "c")
        root.update(part)
    return root.digest()


def extend_chain(chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `chain` the hash of every full block of `token_ids` that it lacks."""
    parent = chain[-1] if chain else root
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size])
        parent = blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
        chain.append(parent)
