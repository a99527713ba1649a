"""Worker: the runtime's handle of one isolate. Requests go in, answers come out, and whoever goes beyond a limit is ended with a sentence that
says which, and where in the code it was.

The watch stands here and not in the isolate: code that loops for ever cannot be asked to look at a clock.
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from runtime.functions.channel import Channel, ChannelClosed, ExchangeResult, Failure, Inbound, StreamingReply, frames
from runtime.functions.host.control_messages import Boot, Died
from runtime.functions.host.faults import Fault, authors_frames, fault_of, manner_of
from runtime.functions.host.limits import FunctionLimits
from runtime.functions.host.logs import FunctionLog
from runtime.functions.host.pace import StreamThrottle
from runtime.functions.host.priority import CpuHistory, PriorityClass
from runtime.functions.host.zygote_client import ChildProcess, FunctionZygote, ZygoteError

TRACE_WAIT_S = 0.25
IDLE_LOOK_S = 0.2  # between two looks at one that has nothing to do: there may be thousands
EXIT_REPORT_S = 1.0  # for the news of a death
MAX_TRACE = 8192
OUTSIDE_S = 1.0  # in which an isolate without an open request may make as many subrequests as a request: its WebSockets may be open for hours
SOCKETS_SHARE = 0.5  # of a core, which an isolate's open WebSockets may use for as long as they are open

SubrequestHandler = Callable[["IsolateHandle", frames.Request, Inbound | None], Awaitable[Any]]
"""What the runtime does for a function: calls of bindings, fetches."""


class IsolateHandle:
    def __init__(
        self,
        function: str,
        limits: FunctionLimits,
        on_subrequest: SubrequestHandler,
        log: FunctionLog,
        pace: StreamThrottle,
        *,
        is_on_probation: bool = False,
    ) -> None:
        """`is_on_probation`: an isolate of this function computes for long, or has just been ended for what it did, so this one gives way from its
        birth."""
        self.function = function
        self.on_fault: Callable[[Fault], None] = lambda fault: None  # hears of answers that fail after they have begun
        self._throttle = pace  # of its streams, in bytes
        self._cpu_history = CpuHistory(is_on_probation=is_on_probation)
        self.log = log
        self.background = 0
        self.num_waiting = 0  # requests that wait for its start
        self.started = asyncio.Event()  # or failed
        self.is_retiring = False
        self.is_tainted = False  # it has shown that it must be replaced
        self.has_objects = False
        self.idle_since = 0.0
        self.is_ready = False
        self.is_broken = False
        self.sockets = 0  # WebSockets that are open
        self.lag_since: float | None = None  # the loop owes an answer since then
        self.limits = limits
        self._on_subrequest = on_subrequest
        self._loop = asyncio.get_running_loop()
        self._cpu: dict[int, float] = {}  # seconds, by request that is open
        self._seen: set[int] = set()  # requests that were open at the last look
        self._subrequests: dict[int, int] = {}  # by request; -1: outside of any
        self._outside_since = 0.0
        self._sockets_cpu = 0.0  # seconds, beyond their share
        self._sockets_seen_at = self._loop.time()
        self._cpu_seen = 0.0
        self._looked_at = 0.0
        self._background_since = 0.0
        self._priority = PriorityClass.NORMAL  # as the kernel knows it
        self._unasked_cpu = 0.0  # seconds used since there was a request
        self._why_ended: Fault | None = None
        self._ping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._started_at = self.idle_since = self._loop.time()
        self._zygote: FunctionZygote | None = None
        self._child: ChildProcess | None = None
        self._channel: Channel | None = None
        self._trace_fd = -1

    async def start(self, zygote: FunctionZygote, boot: Boot) -> None:
        """Raises ZygoteError. The module is imported later: requests may be sent at once and wait for it."""
        try:
            await self._start(zygote, boot)
        finally:
            self.started.set()

    async def _start(self, zygote: FunctionZygote, boot: Boot) -> None:
        self._zygote = zygote
        ours, theirs = socket.socketpair()
        self._trace_fd, trace = os.pipe()
        os.set_blocking(self._trace_fd, False)
        os.set_blocking(trace, False)
        try:
            self._child = zygote.fork(boot, [theirs.fileno(), self.log.write_fd, trace])
        except ZygoteError:
            ours.close()
            self.log.close_write_end()
            self.log.close()
            os.close(self._trace_fd)
            raise
        finally:
            theirs.close()
            os.close(trace)
        self.log.close_write_end()
        self._child.started.add_done_callback(lambda _: self._update_priority())
        self._channel = await Channel.open(ours, self._answer, is_runtime=True, on_note=self._on_note)

    # -- requests ---------------------------------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        return self._channel is not None and not self._channel.closed.is_set() and self._ending is None

    @property
    def has_answered(self) -> bool:
        return self._cpu_history.num_answers > 0

    @property
    def is_deprioritized(self) -> bool:
        return self._priority is PriorityClass.BACKGROUND

    @property
    def load(self) -> int:
        return len(self._cpu) + self.num_waiting

    async def ask(
        self,
        frame: Callable[[int], frames.Request],
        body: AsyncIterator[bytes] | None,
        wall_s: float,
        *,
        is_socket: bool = False,
    ) -> ExchangeResult:
        """Raises Fault with what the function's author should know. The answer's stream counts as part of the request, unless it is a WebSocket's:
        read it or cancel it."""
        assert self._channel is not None
        ids: list[int] = []
        ends_at = self._loop.time() + wall_s

        def numbered(id: int) -> frames.Request:
            ids.append(id)
            self._cpu[id] = 0.0
            return frame(id)

        try:
            async with asyncio.timeout_at(ends_at):
                result = await self._channel.request(numbered, body)
        except TimeoutError:
            self._done(ids)
            raise Fault(f"the function has not answered within {wall_s:g} s", code="wall_time", status=500) from None
        except ChannelClosed:
            self._done(ids)
            raise await self.exit_fault() from None
        except Failure as failure:
            self._done(ids)
            raise fault_of(failure) from None
        except BaseException:
            self._done(ids)
            raise
        self._cpu_history.answered()
        if result.body is None:
            self._done(ids)
            return result
        if is_socket and result.value.get("web_socket") is True:
            return ExchangeResult(result.value, self._opened_socket(ids, result.body))  # type: ignore[arg-type]
        stream = Streamed(self, result.body, ends_at, lambda: self._done(ids))
        return ExchangeResult(result.value, stream)  # type: ignore[arg-type]

    def _opened_socket(self, ids: list[int], body: Inbound) -> "Streamed":
        """A request no longer: it may last for hours, and what it computes is counted with that of the isolate's other sockets."""
        self._done(ids)
        self.sockets += 1

        def closed() -> None:
            self.sockets -= 1
            self.idle_since = self._loop.time()

        return Streamed(self, body, None, closed)

    async def gave_piece(self, size: int) -> None:
        """Of a stream."""
        self._cpu_history.answered()
        await self._throttle.take(size)

    def _done(self, ids: list[int]) -> None:
        for id in ids:
            self._cpu.pop(id, None)
            self._subrequests.pop(id, None)
        self.idle_since = self._loop.time()

    async def _answer(self, frame: frames.Request, body: Inbound | None) -> Any:
        within = getattr(frame, "within", -1)
        if within not in self._cpu:  # what works on behind its response, and what only says so
            within = next(iter(self._cpu), -1)
            if within < 0 and (now := self._loop.time()) - self._outside_since > OUTSIDE_S:
                self._outside_since, self._subrequests[-1] = now, 0
        count = self._subrequests[within] = self._subrequests.get(within, 0) + 1
        if count > self.limits.subrequests:
            sentence = f"this request has made {self.limits.subrequests} subrequests, which is the limit"
            raise Failure(sentence, code="too_many_subrequests", status=429)
        answer = await self._on_subrequest(self, frame, body)
        return (
            answer if isinstance(answer, StreamingReply) or not isinstance(answer, tuple) else StreamingReply(*answer)
        )

    def _on_note(self, note: frames.Note) -> None:
        if note.name in ("ready", "broken"):
            self.is_ready, self.is_broken = True, note.name == "broken"
            self.is_retiring = self.is_retiring or self.is_broken
        elif note.name == "background" and isinstance(note.value, int):
            if self.background == 0:
                self._background_since = self._loop.time()
            self.background = max(0, note.value)
            if self.background == 0:
                self.idle_since = self._loop.time()

    # -- the watch --------------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Called every few hundredths of a second while there is work."""
        if self._ending is not None or self._child is None or self._child.pidfd < 0:
            return
        now = self._loop.time()
        spent = self._spent(now)
        if not self.is_ready:
            if now - self._started_at > self.limits.start_s:
                self.end(f"its module was not imported within {self.limits.start_s:g} s", "start_time")
            return
        charged = [id for id in self._cpu if id in self._seen]  # who came since has used little of what was spent
        sharers = len(charged) + (self.sockets > 0)
        for id in charged:
            self._cpu[id] += spent / sharers
        allowed = SOCKETS_SHARE * (now - self._sockets_seen_at)
        self._sockets_cpu = max(0.0, self._sockets_cpu + spent / sharers - allowed) if self.sockets else 0.0
        self._sockets_seen_at = now
        self._seen = set(self._cpu)
        self._unasked_cpu = 0.0 if self._cpu or self.sockets else self._unasked_cpu + spent
        memory_mib = self._child.memory_mib()
        limit_s = self.limits.cpu_ms / 1e3
        if self._unasked_cpu > limit_s:
            self.end(f"it used more than {self.limits.cpu_ms} ms of CPU time while it had no request", "cpu_time")
        elif max(self._cpu.values(), default=0.0) > limit_s:
            self.end(f"it used more than {self.limits.cpu_ms} ms of CPU time for one request", "cpu_time")
        elif self._sockets_cpu > limit_s:
            sentence = f"its WebSockets used {self.limits.cpu_ms} ms of CPU time beyond half of a core"
            self.end(sentence, "cpu_time")
        elif memory_mib > self.limits.memory_mib:
            self.end(f"it used {memory_mib} MiB of memory, of at most {self.limits.memory_mib}", "memory")
        elif self.lag_since is not None and now - self.lag_since > self.limits.blocked_s:
            self.end(f"it blocked its event loop for more than {self.limits.blocked_s:g} s", "blocked")
        elif self.background and not self._cpu and now - self._background_since > self.limits.wall_s:
            self.end(f"its background work (waitUntil) has not ended within {self.limits.wall_s:g} s", "wall_time")
        elif self._cpu_seen > self.limits.cpu_total_s:
            self.is_retiring = True
        elif self._ping is None:
            self.lag_since = now
            self._ping = asyncio.ensure_future(self._pinged())

    def watch_idle(self) -> None:
        """The same while there is nothing to do, without waking it: what the author left running counts."""
        now = self._loop.time()
        if (
            self._ending is not None
            or self._child is None
            or self._child.pidfd < 0
            or now - self._looked_at < IDLE_LOOK_S
        ):
            return
        self._looked_at = now
        self._unasked_cpu += self._spent(now)
        if self._unasked_cpu > self.limits.cpu_ms / 1e3:
            self.end(f"it used more than {self.limits.cpu_ms} ms of CPU time while it had no request", "cpu_time")

    def _spent(self, now: float) -> float:
        """CPU seconds since the last look."""
        assert self._child is not None
        cpu = self._child.cpu_s()
        spent, self._cpu_seen = max(0.0, cpu - self._cpu_seen), max(cpu, self._cpu_seen)
        if self.is_ready:  # an import may take long, once
            self._cpu_history.spent(spent, now)
            self._update_priority()
        return spent

    def _update_priority(self) -> None:
        priority_class = self._cpu_history.priority_class
        if priority_class is not self._priority and self._child is not None:
            self._priority = priority_class
            self._child.set_priority(priority_class)

    async def _pinged(self) -> None:
        assert self._channel is not None
        try:
            await self._channel.ping()
            self.lag_since = None
        except ChannelClosed:
            return
        finally:
            self._ping = None

    def end(self, why: str, code: str) -> None:
        """Finds out where it is, then kills it. Everything under way fails with the reason."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(why, code))

    async def _end(self, why: str, code: str) -> None:
        assert self._child is not None
        trace = ""
        if self.is_ready or code == "start_time":
            self._child.signal(signal.SIGUSR1)
            trace = await self._trace()
        where = f"\n{trace}" if trace else ""
        sentence = f"the function {self.function!r} was ended: {why}"
        self._why_ended = Fault(sentence, code=code, status=500, name="LimitExceeded", detail=f"{sentence}{where}")
        self._child.kill()
        if self._channel is not None:
            self._channel.close(sentence)

    async def _trace(self) -> str:
        """What faulthandler writes: the author's frames, most recent call first."""
        text = b""
        ends_at = self._loop.time() + TRACE_WAIT_S
        while self._loop.time() < ends_at and len(text) < MAX_TRACE:
            await asyncio.sleep(0.01)
            try:
                more = os.read(self._trace_fd, MAX_TRACE)
            except BlockingIOError:
                if text:
                    break
                continue
            text += more
            if not more:
                break
        return authors_frames(text.decode("utf-8", "replace"))

    async def exit_fault(self) -> Fault:
        """After the channel has closed: the reason."""
        if self._ending is not None:
            await self._ending
        if self._why_ended is None:
            self._why_ended = await self._crash_fault()
        return self._why_ended

    async def _crash_fault(self) -> Fault:
        assert self._child is not None
        assert self._channel is not None
        broke = self._channel.why_closed if "protocol" in self._channel.why_closed else ""
        report: Died | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_REPORT_S):
                if broke:
                    self._child.kill()
                report = await asyncio.shield(self._child.died)
        sentence = f"the function {self.function!r} {broke or manner_of(report)}"
        if self._child.started.done() and (why := self._child.started.exception()) is not None:
            sentence = f"the function {self.function!r} cannot be started: {why}"
        if self._zygote is not None and self._zygote.why_failed:
            how = "was ended" if self.is_ready else "cannot be started"
            sentence = f"the function {self.function!r} {how}: {self._zygote.why_failed}"
        last = "\n".join(list(self.log.lines)[-20:])
        return Fault(sentence, code="crashed", name="Crashed", detail=f"{sentence}\n{last}".rstrip())

    async def close(self) -> None:
        """Ends the isolate; what is under way fails."""
        if self._channel is not None:
            if not self._channel.closed.is_set() and self._ending is None:
                sentence = f"the site has ended this isolate of {self.function!r}"
                self._why_ended = self._why_ended or Fault(sentence, code="closing")
            self._channel.close("the site has ended this isolate")
        if self._ping is not None:
            self._ping.cancel()
        if self._ending is not None:
            await self._ending
        if self._child is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_REPORT_S if self.load == 0 else 0.05):
                    await asyncio.shield(self._child.died)
            self._child.kill()
        self.log.close()
        if self._trace_fd >= 0:
            os.close(self._trace_fd)
            self._trace_fd = -1

    async def until_gone(self) -> None:
        assert self._channel is not None
        await self._channel.closed.wait()


