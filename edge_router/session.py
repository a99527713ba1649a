"""Which site holds a conversation's beginning: a bounded, expiring table from salted digests to sites.

A conversation is known by the name its client gave it (`x-session-affinity`, `prompt_cache_key`) and, without any name, by a chain of digests
over its own messages: every turn repeats the turns before it, so one of its prefixes has been seen. All digests are keyed with the tenant's
salt: equal conversations of two tenants have nothing in common (invariant I4). No text is kept, only digests, site names and token counts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from blake3 import blake3

from edge_router.policy import Home

DIGEST_BYTES = 16  # 2^64 entries before a collision is likely
REMEMBERED_PREFIXES = 32  # of one conversation: a branch from further back is treated as new


class Prefix(NamedTuple):
    digest: bytes
    tokens: int  # up to here, estimated


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is remembered of one request's conversation."""

    session: bytes | None  # digest of the name the client gave it
    prefixes: tuple[Prefix, ...]  # growing
    tokens: int

    @property
    def placement_key(self) -> bytes | None:
        """The same for every turn, so that routers which share nothing place it at the same site."""
        if self.session is not None:
            return self.session
        return self.prefixes[0].digest if self.prefixes else None


@lru_cache(4096)
def tenant_salt(authorization: str, account: str, network_secret: str = "") -> bytes:
    """One salt per tenant. The network's routers agree on it, and nobody without its secret can compute it."""
    hasher = blake3(derive_key_context="pilotlight edge_router tenant salt v1")
    for part in (network_secret, account, authorization):
        raw = part.encode()
        hasher.update(len(raw).to_bytes(8, "big") + raw)
    return hasher.digest(32)


def session_digest(salt: bytes, model: str, name: str) -> bytes:
    raw = model.encode()
    return blake3(b"session" + len(raw).to_bytes(8, "big") + raw + name.encode(), key=salt).digest(DIGEST_BYTES)


def prefix_chain(salt: bytes, seed: bytes, pieces: Iterable[tuple[bytes, bool]]) -> tuple[Prefix, ...]:
    """One prefix per piece, each digest covering all pieces so far. `seed` is what precedes them all (model, tools). A piece that is not marked
    as telling (a system prompt that all of a tenant's conversations share) extends the chain without becoming a prefix of its own."""
    link = blake3(b"prefix" + seed, key=salt).digest()
    size = len(seed)
    prefixes = []
    for piece, is_telling in pieces:
        link = blake3(link + piece, key=salt).digest()
        size += len(piece)
        if is_telling:
            prefixes.append(Prefix(link[:DIGEST_BYTES], size // 4))  # four bytes a token: English in most vocabularies
    return tuple(prefixes)


class _Entry(NamedTuple):
    site: str
    tokens: int
    expires_at: float


class SessionTable:
    def __init__(self, max_entries: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # oldest first, so earliest to expire first

    def __len__(self) -> int:
        return len(self._entries)

    def home(self, conversation: Conversation) -> Home | None:
        named = self._find(conversation.session) if conversation.session is not None else None
        longest = next(
            ((entry, prefix) for prefix in reversed(conversation.prefixes) if (entry := self._find(prefix.digest))),
            None,
        )
        if named is not None:
            seen = longest[1].tokens if longest is not None and longest[0].site == named.site else named.tokens
            return Home(named.site, min(seen, conversation.tokens), by_name=True)
        if longest is not None:
            return Home(longest[0].site, longest[1].tokens, by_name=False)
        return None

    def learn(self, conversation: Conversation, site: str) -> None:
        """`site` has begun to answer: it now holds every prefix of this conversation."""
        expires_at = self._clock() + self._ttl_s
        for prefix in conversation.prefixes[-REMEMBERED_PREFIXES:]:
            self._put(prefix.digest, _Entry(site, prefix.tokens, expires_at))
        if conversation.session is not None:
            self._put(conversation.session, _Entry(site, conversation.tokens, expires_at))
        self._forget()

    def _find(self, digest: bytes) -> _Entry | None:
        entry = self._entries.get(digest)
        return entry if entry is not None and entry.expires_at > self._clock() else None

    def _put(self, digest: bytes, entry: _Entry) -> None:
        self._entries[digest] = entry
        self._entries.move_to_end(digest)

    def _forget(self) -> None:
        now = self._clock()
        while self._entries:
            oldest = next(iter(self._entries))
            if len(self._entries) <= self._max_entries and self._entries[oldest].expires_at > now:
                return
            del self._entries[oldest]
