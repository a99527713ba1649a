"""Which prompts a model's replica has computed lately, as far as the runtime knows: chains of digests over a few tokens each.

A guess about the engine's prefix cache, bounded by what that could hold; being wrong costs time, never an answer. Digests begin with the tenant's
salt, so that no tenant's prompts say anything about another's. Refuses to know what asks.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from pilotlight.engine.api.protocol import Submit

CHUNK = 64  # tokens to a digest: four KV blocks of the usual 16; 1.5 us each
_DIGEST_BYTES = 8  # a collision makes a guess wrong: one in 2^44 for a million chunks

Chain = tuple[bytes, ...]  # one digest for each whole chunk from the beginning on


def root_of(submit: Submit) -> bytes:
    """Return the salt of a sequence's chain: its tenant's, its adapter's and its first image's, where it has such: as tokens, all images of a size
    are alike."""
    salt = submit.salt if submit.adapter is None else submit.salt + submit.adapter.digest.encode()
    return salt + submit.images[0].digest if submit.images else salt


def chain_of(salt: bytes, token_ids: Sequence[int]) -> Chain:
    digest = blake2b(salt, digest_size=_DIGEST_BYTES)
    chain = []
    for start in range(0, len(token_ids) - CHUNK + 1, CHUNK):
        digest.update(array("q", token_ids[start : start + CHUNK]))
        chain.append(digest.digest())
    return tuple(chain)


class PrefixMemory:
    """Prompts of one replica. What was used longest ago is forgotten first, as it is in the cache."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def held_tokens(self, chain: Chain) -> int:
        """Return how many of the chain's tokens are believed to be in the cache."""
        for i, digest in enumerate(chain):
            if digest not in self._known:
                return i * CHUNK
        return len(chain) * CHUNK

    def remember(self, chain: Chain, capacity_tokens: int) -> None:
        """Note a chain, its tail as older than its head: without its head a chain is useless."""
        for digest in reversed(chain):
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) * CHUNK > capacity_tokens:
            self._known.popitem(last=False)

    def forget(self) -> None:
        self._known.clear()
