"""Queues for senders. The objects for consumers are in events.py."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from workers.face import Face, options_of
from workers.javascript import json_text
from workers.values import pack

_CONTENT_TYPES = ("json", "text", "bytes", "v8")


class Queue(Face):
    async def send(self, body: Any, options: Any = None, **named: Any) -> None:
        given = options_of(options, named, ("content_type", "delay_seconds"), "Queue send")
        await self._call("send", messages=[_message(body, given)])

    async def send_batch(self, messages: Iterable[Mapping[str, Any]], options: Any = None, **named: Any) -> None:
        """Send several messages, each {body, contentType, delaySeconds}."""
        given = options_of(options, named, ("delay_seconds",), "Queue sendBatch")
        sent = []
        for message in messages:
            if not isinstance(message, Mapping) or "body" not in message:
                raise TypeError("Queue sendBatch takes messages with a body: [{'body': ...}, ...]")
            further = {key: value for key, value in message.items() if key not in ("body", "options")}
            own = options_of(message.get("options"), further, ("content_type", "delay_seconds"), "a message")
            sent.append(_message(message["body"], own))
        await self._call("send", messages=sent, **given)


def _message(body: Any, options: dict[str, Any]) -> dict[str, Any]:
    kind = options.get("content_type", "json")
    if kind not in _CONTENT_TYPES:
        raise TypeError(f"a message's content type is one of {', '.join(_CONTENT_TYPES)}, and not {kind!r}")
    if kind == "json":
        body = json.loads(json_text(body, "the message's body (of the content type json; bytes and v8 take others)"))
    elif kind == "text" and not isinstance(body, str):
        raise TypeError(f"a message of the content type text is a str, not {type(body).__name__}")
    elif kind == "bytes":
        body = bytes(body)
    return {"body": pack(body, "the message's body"), **options}
