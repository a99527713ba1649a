"""A stream of JSON lines, as Ollama's clients read it: the data of server-sent events, one line each.

Between router and site such a stream consists of events with resume points, like all others. It is converted to lines when it is sent to the client.
"""

from starlette.types import Message, Send

from pilotlight.wire.sse import DONE, EventDecoder

CONTENT_TYPE = "application/x-ndjson"


def lines_of(events: bytes) -> bytes:
    """Return whole events as lines.
    Comments and the event that ends a stream have no line, because readers parse every line as JSON."""
    data = [event.data for event in EventDecoder().feed(events)]
    return b"".join(each + b"\n" for each in data if each is not None and each != DONE)


def as_lines(send: Send) -> Send:
    """Return an ASGI `send` that turns a stream of events into one of lines.
    Other responses are not changed. Each body message must consist of whole events."""
    is_stream = False

    async def converted(message: Message) -> None:
        nonlocal is_stream
        if message["type"] == "http.response.start":
            headers = [
                (name, CONTENT_TYPE.encode())
                if name == b"content-type" and value.startswith(b"text/event-stream")
                else (name, value)
                for name, value in message["headers"]
            ]
            is_stream = headers != list(message["headers"])
            message = {**message, "headers": headers}
        elif is_stream and (events := message.get("body", b"")):
            message = {**message, "body": lines_of(events)}
            if not message["body"] and message.get("more_body", False):
                return
        await send(message)

    return converted
