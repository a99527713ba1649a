"""Sessions: a bounded, expiring table from salted digests of prefixes to the sites that hold them.

A conversation is known by the name that its client gave it (`x-session-affinity`, `prompt_cache_key`) or, without a name, by a chain of digests over
its own messages: every turn repeats the earlier ones, so one of its prefixes is known. All digests are keyed with the tenant's salt: equal
conversations of two tenants have nothing in common (invariant I4). Only digests, site names and token counts are stored, no text.

Several sites can hold a prefix: a system prompt is at all sites with one of its conversations, and a conversation also at the site that it left a
moment ago. The newest holder of a conversation's own prefix is its home; the other holders still lower their predicted prefill times.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec
from blake3 import blake3

from pilotlight.edge_router.routing.views import Home
from pilotlight.wire.hop.headers import lasting
from pilotlight.wire.hop.prefixes import short_digest

DIGEST_BYTES = 16  # 2^64 entries before a collision is likely
REMEMBERED_PREFIXES = 32  # newest prefixes of a turn, which are remembered; a branch from an earlier message is found by prefixes of earlier turns
FIRST_PREFIXES = 8  # first prefixes of a request, by which its site is chosen and its home is found
LAST_PREFIXES = 248
# in bytes. A seed is a model's name with the tools of its request; the digest of a longer one, usually one with tools, is not cached.
SHORT_SEED = 256
HOLDERS = 6  # newest sites remembered for one prefix: older ones have probably evicted it


class Prefix(NamedTuple):
    digest: bytes
    tokens: int  # estimated number of tokens up to the prefix's end
    is_telling: bool = True  # it identifies a conversation, which a system prompt does not


class Recall(msgspec.Struct, frozen=True):
    """The known places of a conversation's cache."""

    home: Home | None
    held: dict[str, int]  # site -> tokens of this prompt in its prefix cache, shared beginnings included


class ConversationFingerprint(msgspec.Struct, frozen=True):
    """The remembered prefixes of one request's conversation."""

    session: bytes | None  # digest of the name that the client gave the conversation
    prefixes: tuple[Prefix, ...]  # the shortest first
    tokens: int
    # (short digest, tokens up to there), longest first: looked up in published digests
    short_digests: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, session: bytes | None, prefixes: tuple[Prefix, ...], tokens: int) -> "ConversationFingerprint":
        newest = prefixes[: -REMEMBERED_PREFIXES - 1 : -1]
        short = tuple([(short_digest(digest), tokens) for digest, tokens, _ in newest])
        return cls(session, prefixes, tokens, short)

    @property
    def placement_key(self) -> bytes | None:
        """Return a digest that is the same for all turns of a conversation, by which all routers place it.
        None if no session is named and no prefix identifies the conversation."""
        if self.session is not None:
            return self.session
        for prefix in self.prefixes:
            if prefix.is_telling:
                return prefix.digest
        return None


@lru_cache(4096)
def tenant_salt(key: str, account: str, network_secret: str = "") -> bytes:
    """Return the salt of a tenant, from a client's key and an account.
    All routers of the network compute the same salt. It cannot be computed without the network's secret."""
    hasher = blake3(derive_key_context="pilotlight edge_router tenant salt v1")
    for part in (lasting(network_secret), account, key):
        raw = part.encode()
        hasher.update(len(raw).to_bytes(8, "big") + raw)
    return hasher.digest(32)


def session_digest(salt: bytes, model: str, name: str) -> bytes:
    raw = model.encode()
    return blake3(b"session" + len(raw).to_bytes(8, "big") + raw + name.encode(), key=salt).digest(DIGEST_BYTES)


def prefix_chain(salt: bytes, seed: bytes, pieces: Iterable[tuple[bytes, bool]]) -> tuple[Prefix, ...]:
    """Return one prefix for each piece; its digest covers `seed` (model, tools) and all pieces so far.

    Of many prefixes, the first and the last are kept. A piece that does not identify a conversation is a prefix that all of a tenant's conversations
    share. Sites may hold it, but it is no reason to stay at one of them.
    """
    link = _root(salt, seed) if len(seed) <= SHORT_SEED else _root.__wrapped__(salt, seed)
    size = len(seed)
    first: list[Prefix] = []
    last: deque[Prefix] = deque(maxlen=LAST_PREFIXES)
    for piece, is_telling in pieces:
        link = blake3(link + piece, key=salt).digest()
        size += len(piece)
        # assumes four bytes a token, as in English with most vocabularies
        prefix = Prefix(link[:DIGEST_BYTES], size // 4, is_telling)
        (first if len(first) < FIRST_PREFIXES else last).append(prefix)
    return (*first, *last)


@lru_cache(4096)
def _root(salt: bytes, seed: bytes) -> bytes:
    """Return the digest with which all of a tenant's conversations with a model start."""
    return blake3(b"prefix" + seed, key=salt).digest()


class _Holder(msgspec.Struct, frozen=True):
    site: str
    expires_at: float


class _Entry(msgspec.Struct, frozen=True):
    holders: tuple[_Holder, ...]  # newest first
    tokens: int


class SessionTable:
    def __init__(self, max_entries: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the oldest first; these expire first

    def __len__(self) -> int:
        return len(self._entries)

    def recall(self, conversation: ConversationFingerprint) -> Recall:
        now = self._clock()
        held: dict[str, int] = {}
        longest: Home | None = None
        for digest, tokens, is_telling in reversed(conversation.prefixes):
            for site in self._holders(digest, now):
                held.setdefault(site, tokens)
                if longest is None and is_telling:
                    longest = Home(site, tokens, by_name=False)
            if longest is not None and len(held) >= HOLDERS:
                break
        named = self._holders(conversation.session, now) if conversation.session is not None else ()
        if not named:
            return Recall(longest, held)
        assert conversation.session is not None
        # The name alone identifies the session: its prefixes may all be unknown.
        tokens = held.get(named[0], self._entries[conversation.session].tokens)
        cached = held[named[0]] = min(tokens, conversation.tokens)
        return Recall(Home(named[0], cached, by_name=True), held)

    def learn(self, conversation: ConversationFingerprint, site: str) -> None:
        """Record that `site` has started to answer: it now holds every prefix of this conversation."""
        now = self._clock()
        for prefix in conversation.prefixes[-REMEMBERED_PREFIXES:]:
            self._put(prefix.digest, site, prefix.tokens, now)
        if conversation.prefixes and not conversation.prefixes[0].is_telling:
            # renew the shared prefix, because one of its conversations is in use
            self._put(conversation.prefixes[0].digest, site, conversation.prefixes[0].tokens, now)
        if conversation.session is not None:
            self._put(conversation.session, site, conversation.tokens, now)
        self._forget(now)

    def _holders(self, digest: bytes, now: float) -> tuple[str, ...]:
        entry = self._entries.get(digest)
        return () if entry is None else tuple([each.site for each in entry.holders if each.expires_at > now])

    def _put(self, digest: bytes, site: str, tokens: int, now: float) -> None:
        known = self._entries.pop(digest, None)
        newest = _Holder(site, now + self._ttl_s)
        older = [holder for holder in known.holders if holder.site != site] if known is not None else []
        self._entries[digest] = _Entry((newest, *older[: HOLDERS - 1]), tokens)

    def _forget(self, now: float) -> None:
        while self._entries:
            oldest = next(iter(self._entries))
            if len(self._entries) <= self._max_entries and self._entries[oldest].holders[0].expires_at > now:
                return
            del self._entries[oldest]
