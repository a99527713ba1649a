"""The AI binding in functions: `run` returns an object, a stream of events or a whole response.

Closing the stream, or aborting the call, stops the generation.
"""

import json
from collections.abc import Mapping
from typing import Any

from workers.face import Face, Items, as_record, options_of
from workers.http.abort_signal import AbortController as AbortController
from workers.http.abort_signal import AbortedStream, until_aborted
from workers.http.abort_signal import AbortError as AbortError
from workers.http.abort_signal import AbortSignal as AbortSignal
from workers.http.response import Response
from workers.http.streams import ByteStream

_OPTIONS = (
    "return_raw_response", "queue_request", "reject_if_busy", "extra_headers", "signal", "tags", "gateway", "prefix", "session_options",
)  # fmt: skip


class AI(Face):
    ai_gateway_log_id = None  # AI Gateway's log does not exist here

    async def run(self, model: str, inputs: Any = None, options: Any = None, **named: Any) -> Any:
        if inputs is None and options is None:  # the inputs were passed as keywords
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
            gateway=_gateway(given.get("gateway")),
            extra_headers={str(name): str(value) for name, value in dict(given.get("extra_headers", {})).items()},
        )
        signal = given.get("signal")
        answer = await (call if signal is None else until_aborted(call, signal))
        value, body = answer.value, answer.body
        if "request_id" in value:
            return as_record(value)
        if body is not None and signal is not None:
            body = AbortedStream(body, signal)
        if is_raw:
            return Response(value["body"] if body is None else body, value["status"], headers=value["headers"])
        return ByteStream(body) if body is not None else as_record(json.loads(value["body"]))

    async def models(self, params: Any = None, **named: Any) -> Items:
        known = ("search", "author", "task", "source", "hide_experimental", "page", "per_page")
        given = options_of(params, named, known, "AI models")
        return Items(as_record(await self._call("models", search=given.get("search", ""))))

    async def to_markdown(self, files: Any = None, options: Any = None) -> Any:
        """Convert files {name, blob} to Markdown; without files, return the supported types.
        `markitdown`, a dependency of the function, converts them in this process."""
        from workers.bindings.markdown import converted, supported  # imported late, because few functions need it

        if files is None:
            return Items(supported())
        if isinstance(files, (list, tuple)):
            return Items([await converted(file) for file in files])
        return await converted(files)

    def gateway(self, id: str) -> Any:
        raise NotImplementedError("AI gateways are not offered here: models answer at this site; call run() itself")

    def autorag(self, id: str) -> Any:
        raise NotImplementedError("AutoRAG is not offered here: bind Vectorize, and embed with an embedding model")


_GATEWAY = (
    "id",
    "cache_key",
    "cache_ttl",
    "skip_cache",
    "metadata",
    "collect_log",
    "event_id",
    "request_timeout_ms",
    "retries",
)
_RETRIES = ("max_attempts", "retry_delay_ms", "backoff")


def _gateway(given: Any) -> dict[str, Any] | None:
    """Return AI Gateway's options under the names that the site uses."""
    if given is None:
        return None
    options = options_of(given, {}, _GATEWAY, "AI run: gateway")
    if "retries" in options:
        options["retries"] = options_of(options["retries"], {}, _RETRIES, "AI run: gateway.retries")
    return options


def _plain(inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if hasattr(inputs, "to_py"):
        return dict(inputs.to_py())
    raise TypeError(f"AI run takes its inputs as a dict, not {type(inputs).__name__}")
