"""Streams of JSON lines: events become lines, and responses of other types pass unchanged."""

from typing import Any

from starlette.types import Message

from pilotlight.wire.lines import CONTENT_TYPE, as_lines, lines_of
from pilotlight.wire.sse import CONTENT_TYPE as EVENTS
from pilotlight.wire.sse import DONE, HEARTBEAT, encode_event


def test_each_events_data_is_a_line_and_comments_are_not() -> None:
    events = encode_event(b'{"a":1}') + HEARTBEAT + b":pl [0]\n" + encode_event(b'{"b":2}') + encode_event(DONE)
    assert lines_of(events) == b'{"a":1}\n{"b":2}\n'
    assert lines_of(HEARTBEAT) == b""


async def sent(content_type: str, *bodies: bytes) -> list[Any]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(dict(message))

    lines = as_lines(send)
    headers = [(b"content-type", content_type.encode()), (b"x-a", b"b")]
    await lines({"type": "http.response.start", "status": 200, "headers": headers})
    for body in bodies:
        await lines({"type": "http.response.body", "body": body, "more_body": True})
    await lines({"type": "http.response.body", "body": b"", "more_body": False})
    return messages


async def test_a_stream_of_events_becomes_one_of_lines_with_its_end() -> None:
    start, line, end = await sent(EVENTS, HEARTBEAT, encode_event(b"{}"), encode_event(DONE))
    assert start["headers"] == [(b"content-type", CONTENT_TYPE.encode()), (b"x-a", b"b")]
    assert (line["body"], end["more_body"]) == (b"{}\n", False)


async def test_another_response_passes_untouched() -> None:
    start, body, _ = await sent("application/json", b"data: 1\n\n")
    assert (start["headers"][0][1], body["body"]) == (b"application/json", b"data: 1\n\n")
