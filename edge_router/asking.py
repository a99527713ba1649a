"""One try at one site: the request is sent, and what comes first is waited for.

It either brings an Answer whose first byte has arrived or raises SiteFailed, which means that this site has given nothing and another one may be
tried. A link that waits takes the request at once, before anything else is done for it, and the first events of a stream go to the client from
where they come in: a task's turn costs either of them as much as a token. Choosing, retrying and telling the client are proxy.py's.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from edge_router.backend import Ticket
from edge_router.link import CannotConnect, Link, LinkLost, NoDescriptors
from edge_router.peek import ValidRequest
from edge_router.upstream import (
    LOOK_AGAIN_S,
    Answer,
    Events,
    Failure,
    Lost,
    SiteFailed,
    Upstream,
    error_of,
    header,
)
from wire.headers import QUEUE, REFUSAL
from wire.sse import Event, SSEError

MAX_ANSWER_BYTES = (
    64 << 20
)  # of an answer that is not a stream: it is read whole so that its loss can be made good elsewhere
SMALL_BYTES = 1 << 20  # of a function's answer of known length, which is relayed in one piece
# Once the client has been told the beginning of a stream, the task that goes on with it leaves it the processor for so long: on a machine with few
# cores the client would read its first token behind 0.1 ms of what nobody waits for. Whatever comes from the site ends the wait.
CLIENT_FIRST_S = 0.001
AT_WORK_SHARE = 0.1  # of the patience that is not waited for, where a site sends heartbeats
SPENT_STATUSES = frozenset({502, 503, 504})

Tell = Callable[[Answer], bool]  # gives the client an answer's first events; False: it is the task's to do


class Asking:
    """`await answer()`, or `give_up()`."""

    def __init__(
        self,
        upstream: Upstream,
        site: str,
        url: str,
        request: ValidRequest,
        first_byte_s: float,
        ticket: Ticket,
        stall_s: float = float("inf"),
        may_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        """`first_byte_s`: of an answer that is generated before it is sent, the network's own patience counts instead. After `stall_s` the site is
        left where that `may_leave`."""
        self._upstream = upstream
        self._site = site
        self._request = request
        self._ticket = ticket
        self._origin = upstream.origin(url)
        self._link = upstream.pool.idle(self._origin)
        if self._link is not None:
            upstream.send(self._link, site, request)
        self._first_byte_s = first_byte_s
        self._patience_s = upstream.relay.answer_timeout_s if request.is_generated_whole else first_byte_s
        self._patience = _Patience(self._patience_s, self._link, stall_s, may_leave)
        self._has_head = False  # of a stream
        self._stream: Events | None = None
        self._first: list[Event] = []
        self._answer: Answer | None = None
        self._client_first: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self.tell: Tell | None = None
        ticket.on_site_lost = self._patience.site_lost

    @property
    def is_sent(self) -> bool:
        """There was a link that waited."""
        return self._link is not None

    def listen(self, go_on: Callable[[], None]) -> None:
        """Until somebody awaits the answer: `go_on` is called when there is something to be done for it that is not done here. Once it is sent."""
        assert self._link is not None
        self._link.begun, self._link.on_wake = self._begun, go_on

    async def answer(self) -> Answer:
        """Raises SiteFailed. A site that stops answering its probes while we wait for its first byte is left at once: a machine that froze or a cable
        that was cut closes no connection. On cancellation the connection is closed."""
        try:
            link = await self._headed()
            if self._error is not None:
                raise self._error
            answer = self._answer or await self._made(link)
            if self._patience.is_over and not answer.is_told:
                raise TimeoutError
            self._link = None  # the answer owns it now
            return answer
        except CannotConnect as error:
            raise SiteFailed("no_files" if isinstance(error, NoDescriptors) else "connect", str(error)) from None
        except TimeoutError:
            if self._patience.is_site_lost:
                detail = f"it became unhealthy before its first byte: {self._ticket.detail}"
                raise SiteFailed("silent", detail) from None
            raise SiteFailed("silent", f"it sent nothing for {self._patience.waited_s:.3g} s") from None
        except LinkLost as error:
            raise SiteFailed("lost", str(error)) from None
        except SSEError as error:
            raise SiteFailed("malformed", f"it sent {error}") from None
        except Lost as error:
            raise SiteFailed("lost", str(error)) from None
        finally:
            self.give_up()

    def give_up(self) -> None:
        """What has not become an answer is closed."""
        self._end_patience()
        if self._client_first is not None:
            self._client_first.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.begun = link.on_wake = None
            self._upstream.leave(link, self._stream)

    async def _headed(self) -> Link:
        """With the head of the answer. A kept link that its site closed when the request was under way already says nothing of the site."""
        if self._link is not None:
            try:
                return await self._wait_for_head(self._link)
            except LinkLost:
                if not (self._link.is_untouched and self._request.head.may_be_repeated):
                    raise
            self._upstream.leave(self._link, None)
            self._link = self._patience.link = None
        return await self._wait_for_head(await self._connected())

    async def _wait_for_head(self, link: Link) -> Link:
        if self._answer is None:
            link.begun = self._begun
        await link.head()
        link.begun = None
        return link

    async def _connected(self) -> Link:
        link = self._link = self._patience.link = await self._patience.within(
            self._upstream.pool.connect(self._origin, Link)
        )
        self._upstream.send(link, self._site, self._request)
        return link

    def _begun(self) -> None:
        """Where the site's bytes come in, from its whole head on: a stream's first events go on from here, if the client can have them now."""
        link = self._link
        assert link is not None
        if self._is_stream(link):
            if not link.has_news:
                return self._wait_for_events()  # they are still to come
            if link.has_parts and not self._patience.is_over:
                self._tell_first(link)
        link.begun = None
        if self._answer is not None and self._answer.is_told and not link.has_news:
            self._client_first = asyncio.get_running_loop().call_later(CLIENT_FIRST_S, link.wake)
        else:
            link.wake()

    def _tell_first(self, link: Link) -> None:
        try:
            stream = self._open_stream(link)
            self._first = stream.decoded(link.take())
            if stream.last is not None:
                answer = self._answer = Answer(self._upstream, link, None, stream, self._first)
                self._end_patience()
                answer.is_told = self.tell is not None and self.tell(answer)
        except Exception as error:  # the task has to answer for it
            self._error = error

    def _is_stream(self, link: Link) -> bool:
        if self._request.head.is_for_function:
            return False
        return header(link.headers, "content-type").partition(";")[0].strip().lower() == "text/event-stream"

    def _wait_for_events(self) -> None:
        if not self._has_head:
            self._has_head = True
            self._patience.begin_anew(self._first_byte_s)

    def _open_stream(self, link: Link) -> Events:
        self._wait_for_events()
        self._stream = self._upstream.read_events(link)
        return self._stream

    def _end_patience(self) -> None:
        self._ticket.on_site_lost = None
        self._patience.end()

    async def _made(self, link: Link) -> Answer:
        if self._request.head.is_for_function:
            return await self._passed_through(link)
        if self._is_stream(link):
            stream = self._stream or self._open_stream(link)
            return Answer(self._upstream, link, None, stream, await self._first_events(stream))
        body = await self._whole(link)
        raise_refusal(link, body, is_for_function=False)
        return Answer(self._upstream, link, body, None, [])

    async def _first_events(self, stream: Events) -> list[Event]:
        """Up to the first event that carries data. A heartbeat is no answer; but when most of the patience is over and there were
        some, the site is at work, and the client is told so instead of starting again elsewhere."""
        deadline = self._patience.until
        first = self._first
        while stream.last is None:
            if first:
                try:
                    async with asyncio.timeout_at(deadline - self._first_byte_s * AT_WORK_SHARE):
                        events = await stream.read()
                except TimeoutError:
                    return first
            else:
                events = await stream.read()
            if events is None:
                raise SiteFailed("lost", "it closed the connection before its first event")
            first += events
            self._patience.heard()
        return first

    async def _passed_through(self, link: Link) -> Answer:
        """A function's answer. Only what a site says in its own name is told from it."""
        length = header(link.headers, "content-length")
        is_small = length.isdigit() and int(length) <= SMALL_BYTES
        if not header(link.headers, REFUSAL) and not is_small and not link.is_done:
            self._stream = self._upstream.read_events(link, as_pieces=True)
            return Answer(self._upstream, link, None, self._stream, [])
        body = await self._whole(link)
        raise_refusal(link, body, is_for_function=True)
        return Answer(self._upstream, link, body, None, [])

    async def _whole(self, link: Link) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            if not link.has_news:
                self._patience.begin_anew(self._patience_s)
            if not (chunk := await link.read()):
                break
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise SiteFailed("malformed", f"its answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(parts)


class _Patience:
    """How long a site may keep one request waiting. It has a timer of its own, not a task's time-out, which costs 4 us each time it is set: the timer
    is left as it is when the patience begins anew, and looks at the clock when it rings."""

    def __init__(self, seconds: float, link: Link | None, stall_s: float, may_leave: Callable[[], bool]) -> None:
        self.link = link
        self._may_leave = may_leave
        self.is_over = self.is_site_lost = False
        self._connecting: asyncio.Timeout | None = None
        self._loop = asyncio.get_running_loop()
        self._since = now = self._loop.time()
        self._stall_s = stall_s
        self.until, self._leave_at = now + seconds, now + stall_s  # on the loop's clock
        self._timer = self._loop.call_at(min(self.until, self._leave_at), self._ring)

    @property
    def waited_s(self) -> float:
        return self._loop.time() - self._since

    def heard(self) -> None:
        """A heartbeat: the site holds back what it has, and is not to be left for it yet."""
        self._leave_at = self._loop.time() + self._stall_s

    def begin_anew(self, seconds: float) -> None:
        self.until = self._loop.time() + seconds
        if self.until < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(self.until, self._ring)

    async def within(self, connecting: Coroutine[Any, Any, Link]) -> Link:
        """Raises TimeoutError when it is over before there is a link."""
        try:
            async with asyncio.timeout_at(self.until) as self._connecting:
                return await connecting
        finally:
            self._connecting = None

    def site_lost(self) -> None:
        """There is nothing to wait for any more."""
        self.is_site_lost = True
        self._end_wait()

    def end(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        now = self._loop.time()
        if now >= self.until or (now >= self._leave_at and self._may_leave()):
            return self._end_wait()
        if now >= self._leave_at:
            self._leave_at = now + LOOK_AGAIN_S
        self._timer = self._loop.call_at(min(self.until, self._leave_at), self._ring)

    def _end_wait(self) -> None:
        self.is_over = True
        if self.link is not None:
            self.link.fail(TimeoutError())
        elif self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(self._loop.time())


_KINDS: dict[str, Failure] = {
    "draining": "draining",
    "model_load_failed": "no_model",
    "engine_error": "lost",
    "signature": "untrusted",
    "clock": "untrusted",
}


def raise_refusal(link: Link, body: bytes, *, is_for_function: bool) -> None:
    """Raises SiteFailed where the site, and not the request, is at fault. The site's header says so and never a body, which may be a function's; a
    gateway before the site has only a status, which is believed where no function answers."""
    word = header(link.headers, REFUSAL)
    if not word and (is_for_function or link.status not in SPENT_STATUSES):
        return
    queue = header(link.headers, QUEUE)
    if word and queue.isascii() and queue.isdigit() and len(queue) < 12:
        raise SiteFailed("declined", f"its queue of {queue} tokens is too long", queued_tokens=int(queue))
    after = header(link.headers, "retry-after")
    said = str(error_of(body).get("message", ""))[:200]
    detail = f"it answered {link.status}" + (f" ({said})" if said else "")
    retry_after_s = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else None
    raise SiteFailed(_KINDS.get(word, "full"), detail, retry_after_s)
