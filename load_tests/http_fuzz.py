"""A fuzzer that compares our HTTP/1.1 server with Hypercorn and uvicorn.

`python -m load_tests.http_fuzz [--requests 10000] [--seed 1]`

Mutated requests are sent to all three, each over a new connection, with one application that records the requests it gets. A server's verdict is the
list of requests that its application saw (method, target, headers, body) and whether it refused the bytes after them. `why` classifies the known
reasons for a difference; any other difference is printed, and the exit status is 1.
"""

import argparse
import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from load_tests.peers.uvicorn_server import SERVERS, make_server
from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.listen import bind

ANSWER_S = 1.0  # the time for a server to answer; a server that is silent for so long waits for more bytes
AT_ONCE = 60

BASES = (
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /a%20b?c=d&e HTTP/1.1\r\nHost: localhost:80\r\nAccept: */*\r\n\r\n",
    b"POST /p HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-type: text/plain\r\n\r\nhello",
    b"PUT /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;a=b\r\n world\r\n0\r\n\r\n",
    b"PUT /t HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n3\r\nabc\r\n0\r\nx-t: 1\r\n\r\n",
    b"POST /two HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nabGET /next HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD /h HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /old HTTP/1.0\r\n\r\n",
    b"DELETE /d HTTP/1.1\r\nhost: x\r\ncookie: a=b; c=d\r\nx-long: " + b"y" * 200 + b"\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://x/abs?q HTTP/1.1\r\nhost: x\r\n\r\n",
)
LINES = (
    b"content-length: 5", b"content-length: 0", b"content-length: 05", b"content-length: +5", b"content-length: 5, 5", b"content-length: -1",
    b"content-length: 99999999999999999999", b"content-length:", b"content-length : 5", b"transfer-encoding: chunked", b"transfer-encoding: gzip",
    b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, chunked", b"transfer-encoding: identity", b"transfer-encoding : chunked",
    b"transfer-encoding:", b"Transfer-Encoding: CHUNKED", b"transfer-encoding: \x0bchunked", b"host: y", b"host:", b"connection: close",
    b"connection: keep-alive, close", b"connection: upgrade\r\nupgrade: h2c", b"connection: upgrade\r\nupgrade: mqtt", b"expect: 200-ok",
    b" folded: value", b"\tfolded", b"x: \0", b"x: a\rb", b"x: \xff\xfe",
    b"x y: z", b": empty", b"no colon", b"x(y): z", b"x:y", b"x: \x01", b"x:  spaces  ", b"\xc3\xbc: u",
)  # fmt: skip
BYTES = (
    b"\0",
    b"\t",
    b"\n",
    b"\r",
    b"\r\n",
    b" ",
    b":",
    b"\x0b",
    b"\x7f",
    b"\xff",
    b"0",
    b"a",
    b"/",
    b"%",
    b";",
    b",",
    b'"',
)


class Verdict(NamedTuple):
    requests: tuple[tuple[Any, ...], ...]  # complete requests that the application saw
    is_refused: bool  # whether the rest was refused, by a status of the server's or by closing the connection


class Case(NamedTuple):
    data: bytes
    verdicts: dict[str, Verdict]  # by the server's name


def mutated(rng: random.Random) -> bytes:
    data = rng.choice(BASES)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng)
    return data


def _edit_bytes(data: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((0, 0, 1, 1, 2))
    return data[:at] + rng.choice((b"", *BYTES)) + data[at + length :]


def _add_line(data: bytes, rng: random.Random) -> bytes:
    head, end, rest = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(LINES))
    return b"\r\n".join(lines) + end + rest


def _edit_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\r\n")
    at = rng.randrange(len(lines))
    choice = rng.randrange(3)
    if choice == 0:
        lines.insert(at, lines[at])
    elif choice == 1:
        del lines[at]
    else:
        lines[at:at] = [lines.pop(rng.randrange(len(lines)))]
    return b"\r\n".join(lines)


def _change_line_ends(data: bytes, rng: random.Random) -> bytes:
    ends = data.count(b"\r\n")
    parts = data.split(b"\r\n")
    wrong = rng.randrange(max(1, ends))
    return b"".join(
        part + (b"" if i == len(parts) - 1 else (rng.choice((b"\n", b"\r", b"\r\r\n")) if i == wrong else b"\r\n"))
        for i, part in enumerate(parts)
    )


def _change_first_line(data: bytes, rng: random.Random) -> bytes:
    first, end, rest = data.partition(b"\r\n")
    old, new = rng.choice((
        (b"HTTP/1.1", b"HTTP/1.0"), (b"HTTP/1.1", b"HTTP/1.2"), (b"HTTP/1.1", b"HTTP/2.0"), (b"HTTP/1.1", b"http/1.1"), (b"HTTP/1.1", b"HTTP/1.10"),
        (b" HTTP/1.1", b""), (b" ", b"  "), (b" /", b" "), (b"GET", b"get"), (b"GET", b"CONNECT"), (b"GET", b"BREW"),
        (b"GET", b"PRI"), (b"POST", b"GET"),
        (b"/", b"//"),
        (b"/", b"/../"), (b"/", b"/\xc3\xbc"), (b"/", b"/#f"), (b"/", b"*"), (b"?", b"??"), (b"GET ", b"\r\nGET "), (b"GET ", b"\n\nGET "),
    ))  # fmt: skip
    return first.replace(old, new, 1) + end + rest


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(1, len(data) + 1)]


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _edit_bytes, _edit_bytes, _add_line, _add_line, _edit_lines, _change_line_ends, _change_first_line, _truncate,
)  # fmt: skip


class Notes:
    """An application that records the requests of each connection."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[Any, ...]]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # the body never became complete
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = tuple(sorted((name.lower(), value.strip(b" \t")) for name, value in scope["headers"]))
        target = (bytes(scope["raw_path"]), bytes(scope["query_string"]))
        self.seen.setdefault(scope["client"][1], []).append((scope["method"], target, headers, body))
        await send({"type": "http.response.start", "status": 207, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class Target:
    """One server and its port."""

    def __init__(self, port: int, notes: Notes) -> None:
        self._port, self._notes = port, notes

    async def verdict(self, data: bytes, answer_s: float = ANSWER_S) -> Verdict:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        port = writer.get_extra_info("sockname")[1]
        self._notes.seen.pop(port, None)
        writer.write(data)
        heard, has_ended = b"", False
        try:
            async with asyncio.timeout(answer_s):
                while chunk := await reader.read(1 << 16):
                    heard += chunk
                has_ended = True
        except TimeoutError:
            pass
        except ConnectionError:
            has_ended = True
        writer.transport.abort()
        statuses = [line.split(b" ")[1] for line in heard.split(b"\r\n") if line.startswith(b"HTTP/1.")]
        seen = tuple(self._notes.seen.pop(port, ()))
        is_refused = any(status not in (b"207", b"100") for status in statuses)
        return Verdict(seen, is_refused or (has_ended and not _may_end(seen, data)))


def _may_end(seen: tuple[tuple[Any, ...], ...], data: bytes) -> bool:
    """Tell whether the last request asked for the connection to close, and no bytes followed it."""
    if not seen:
        return False
    headers, body = dict(seen[-1][2]), seen[-1][3]
    asked = b"close" in headers.get(b"connection", b"").lower() or b"HTTP/1.0" in data
    return asked and data.rstrip(b"\r\n").endswith(body or b"")


@asynccontextmanager
async def running() -> Any:
    """Start all servers; yield them by name."""
    async with AsyncExitStack() as stack:
        targets = {}
        for name in SERVERS:
            notes, listener = Notes(), bind("127.0.0.1", 0)
            targets[name] = Target(listener.getsockname()[1], notes)
            server = make_server(name, notes, HttpLimits())
            await server.start(listener)
            stack.push_async_callback(server.stop, 0.2)
        yield targets


async def cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    requests = [mutated(rng) for _ in range(count)]
    at_once, alone = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE // 2)
    async with running() as targets:

        async def judged(data: bytes) -> Case:
            async with at_once:
                found = await asyncio.gather(*(target.verdict(data) for target in targets.values()))
            if len(set(found)) > 1:  # unstable verdicts are an effect of a busy machine and do not count
                async with alone:
                    found = [await target.verdict(data, 3 * ANSWER_S) for target in targets.values()]
            return Case(data, dict(zip(targets, found, strict=True)))

        return await asyncio.gather(*map(judged, requests))


METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"CONNECT", b"TRACE")
TARGET = re.compile(rb"(/|\*|[a-z]+://[a-z0-9]+(:[0-9]*)?(?![a-z0-9:]))[\x21-\x7e]*|\*")

OWN_RULES: dict[str, Callable[[bytes], bool]] = {
    "versions other than 1.0 and 1.1 are refused": lambda data: any(
        not line.endswith((b" HTTP/1.1", b" HTTP/1.0")) for line in _first_lines(data)
    ),
    "a request has one host": lambda data: any(
        len(re.findall(rb"(?im)^host[ \t]*:", head)) != 1 for head in data.split(b"\r\n\r\n") if b"HTTP/1.1" in head
    ) or b"HTTP/1.1" not in data,
    "the only transfer-encoding is chunked, and HTTP/1.0 has none": lambda data: bool(_values(data, b"transfer-encoding")),
    "there are no tunnels": lambda data: b"CONNECT" in data,
}  # fmt: skip
PARSER_RULES: dict[str, Callable[[bytes], bool]] = {
    "llhttp: a line ends with CR LF, and no bare CR or LF stands elsewhere": lambda data: bool(re.search(rb"\r(?!\n)|(?<!\r)\n", data)),
    "llhttp: a head's lines do not fold": lambda data: bool(re.search(rb"\n[ \t]", data)),
    "llhttp: methods are those that are registered": lambda data: any(
        line.partition(b" ")[0] not in METHODS for line in _first_lines(data)
    ),
    "llhttp: no control characters in values, and names are tokens": lambda data: bool(re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", data))
    or any(not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:.*", line, re.S) for line in _headers(data)),
    "llhttp: a target is a path, an absolute URL or *, in visible ASCII": lambda data: any(
        not TARGET.fullmatch(line.partition(b" ")[2].partition(b" ")[0]) for line in _first_lines(data)
    ),
    "llhttp: one length, in digits or by chunks": lambda data: len(_values(data, b"content-length") + _values(data, b"transfer-encoding")) > 1
    or any(not value.isdigit() for value in _values(data, b"content-length")),
    "llhttp: a chunk's size is hexadecimal digits, and its data has that size": lambda data: b"chunked" in data.lower(),
}  # fmt: skip


def _first_lines(data: bytes) -> list[bytes]:
    """Return the lines at which a request may start."""
    return [
        data.lstrip(b"\r\n").partition(b"\r\n")[0],
        *re.findall(rb"\S+ [^\r\n]* HTTP/[^\r\n]*|(?:GET|POST) [^\r\n]+", data),
    ]


def _headers(data: bytes) -> list[bytes]:
    return data.lstrip(b"\r\n").partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]


def _values(data: bytes, name: bytes) -> list[bytes]:
    found = [line.partition(b":") for line in _headers(data)]
    return [value.strip(b" \t") for key, _, value in found if key.strip().lower() == name]


LOOSE: dict[str, Callable[[bytes], bool]] = {
    "empty lines before and after a request are skipped (RFC 9112, 2.2)": lambda data: data.startswith((b"\r", b"\n"))
    or bool(re.search(rb"\n\r?\n\r?\n|\n\r\n\r|\r\n\r\n.*\r\n?$", data, re.S)),
    "more than one space in a request's first line is ignored (RFC 9112, 3)": lambda data: any(b"  " in line for line in _first_lines(data)),
    "a wish for another protocol is ignored, and its body is read (RFC 9110, 7.8)": lambda data: bool(re.search(rb"(?i)upgrade", data)),
    "bytes after a request that asks for the connection to close are ignored": lambda data: b"close" in data or b"HTTP/1.0" in data,
    "a target's authority is not checked": lambda data: b"://" in data,
}  # fmt: skip


def why(case: Case, other: str) -> str:
    """Return the class of a difference; empty if none fits."""
    own, its, data = case.verdicts["own"], case.verdicts[other], case.data
    ours, theirs = ([_plain(request, data) for request in verdict.requests] for verdict in (own, its))
    common = min(len(ours), len(theirs))
    if ours[:common] != theirs[:common]:
        upgrade = next(iter(name for name in LOOSE if "wish" in name))
        return upgrade if LOOSE[upgrade](data) else ""
    if own.is_refused == its.is_refused and len(ours) == len(theirs):
        return "equal, presented differently: trailers among headers, absolute targets, fragments, `upgrade`"
    if own.is_refused and its.is_refused and len(ours) > len(theirs):
        return "complete requests before the refused bytes are answered"
    if own.is_refused and not its.is_refused and len(ours) == len(theirs):
        return "the other server waits for more bytes before it decides"
    is_stricter = len(ours) < len(theirs) or (own.is_refused and not its.is_refused)
    strict = OWN_RULES if other == "uvicorn" else PARSER_RULES | OWN_RULES  # uvicorn uses the same parser
    rules, word = (strict, "ours is stricter") if is_stricter else (LOOSE, "ours is looser")
    return next((f"{word}: {rule}" for rule, fits in rules.items() if fits(data)), "")


def _plain(request: tuple[Any, ...], data: bytes) -> tuple[Any, ...]:
    """Return a request without the parts that servers present differently."""
    method, (path, query), headers, body = request
    trailers = {line.partition(b":")[0].strip().lower() for line in data.partition(b"\r\n0\r\n")[2].split(b"\r\n")}
    kept = tuple(pair for pair in headers if pair[0] not in trailers and pair[0] != b"upgrade")
    query = b"" if b"#" in path else query.partition(b"#")[0]
    return method, re.sub(rb"^[a-zA-Z]+://[^/]*|#.*", b"", path) or b"/", query, kept, body


def differences(found: list[Case]) -> Iterator[tuple[Case, str, str]]:
    """Yield the cases where another server's verdict differs from ours, with that server and the class."""
    for case in found:
        for other in SERVERS[1:]:
            if case.verdicts[other] != case.verdicts["own"]:
                yield case, other, why(case, other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = asyncio.run(cases(arguments.requests, arguments.seed))
    counts: Counter[tuple[str, str]] = Counter()
    unexplained = 0
    for case, other, name in differences(found):
        counts[other, name] += 1
        if not name:
            unexplained += 1
            if unexplained <= 25:
                print(f"unexplained: {case.data!r}\n  own: {case.verdicts['own']}\n  {other}: {case.verdicts[other]}")
    refused = {name: sum(case.verdicts[name].is_refused for case in found) for name in SERVERS}
    print(f"{len(found)} requests; refused: {refused}")
    for (other, name), count in counts.most_common():
        print(f"{count:6} {other:10} {name or 'unexplained'}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