class Streamed:
    """An answer's stream within the limits. It ends with `aclose`, also when nobody has read from it yet."""

    def __init__(self, isolate: IsolateHandle, body: Inbound, ends_at: float | None, done: Callable[[], None]) -> None:
        """`ends_at` is None for a WebSocket's, which has no end and no size."""
        self._worker = isolate
        self._body = body
        self._ends_at = ends_at
        self._done = done
        self._size = 0
        self._is_over = False

    def __aiter__(self) -> "Streamed":
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            return await self._next()
        except BaseException as error:
            await self.aclose()
            if isinstance(error, Fault):
                self._worker.on_fault(error)
            raise

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._body.cancel()
            self._done()

    async def _next(self) -> bytes:
        limits = self._worker.limits
        try:
            async with asyncio.timeout_at(self._ends_at):
                chunk = await self._body.__anext__()
        except TimeoutError:
            sentence = f"the function's stream has not ended within {limits.wall_s:g} s"
            raise Fault(sentence, code="wall_time") from None
        except ChannelClosed:
            raise await self._worker.exit_fault() from None
        except Failure as failure:
            raise fault_of(failure) from None
        self._size += len(chunk)
        await self._worker.gave_piece(len(chunk))
        if self._size > limits.response_mib * 2**20 and self._ends_at is not None:
            sentence = f"the response is larger than {limits.response_mib:g} MiB"
            raise Fault(sentence, code="response_too_large")
        return chunk
