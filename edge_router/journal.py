"""What of a stream its client has: the part of a site's events that may be passed on, and the tokens they carry.

A site's events become the client's when their mark is here (wire/continuation.py): what was cut off before it is made again by the next site,
so nothing is told twice and nothing is left out. Knows events and marks; refuses to know sockets, sites and clients.
"""

from array import array
from collections.abc import Sequence

from edge_router.plain import PlainEvent
from wire.chat import FinishReason
from wire.continuation import (
    MAX_DELIVERED_BYTES,
    ContinuationError,
    Delivered,
    Delivery,
    Mark,
    encode_delivery,
    is_drain_notice,
    unmarked,
)
from wire.sse import Event

MAX_HELD_BYTES = 8 << 20  # of events whose mark has not come: a site writes them in one piece, at most some hundred kB


class Journal:
    def __init__(self) -> None:
        self.site_is_draining = False  # the one that is talking has said so
        self.broken: ContinuationError | None = None  # what it says cannot be gone on with
        self.num_tokens = 0
        self._choices: list[_Choice] = []
        self._cached_tokens = 0
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.last_words: Event | None = None  # an event without mark, at whose site nothing has followed it

    def pass_on(self, events: Sequence[Event]) -> bytes:
        """What the client may now be told. Of what no honest site sends `broken` tells, behind all that came before it."""
        ready: list[bytes] = []
        for event in events:
            try:
                raw, mark = unmarked(event.raw)
                if mark is not None:
                    self._note(mark)
            except ContinuationError as error:
                self.broken = error
                break
            if mark is None and event.data is None:  # a comment is no part of the answer
                if is_drain_notice(raw):
                    self.site_is_draining = True
                else:
                    ready.append(raw)
                continue
            if mark is not None and not self._held:
                ready.append(raw)
                self.last_words = None
                continue
            self._held.append(raw)
            self._held_bytes += len(raw)
            self.last_words = event
            if mark is not None or event.is_done:
                ready += self._held
                self.forget_held()
        if self._held_bytes > MAX_HELD_BYTES:
            self.broken = ContinuationError(f"more than {MAX_HELD_BYTES >> 20} MiB of events without their mark")
        return ready[0] if len(ready) == 1 else b"".join(ready)

    def passes(self, event: PlainEvent) -> bool:
        """It may be told now, and counts as told. False: it is for `pass_on`, and nothing has happened."""
        if self._held or self.site_is_draining or self.broken is not None or event.choice >= len(self._choices):
            return False
        choice = self._choices[event.choice]
        if choice.finish_reason is not None:
            return False
        choice.token_ids.extend(event.token_ids)
        self.num_tokens += len(event.token_ids)
        self._cached_tokens = event.cached_tokens
        self.last_words = None
        return True

    def rest(self) -> bytes:
        """What has no mark and never will: a site's error event that no other site would spare the client."""
        held = b"".join(self._held)
        self.forget_held()
        return held

    def begin_site(self) -> None:
        """Another site goes on: what the one before had not completed does not count."""
        self.forget_held()
        self.site_is_draining, self.broken = False, None

    def forget_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0
        self.last_words = None

    def delivery(self) -> bytes:
        """For the site that goes on; empty while the client has nothing."""
        if not self._choices:
            return b""
        choices = tuple(Delivered(tuple(choice.token_ids), choice.finish_reason) for choice in self._choices)
        encoded = encode_delivery(Delivery(choices, self._cached_tokens))
        if len(encoded) > MAX_DELIVERED_BYTES:
            raise ContinuationError(f"the answer is too long to be continued: {self.num_tokens} tokens")
        return encoded

    def _note(self, mark: Mark) -> None:
        while len(self._choices) <= mark.choice:
            self._choices.append(_Choice())
        choice = self._choices[mark.choice]
        if choice.finish_reason is not None:
            raise ContinuationError(f"choice {mark.choice} went on after its end")
        choice.token_ids.extend(mark.token_ids)
        choice.finish_reason = mark.finish_reason
        self.num_tokens += len(mark.token_ids)
        self._cached_tokens = mark.cached_tokens


class _Choice:
    __slots__ = ("finish_reason", "token_ids")

    def __init__(self) -> None:
        self.token_ids: array[int] = array("i")  # four bytes a token, for streams that are open for long
        self.finish_reason: FinishReason | None = None
