"""A site that computes nothing: `python -m load_tests.overhead.trivial_site PORT`.

It answers at once, or streams tokens at a pace.

Every token's text is the time at which it was written, on the clock that all processes of a machine share, so that a client can compute its delay.
For our router it sends resume points and publishes a status like a real site; other routers' health checks get JSON that they accept. It has no
models and validates nothing.
"""

import asyncio
import re
import sys
import time
from typing import cast

import httptools
import uvloop

from pilotlight.wire.hop.continuation import ANSWER, RESUME_POINTS
from pilotlight.wire.hop.status import ModelStatus, Place, ProcessStatus, SiteStatus, encode_status
from pilotlight.wire.http.listen import raise_file_limit

IDLE = 1_000_000  # a number of tokens that is never reached: after the first token the stream stays open and silent
PACE_S = 0.02  # time between two tokens of a stream: 50 per second
NAME, MODEL = "ams1", "trivial"
CLOSE_TO_ANYTHING = (
    b'{"status":"ok","model_path":"trivial","tokenizer_path":"trivial","is_generation":true,"object":"list",'
    b'"data":[{"id":"trivial","object":"model","created":1,"owned_by":"nobody"}]}'
)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')
_WHOLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"trivial","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"It is done."},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}'
)
_HEAD = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"trivial","choices":[{"index":0,"delta":'
)


class Site(asyncio.Protocol):
    def __init__(self, port: int) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's classes are not subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self._wants_marks = False
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == ANSWER.encode():
            self._wants_marks = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        if self._url == b"/status":
            return self._whole(_status(self._port))
        if not self._url.endswith(b"/completions"):
            return self._whole(CLOSE_TO_ANYTHING)
        if _STREAM.search(body) is None:
            return self._whole(_WHOLE)
        asked = _MAX_TOKENS.search(body)
        marks = RESUME_POINTS.encode() + b": 1\r\n" if self._wants_marks else b""
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n" + marks + b"transfer-encoding: chunked\r\n\r\n"
        )  # fmt: skip
        self._token(0, int(asked[1]) if asked else 16, self._wants_marks, self._loop.time())

    def _whole(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )

    def _token(self, index: int, count: int, has_marks: bool, started_at: float) -> None:
        if self._transport.is_closing():
            return
        if index == count:
            mark = b':pl [0,[],"stop",0]\n' if has_marks else b""
            last = mark + b"data: " + _HEAD + b'{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
            self._transport.write(_chunk(last) + b"0\r\n\r\n")
            return
        mark = b":pl [0,[%d],null,0]\n" % (100 + index) if has_marks else b""
        text = b'{"role":"assistant","content":"t%d"},"finish_reason":null}]}' % time.monotonic_ns()
        self._transport.write(_chunk(b"%sid: %d\ndata: %s%s\n\n" % (mark, index, _HEAD, text)))
        if count == IDLE:
            return
        self._loop.call_at(started_at + (index + 1) * PACE_S, self._token, index + 1, count, has_marks, started_at)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _status(port: int) -> bytes:
    model = ModelStatus(MODEL, "device", 1.0, 131072, prefill_tokens_per_s=1e6, decode_tokens_per_s=50.0)
    process = ProcessStatus("site", 1, NAME, f"http://127.0.0.1:{port}")
    place = Place("Amsterdam", 52.31, 4.76)
    return encode_status(SiteStatus(NAME, "0", place, time.monotonic_ns(), True, False, 0, 4096, (model,), (process,)))


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Site(port), "127.0.0.1", port, backlog=2048)
    raise_file_limit()
    print("The trivial site listens", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
