"""AI, as functions see it: `run` gives an object, a stream of events or a whole response. Whoever leaves a stream, or aborts, stops the model."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from workers.bindings.face import ByteStream, Face, Items, Named, as_record, options_of
from workers.response import Response

_OPTIONS = (
    "return_raw_response", "queue_request", "reject_if_busy", "extra_headers", "signal", "tags", "gateway", "prefix", "session_options",
)  # fmt: skip


class AbortError(Exception):
    """The signal that was given with a call was aborted."""

    name = "AbortError"


class AbortSignal(Named):
    def __init__(self) -> None:
        self.aborted = False
        self.reason: Any = None
        self._listeners: list[Callable[..., Any]] = []

    def add_event_listener(self, event: str, listener: Callable[..., Any], options: Any = None) -> None:
        if event == "abort":
            self._listeners.append(listener)

    def remove_event_listener(self, event: str, listener: Callable[..., Any]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def throw_if_aborted(self) -> None:
        if self.aborted:
            raise _abort_error(self.reason)

    def _abort(self, reason: Any) -> None:
        if not self.aborted:
            self.aborted, self.reason = True, reason
            for listener in tuple(self._listeners):
                listener()

    @staticmethod
    def timeout(milliseconds: float) -> "AbortSignal":
        signal = AbortSignal()
        asyncio.get_running_loop().call_later(milliseconds / 1e3, signal._abort, f"{milliseconds:g} ms have passed")
        return signal


class AbortController:
    def __init__(self) -> None:
        self.signal = AbortSignal()

    @classmethod
    def new(cls) -> "AbortController":
        return cls()

    def abort(self, reason: Any = None) -> None:
        self.signal._abort(reason)


class AI(Face):
    async def run(self, model: str, inputs: Any = None, options: Any = None, **named: Any) -> Any:
        if inputs is None and options is None:  # as keywords, which are a call's last argument on the platform
            inputs, named = named, {}
        given = options_of(options, named, _OPTIONS, "AI run")
        sent = _plain(inputs if inputs is not None else {})
        if set(sent) == {"request_id"}:
            return as_record(await self._call("poll", model=model, request_id=str(sent["request_id"])))
        is_raw = bool(given.get("return_raw_response"))
        call = self._begin(
            "run",
            model=model,
            inputs=sent,
            raw=is_raw,
            queue=bool(given.get("queue_request")),
            reject_if_busy=bool(given.get("reject_if_busy")),
            extra_headers={str(name): str(value) for name, value in dict(given.get("extra_headers", {})).items()},
        )
        signal = given.get("signal")
        answer = await (call if signal is None else _until_aborted(call, signal))
        value, body = answer.value, answer.body
        if "request_id" in value:
            return as_record(value)
        if body is not None and signal is not None:
            body = _AbortedStream(body, signal)
        if is_raw:
            return Response(value["body"] if body is None else body, value["status"], headers=value["headers"])
        return ByteStream(body) if body is not None else as_record(json.loads(value["body"]))

    async def models(self, params: Any = None, **named: Any) -> Items:
        known = ("search", "author", "task", "source", "hide_experimental", "page", "per_page")
        given = options_of(params, named, known, "AI models")
        return Items(as_record(await self._call("models", search=given.get("search", ""))))

    async def to_markdown(self, files: Any = None, options: Any = None) -> Any:
        """Convert a file {name, blob}, or several, to Markdown, here in the function, by the library `markitdown` among its dependencies. Without
        files: the types that are taken."""
        from workers.bindings.markdown import converted, supported  # few functions want it

        if files is None:
            return Items(supported())
        if isinstance(files, (list, tuple)):
            return Items([await converted(file) for file in files])
        return await converted(files)

    def gateway(self, id: str) -> Any:
        raise NotImplementedError("AI gateways are not offered here: models answer at this site; call run() itself")

    def autorag(self, id: str) -> Any:
        raise NotImplementedError("AutoRAG is not offered here: bind Vectorize, and embed with an embedding model")


class _AbortedStream:
    """A stream that ends with AbortError when its signal is aborted."""

    def __init__(self, body: Any, signal: Any) -> None:
        self._body = body
        self._signal = signal

    def __aiter__(self) -> "_AbortedStream":
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk: bytes = await _until_aborted(self._body.__anext__(), self._signal)
            return chunk
        except AbortError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        await self._body.aclose()


async def _until_aborted(work: Any, signal: Any) -> Any:
    """Return the work's result. An abort cancels it, which cancels what the runtime does for it."""
    if signal.aborted:
        work.close()
        raise _abort_error(getattr(signal, "reason", None))
    aborted = asyncio.get_running_loop().create_future()

    def abort(*_: Any) -> None:
        if not aborted.done():
            aborted.set_result(None)

    signal.add_event_listener("abort", abort)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _abort_error(getattr(signal, "reason", None))
    finally:
        signal.remove_event_listener("abort", abort)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _abort_error(reason: Any) -> Exception:
    return (
        reason if isinstance(reason, Exception) else AbortError(f"the call was aborted: {reason or 'no reason given'}")
    )


def _plain(inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if hasattr(inputs, "to_py"):
        return dict(inputs.to_py())
    raise TypeError(f"AI run takes its inputs as a dict, not {type(inputs).__name__}")
