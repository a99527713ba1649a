"""A site's traffic, published to routers: each model's arrivals, and the cached conversation prefixes.

A router names a prefix by a digest, salted per tenant. The site can only compare digests, so no tenant can find out another's prefixes. The
record is an estimate of the engine's cache: it is limited to the cache's size, and emptied when the model leaves its last device.
"""

import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from pilotlight.wire.hop.prefixes import MAX_PUBLISHED, encode_prefixes
from pilotlight.wire.hop.status import ModelStatus

WINDOW_S = 10.0  # averaging time of rates: some hundred requests at a busy site
PUBLISH_EVERY_S = 10.0  # interval of new digests: 8,192 entries are 43 kB of status, and caches change slowly


class Traffic:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: defaultdict[str, _Model] = defaultdict(_Model)

    def arrived(self, model: str) -> None:
        self._models[model].requests.add(1, self._clock())

    def computed(
        self, model: str, prompt_tokens: int, cached_tokens: int, prefixes: Sequence[tuple[int, int]], kv_tokens: int
    ) -> None:
        """Record that a prompt is in the cache now.

        `prefixes` are pairs of (short digest, number of tokens up to there as the router estimates it), the longest first."""
        known = self._models[model]
        known.prompt_tokens += prompt_tokens
        known.cached_tokens += cached_tokens
        known.tokens.add(max(0, prompt_tokens - cached_tokens), self._clock())
        known.held.note(prefixes, kv_tokens)

    def forget(self, model: str) -> None:
        """Clear the prefixes of a model that has left its last device, and with it its cache."""
        if model in self._models:
            self._models[model].held.clear()

    def published(self, status: ModelStatus) -> ModelStatus:
        known, now = self._models.get(status.name), self._clock()
        if known is None:
            return status
        return replace(
            status,
            arriving_per_s=round(known.requests.per_s(now), 3),
            arriving_tokens_per_s=round(known.tokens.per_s(now), 1),
            prompt_tokens=known.prompt_tokens,
            cached_tokens=known.cached_tokens,
            prefixes=known.held.digest(now),
            prefixes_complete=known.held.is_complete,
        )


class _Model:
    def __init__(self) -> None:
        self.requests = Rate()
        self.tokens = Rate()
        self.prompt_tokens = self.cached_tokens = 0
        self.held = HeldPrefixes()


class Rate:
    """An exponentially weighted rate of events per second."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._at = float("-inf")

    def add(self, amount: float, now: float) -> None:
        self._per_s = self.per_s(now) + amount / WINDOW_S
        self._at = now

    def per_s(self, now: float) -> float:
        return self._per_s * math.exp(-max(0.0, now - self._at) / WINDOW_S) if self._per_s else 0.0


class HeldPrefixes:
    """The estimated prefixes in a model's cache, the least recently used first."""

    def __init__(self) -> None:
        self._segments: OrderedDict[int, int] = OrderedDict()  # digest -> tokens of the segment that ends there
        self._tokens = 0
        self._digest = b""
        self._digest_at = float("-inf")

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def is_complete(self) -> bool:
        return len(self._segments) <= MAX_PUBLISHED

    def note(self, prefixes: Sequence[tuple[int, int]], kv_tokens: int) -> None:
        for i, (digest, tokens) in enumerate(prefixes):  # the end of a prompt is evicted before its start
            before = prefixes[i + 1][1] if i + 1 < len(prefixes) else 0
            self._drop(digest)
            self._segments[digest] = max(0, tokens - before)
            self._tokens += self._segments[digest]
        while self._segments and (self._tokens > kv_tokens or len(self._segments) > 2 * MAX_PUBLISHED):
            self._drop(next(iter(self._segments)))

    def clear(self) -> None:
        self._segments.clear()
        self._tokens, self._digest, self._digest_at = 0, b"", float("-inf")

    def digest(self, now: float) -> bytes:
        if not 0 <= now - self._digest_at < PUBLISH_EVERY_S:
            self._digest = encode_prefixes(list(self._segments)[-MAX_PUBLISHED:])
            self._digest_at = now
        return self._digest

    def _drop(self, digest: int) -> None:
        self._tokens -= self._segments.pop(digest, 0)
