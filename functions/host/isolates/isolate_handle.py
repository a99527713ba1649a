"""The runtime's handle of one isolate: sends it requests, and ends it if it exceeds a limit.

The error then names the limit and the line of code. Usage is measured from outside the isolate (isolate_watch.py).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from functools import partial

from msgspec.structs import replace

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.exchanges import ExchangeResult
from pilotlight.functions.channel.failure import ChannelClosed, Failure
from pilotlight.functions.host.faults import Fault, fault_of
from pilotlight.functions.host.invocations.invocation import Invocation
from pilotlight.functions.host.isolates.isolate_process import EXIT_REPORT_S, IsolateProcess
from pilotlight.functions.host.isolates.isolate_watch import IsolateWatch
from pilotlight.functions.host.isolates.isolate_work import IsolateWork
from pilotlight.functions.host.logs import FunctionLog
from pilotlight.functions.host.network.socket_broker import SocketBroker
from pilotlight.functions.host.response_stream import ResponseStream, StreamThrottle
from pilotlight.functions.host.subrequests import SubrequestHandler, Subrequests
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.priority import CpuHistory
from pilotlight.functions.sandbox.zygotes.control_messages import Boot
from pilotlight.functions.sandbox.zygotes.zygote_client import FunctionZygote
from pilotlight.support.time_limits import Pauses, TimeLimit

LAG_S = 0.1  # an event loop that is silent for longer is busy: another isolate gets the next request
WATCHED_S = 0.25  # most time between two checks of an isolate with work
STOPPED = "stopped"  # error code: a signal stopped the process, which is not the function's fault


class IsolateHandle:
    def __init__(
        self,
        function: str,
        limits: FunctionLimits,
        on_subrequest: SubrequestHandler,
        log: FunctionLog,
        throttle: StreamThrottle,
        on_fault: Callable[["IsolateHandle", Fault], None] = lambda isolate, fault: None,
        *,
        is_on_probation: bool = False,
    ) -> None:
        """`on_fault` is called for responses that fail after they have started.
        With `is_on_probation`, the isolate starts with background priority, because another isolate of the function computes for long or has ended
        badly."""
        self.limits = limits
        self.process = IsolateProcess(function, log, CpuHistory(is_on_probation=is_on_probation))
        self.work = IsolateWork()
        self.watcher = IsolateWatch(limits, self.process, self.work, pauses=Pauses(WATCHED_S))
        self.started = asyncio.Event()  # set when the start has succeeded or failed
        self.is_ready = False
        self.is_retiring = False
        self.is_tainted = False  # takes no new requests after a failed import or a MemoryError
        self._subrequests = Subrequests(on_subrequest, limits.subrequests, self.work.requests)
        self._throttle = throttle  # rate limit of response streams, in bytes/s
        self._on_fault = on_fault
        self._channel: Channel | None = None
        self._broker: SocketBroker | None = None
        self._ending: asyncio.Task[None] | None = None
        self._why_ended: Fault | None = None

    async def start(self, zygote: FunctionZygote, boot: Boot) -> None:
        """Fork the isolate; if this fails, it must be closed. Raises ZygoteError and OSError."""
        try:
            ours, asked = self.process.start(zygote, boot)
            self._broker = SocketBroker(asked, self._subrequests)
            try:
                self._channel = await Channel.open(
                    ours, self._subrequests.answer, is_runtime=True, on_note=self._on_note
                )
            except BaseException:
                ours.close()
                raise
        finally:
            self.started.set()

    def load(self) -> None:
        """Order the import of the module. Requests may be sent at once and wait for it."""
        assert self._channel is not None
        self.watcher.begin_import()
        self._channel.note("load")

    # -- requests ---------------------------------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        return self._channel is not None and not self._channel.closed.is_set() and self._ending is None

    @property
    def lags(self) -> bool:
        return self.watcher.probe.silent_s() > LAG_S

    @property
    def has_answered(self) -> bool:
        return self.process.history.num_answers > 0

    async def ask(
        self,
        event: frames.FunctionEvent,
        body: AsyncIterator[bytes] | None = None,
        *,
        invocation: Invocation,
        is_socket: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> ExchangeResult:
        """Send an event to the isolate; return its result. Raises Fault with the reason for the author.

        The response's stream, unless it is a WebSocket's, belongs to the request: read or close it. `on_end` is called once, when the request is
        over. The invocation ends with the stream; without a stream the caller ends it.
        """
        assert self._channel is not None
        limit = TimeLimit(self.limits.wall_s)
        try:
            with ExitStack() as request:
                request.callback(on_end)
                id = self._channel.new_id()
                self.work.begin(id)
                self._charge()
                self._subrequests.begin(id)
                self.process.log.attribute(id, invocation.id)
                request.callback(self._done, id, invocation)
                async with limit:
                    result = await self._channel.request(replace(event, id=id), body)
                self.process.history.answered()
                if result.body is None:
                    return result
                if is_socket and result.value.get("web_socket") is True:
                    # A WebSocket may last for hours; its CPU time is charged to the isolate's WebSockets together.
                    stream = ResponseStream(self, result.body, None, partial(self._socket_closed, invocation))
                    self.work.open_sockets.add(stream)
                else:
                    end = request.pop_all().close
                    stream = ResponseStream(self, result.body, limit, partial(_stream_ended, invocation, end))
                return ExchangeResult(result.value, stream)  # type: ignore[arg-type]
        except TimeoutError:
            sentence = f"the function did not answer within {self.limits.wall_s:g} s"
            raise Fault(sentence, code="wall_time", status=500) from None
        except ChannelClosed:
            raise await self.exit_fault() from None
        except Failure as failure:
            raise fault_of(failure) from None

    async def sent_chunk(self, size: int) -> None:
        """Count a chunk of a stream, and wait until the rate allows the next one."""
        self.process.history.sent_piece(size)
        await self._throttle.take(size)

    def stream_failed(self, fault: Fault) -> None:
        self._on_fault(self, fault)

    def _done(self, id: int, invocation: Invocation) -> None:
        self._charge()
        invocation.charge(self.work.end(id))
        self._subrequests.forget(id)

    def _charge(self) -> None:
        if self.is_ready:
            self.watcher.charge()

    def _socket_closed(self, invocation: Invocation, stream: ResponseStream) -> None:
        self.work.close_socket(stream)
        invocation.end(stream.fault)

    def _on_note(self, note: frames.Note) -> None:
        if note.name in ("ready", "broken"):
            self.watcher.begin()
            self.is_ready = True
            self.is_retiring = self.is_retiring or note.name == "broken"
        elif note.name == "background" and isinstance(note.value, int):
            self.work.set_background(note.value)
        elif note.name == "object_background":
            match note.value:
                case [str(class_name), str(id), int(count)]:
                    self.work.set_object_background((class_name, id), count)

    # -- the watch --------------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Check the isolate's usage, and end it above a limit.
        Called every few hundredths of a second while there is work."""
        if self._ending is not None or not self.process.is_running or self._channel is None:
            return
        exceeded = self.watcher.look(self._channel.ping) if self.is_ready else self.watcher.look_at_start()
        if exceeded is not None:
            self.end(*exceeded)
        elif self.watcher.is_spent:
            self.is_retiring = True

    def watch_idle(self) -> None:
        """Check the usage of an idle isolate without waking it."""
        if self._ending is None and self.process.is_running and (exceeded := self.watcher.look_idle()) is not None:
            self.end(*exceeded)

    # -- the end ----------------------------------------------------------------------------------------------------------------

    def end(self, why: str, code: str) -> None:
        """Kill the isolate after asking it for a stack trace; all its open requests fail with this reason."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(why, code))

    async def _end(self, why: str, code: str) -> None:
        if code == "blocked" and self.process.is_stopped:
            code, why = STOPPED, f"a signal stopped its process for more than {self.limits.blocked_s:g} s"
        stack = ""
        with suppress(OSError):  # without a stack trace the report is still useful, and the isolate must end
            stack = await self.process.stack() if self.is_ready or code == "start_time" else ""
        sentence = f"the function {self.process.function!r} was ended: {why}"
        detail = f"{sentence}\n{stack}" if stack else sentence
        self._why_ended = Fault(sentence, code=code, status=500, name="LimitExceeded", detail=detail)
        self.process.kill()
        if self._channel is not None:
            self._channel.close(sentence)

    async def exit_fault(self) -> Fault:
        """Return why the isolate ended; call this once the channel has closed."""
        if self._ending is not None:
            await self._ending
        if self._why_ended is None:
            assert self._channel is not None
            broke = self._channel.why_closed if "protocol" in self._channel.why_closed else ""
            self._why_ended = await self.process.crash_fault(broke, was_ready=self.is_ready)
        return self._why_ended

    async def close(self) -> None:
        """End the isolate; its open requests fail."""
        if self._channel is not None:
            if not self._channel.closed.is_set() and self._ending is None:
                sentence = f"the site has ended this isolate of {self.process.function!r}"
                self._why_ended = self._why_ended or Fault(sentence, code="closing")
            self._channel.close("the site has ended this isolate")
        if self._broker is not None:
            self._broker.close()
        self.watcher.probe.close()
        if self._ending is not None:
            await self._ending
        await self.process.close(EXIT_REPORT_S if self._channel is not None and self.work.load == 0 else 0.05)

    async def until_gone(self) -> None:
        assert self._channel is not None
        await self._channel.closed.wait()


def _stream_ended(invocation: Invocation, end: Callable[[], None], stream: ResponseStream) -> None:
    end()
    invocation.end(stream.fault, is_canceled=not stream.is_whole)
