"""A connection that stops speaking HTTP: the client's side of an upgrade, and two connections joined into one.

A tunnel holds no task and looks at nothing but the ends of the site's frames, between which alone it can tell the client a last word of its own. Who
cannot take more stops the other side from being read, so what waits is bounded by two transports' buffers; one clock ends a tunnel whose far side is
silent or one of whose sides takes nothing.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from wire.http.frame_ends import FrameEnds

BUFFER_BYTES = 64 << 10  # of each direction, beside the kernels' own
EARLY_BYTES = 64 << 10  # that a client may send before its upgrade is answered
# A server that stops gives its connections a second (GRACE_S): so long for the frame under way, and then for the client to hear its last word. A
# connection that is closed while its client sends is reset, and what the client had not read may be lost.
FRAME_S, HEAR_S = 0.5, 0.4

Headers = Sequence[tuple[str, str]]


class Upgrading(asyncio.Protocol):
    """A client that has asked for an upgrade. It gets a plain answer, or is joined to the far side."""

    def __init__(
        self, scope: dict[str, Any], early: bytes, transport: asyncio.Transport, on_lost: Callable[[], None]
    ) -> None:
        self.scope = scope
        self.transport = transport
        self.is_gone = False
        self._early = bytearray(early)
        self._on_lost = on_lost
        self._task: asyncio.Task[Any] | None = None
        transport.set_protocol(self)

    def cancel_when_gone(self, task: "asyncio.Task[Any] | None") -> None:
        """None takes it back."""
        self._task = task

    def answer(self, head: bytes, body: bytes) -> None:
        """Instead of an upgrade."""
        self.transport.write(head + body)
        self.transport.close()

    def join(self, head: bytes, far: asyncio.Transport, first: bytes, *, silence_s: float, stall_s: float) -> "Tunnel":
        """`head` is the answer that switches protocols; `first` is what the far side has sent behind its own."""
        self.transport.write(head + first)
        tunnel = Tunnel(self.transport, far, silence_s=silence_s, stall_s=stall_s, on_lost=self._on_lost)
        tunnel.far.frames.feed(first)
        if self._early:
            far.write(bytes(self._early))
        return tunnel

    def data_received(self, data: bytes) -> None:
        self._early += data
        if len(self._early) > EARLY_BYTES:
            self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True
        self._on_lost()
        if self._task is not None:
            self._task.cancel()


class Tunnel:
    """Until `ended`, which says why."""

    def __init__(
        self,
        near: asyncio.Transport,
        far: asyncio.Transport,
        *,
        silence_s: float,
        stall_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.near, self.far = _Side(near, self._lost, "client"), _FarSide(far, self._lost, "site")
        self.near.other, self.far.other = self.far, self.near
        self._silence_s, self._stall_s = silence_s, stall_s
        self._on_lost = on_lost
        self._leaving: str | None = None  # why, once the client has been told, or while a frame is waited for
        self._deadline: asyncio.TimerHandle | None = None
        self._every_s = min(silence_s, stall_s) / 4
        self._timer = loop.call_later(self._every_s, self._look)
        for side in (self.near, self.far):
            side.begin()

    def leave(self, why: str, last: bytes) -> None:
        """Ends with `last`, a control frame, for the client. Inside a frame it would be taken for the frame's own bytes, or, close to its end, would
        complete it with nonsense: so that end is waited for; and where it does not come in time, the client is told nothing."""
        if self.ended.done() or self._leaving is not None:
            return
        self._leaving = why
        if self.far.frames.is_between:
            return self._tell(last)
        self.far.at_frame_end = lambda: self._tell(last)
        self._deadline = asyncio.get_running_loop().call_later(FRAME_S, self.end, why)

    def _tell(self, last: bytes) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        assert self._leaving is not None
        self.near.is_heard = self.far.is_heard = False
        if not (self.far.frames.has_close or self.near.transport.is_closing()):
            self.near.transport.write(last)
            self.near.transport.resume_reading()
        self.far.transport.close()
        self._deadline = asyncio.get_running_loop().call_later(HEAR_S, self.end, self._leaving)

    def end(self, why: str) -> None:
        """What was written is still sent."""
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.ended.done():
            self.ended.set_result(why)
        for side in (self.near, self.far):
            side.transport.close()

    def _lost(self, side: "_Side") -> None:
        if self.near.is_heard or side is self.near:
            self.end(self._leaving or f"the {side.name} closed it")
        if side is self.near:
            self._on_lost()
        if self.near.is_lost and self.far.is_lost:
            self._timer.cancel()

    def _look(self) -> None:
        now = time.monotonic()
        for side in (self.near, self.far):
            if side.full_since is not None and now - side.full_since > self._stall_s:
                self.end(f"the {side.name} took nothing for {self._stall_s:g} s")
                side.transport.abort()
        if now - self.far.heard_at > self._silence_s and self.near.full_since is None:
            self.end(f"the site was silent for {self._silence_s:g} s")
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)


class _Side(asyncio.Protocol):
    def __init__(self, transport: asyncio.Transport, on_lost: Callable[["_Side"], None], name: str) -> None:
        self.transport = transport
        self.name = name
        self.other: _Side = self
        self.heard_at = time.monotonic()
        self.full_since: float | None = None
        self.is_lost = False
        self.is_heard = True  # what it says matters to the other
        self._on_lost = on_lost

    def begin(self) -> None:
        transport = self.transport
        transport.set_protocol(self)
        if transport.is_closing():  # its loss was told to the protocol before
            return self.connection_lost(None)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        if not self.other.full_since:
            transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        if self.is_heard:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.full_since = time.monotonic()
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.full_since = None
        if not self.other.transport.is_closing():
            self.other.heard_at = time.monotonic()  # it was not asked
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.full_since = None
            self._on_lost(self)


class _FarSide(_Side):
    """The site, whose frames are counted."""

    def __init__(self, transport: asyncio.Transport, on_lost: Callable[[_Side], None], name: str) -> None:
        super().__init__(transport, on_lost, name)
        self.frames = FrameEnds()
        self.at_frame_end: Callable[[], None] | None = None  # called at the next end, behind which nothing is passed on

    def data_received(self, data: bytes) -> None:
        if not self.is_heard:
            return
        if self.at_frame_end is None:
            self.frames.feed(data)
            return super().data_received(data)
        super().data_received(data[: self.frames.feed(data, to_end=True)])
        if self.frames.is_between:
            self.at_frame_end()
