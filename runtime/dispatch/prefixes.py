"""The prompts that a replica has computed lately, as chains of digests over 64 tokens each.

They estimate the content of the engine's prefix cache and are limited to its size; a wrong estimate costs time only. Digests depend on the tenant's
salt, so that no tenant can find out another's prompts.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from pilotlight.engine.api.protocol import Submit

CHUNK = 64  # tokens per digest: four KV blocks of the usual 16 tokens; a digest takes 1.5 us
_DIGEST_BYTES = 8  # length of a digest; with a million chunks, one lookup in 2^44 collides and gives a wrong estimate

Chain = tuple[bytes, ...]  # one digest for each full chunk from the start


def root_of(submit: Submit) -> bytes:
    """Return the root of a sequence's chain: its tenant's salt, its adapter and its first image, if any.

    The image is included because prompts with different images of the same size have equal tokens.
    """
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
    """The estimated content of one replica's prefix cache, evicted in LRU order like the cache."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def held_tokens(self, chain: Chain) -> int:
        """Return the number of tokens at the chain's start that are estimated to be cached."""
        for i, digest in enumerate(chain):
            if digest not in self._known:
                return i * CHUNK
        return len(chain) * CHUNK

    def remember(self, chain: Chain, capacity_tokens: int) -> None:
        """Record a chain. Its end is evicted before its start, because the end is useless without the start."""
        for digest in reversed(chain):
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) * CHUNK > capacity_tokens:
            self._known.popitem(last=False)

    def forget(self) -> None:
        self._known.clear()
