"""A client over ASGI: limits of a body's size and time, the effect of a disconnect, and the form of errors."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pilotlight.edge_router.forwarding.downstream import DISCARD_TIMES, STALL_S, Downstream, DownstreamGone, head_of
from pilotlight.support import background
from pilotlight.wire.errors import ApiError
from pilotlight.wire.paths import DEPLOYMENT

NEVER = float("-inf")
GONE = {"type": "http.disconnect"}


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


class Client:
    """A client that sends the given messages and is then silent."""

    def __init__(self, *messages: dict[str, Any], deployment: str | None = None, **headers: str) -> None:
        self.messages = list(messages)
        self.told: list[dict[str, Any]] = []
        self.num_asked = self.num_received = 0
        self._more = asyncio.Event()
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": raw,
            "client": ("192.0.2.1", 7),
            DEPLOYMENT: deployment,
        }
        self.downstream = Downstream(scope, self._receive, self._send)

    def say(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._more.set()

    async def _receive(self) -> Any:
        self.num_asked += 1
        async with asyncio.timeout(60):
            while not self.messages:
                self._more.clear()
                await self._more.wait()
        self.num_received += 1
        return self.messages.pop(0)

    async def _send(self, message: Any) -> None:
        self.told.append(message)


Look = Callable[[Downstream, float], None]


async def looked_at(client: Client, work: Coroutine[Any, Any, Any], *looks: Look) -> Any:
    """Do a client's work, and meanwhile call each look with the client and the start time."""
    began = time.monotonic()

    async def look_on() -> None:
        for look in looks:
            for _ in range(4):
                await asyncio.sleep(0)
            look(client.downstream, began)

    async with background.running(look_on, "the looks"), asyncio.timeout(60):
        return await work


def at(seconds: float, awake_since: float | None = None) -> Look:
    """Return a look that checks the client as if the time were `seconds` after the work's start.

    `awake_since`: when this process last resumed, also in seconds after the start."""
    return lambda client, began: client.look(began + seconds, NEVER if awake_since is None else began + awake_since)


async def test_a_body_may_be_as_large_as_the_limit() -> None:
    for parts in ((part(b"abcd", more=False),), (part(b"ab"), part(b""), part(b"cd", more=False))):
        assert await Client(*parts).downstream.body(4, 1.0, 1.0) == b"abcd"
    assert await Client({"type": "http.request"}).downstream.body(4, 1.0, 1.0) == b""


async def test_a_body_names_the_deployment_in_its_path() -> None:
    client = Client(part(b'{"model":nu'), part(b"ll}", more=False), deployment="ember")
    assert json.loads(await client.downstream.body(99, 1.0, 1.0)) == {"model": "ember"}


@pytest.mark.parametrize(
    ("headers", "num_read"),
    [
        ({}, 2 + DISCARD_TIMES),  # two parts to exceed the limit, then a limited number of discarded parts
        ({"content-length": "5"}, DISCARD_TIMES),
        ({"content-length": str(4 * DISCARD_TIMES)}, DISCARD_TIMES),
        ({"content-length": str(4 * DISCARD_TIMES + 1)}, 0),
        ({"content-length": "5", "expect": "100-Continue"}, 0),
    ],
)
async def test_a_larger_body_is_refused_and_a_part_of_its_rest_thrown_away(
    headers: dict[str, str], num_read: int
) -> None:
    client = Client(*[part(b"abcd") for _ in range(40)], **headers)
    with pytest.raises(ApiError, match="the body is larger than") as refused:
        await client.downstream.body(4, 1.0, 1.0)
    assert (refused.value.word, client.num_received) == ("body_too_large", num_read)


async def test_a_client_that_leaves_in_its_body_has_left() -> None:
    for messages in ((GONE,), (part(b"a"), GONE), (part(b"abcde"), GONE)):
        with pytest.raises(DownstreamGone):
            await Client(*messages).downstream.body(4, 1.0, 1.0)


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ((at(1.9), at(3.0)), "paused for more than 2 s"),
        (
            (at(3.0, 2.0), at(4.5, 2.0)),
            "paused for more than 2 s",
        ),  # while this process was stopped, bytes may have arrived
        ((at(5.1, 5.0), at(10.1, 5.0)), "took more than 5 s"),
    ],
)
async def test_a_body_has_a_time_for_each_pause_and_one_for_all_of_it(looks: tuple[Look, ...], says: str) -> None:
    client = Client(part(b"a"))
    with pytest.raises(ApiError, match=says) as refused:
        await looked_at(client, client.downstream.body(4, 2.0, 5.0), *looks)
    assert refused.value.word == "request_timeout"


async def test_work_that_continues_after_a_body_that_took_too_long_is_not_taken_for_cancelled() -> None:
    client = Client(part(b"a"))

    async def work() -> int:
        with pytest.raises(ApiError, match="paused"):
            await client.downstream.body(4, 2.0, 5.0)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert await looked_at(client, work(), at(3.0)) == 0


async def test_a_body_that_pauses_for_less_than_its_time_is_read_on() -> None:
    client = Client(part(b"a"))

    def goes_on(downstream: Downstream, began: float) -> None:
        client.say(part(b"b", more=False))

    assert await looked_at(client, client.downstream.body(4, 2.0, 5.0), at(1.9), goes_on) == b"ab"


async def test_a_body_that_is_whole_has_no_time_limit_any_more() -> None:
    client = Client(part(b"a", more=False))
    assert await looked_at(client, client.downstream.body(4, 2.0, 5.0), at(1.0)) == b"a"
    client.downstream.look(time.monotonic() + 1000, NEVER)
    assert await client.downstream.while_present(asyncio.sleep(0, "done")) == "done"


@pytest.mark.parametrize(
    ("after_s", "awake_since", "is_cut"),
    [(STALL_S - 1, None, False), (STALL_S + 1, 2.0, False), (STALL_S + 1, None, True)],
)
async def test_a_client_that_takes_nothing_for_long_is_cut_off(
    after_s: float, awake_since: float | None, is_cut: bool
) -> None:
    taken = asyncio.Event()

    class Slow(Client):
        async def _send(self, message: Any) -> None:
            await taken.wait()

    client = Slow()

    def takes(downstream: Downstream, began: float) -> None:
        taken.set()

    work = client.downstream.while_present(client.downstream.write(b"data: a\n\n"))
    if is_cut:
        with pytest.raises(DownstreamGone):
            await looked_at(client, work, at(after_s, awake_since))
    else:
        await looked_at(client, work, at(after_s, awake_since), takes)
        client.downstream.look(time.monotonic() + 1000, NEVER)


async def test_a_client_that_leaves_is_noticed_at_once_and_not_at_the_next_look() -> None:
    async def leave(client: Client, *, has_all: bool = False) -> str:
        async def work() -> str:
            if has_all:
                await client.downstream.end_stream()
            for _ in range(20):
                await asyncio.sleep(0)
            return "done"

        client.say(part(b"", more=False))
        client.say(GONE)
        return str(await looked_at(client, client.downstream.while_present(work())))

    with pytest.raises(DownstreamGone):
        await leave(Client())
    client = Client()
    assert await leave(client, has_all=True) == "done", "a server reports a disconnect after the answer, too"


async def test_one_listens_to_a_client_however_often_it_is_looked_at() -> None:
    client, go_on = Client(), asyncio.Event()
    work = client.downstream.while_present(go_on.wait())
    assert await looked_at(client, work, at(0.0), at(0.1), at(0.2), lambda downstream, began: go_on.set())
    assert client.num_asked == 1


async def test_work_that_is_cut_ends_with_the_reason_and_none_starts_after_it() -> None:
    client, reason = Client(), ApiError("aborted", "cut")
    with pytest.raises(ApiError, match="cut"):
        await looked_at(
            client, client.downstream.while_present(asyncio.sleep(60)), lambda downstream, began: downstream.cut(reason)
        )
    with pytest.raises(ApiError, match="cut"):
        await client.downstream.while_present(asyncio.sleep(0))


async def test_a_cancellation_from_elsewhere_wins_over_a_cut_in_the_same_step() -> None:
    for is_cut_first in (True, False):
        clients, seen = list[Client](), list[int]()

        async def run(clients: list[Client] = clients, seen: list[int] = seen) -> None:
            clients.append(client := Client())
            task = asyncio.current_task()
            assert task is not None
            try:
                await client.downstream.while_present(asyncio.sleep(60))
            finally:
                seen.append(task.cancelling())

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        (client,) = clients
        if is_cut_first:
            client.downstream.cut(ApiError("aborted", "cut"))
            task.cancel()
        else:
            task.cancel()
            client.downstream.cut(ApiError("aborted", "cut"))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == [1], "the cancellation by another task"


async def test_work_that_was_cut_again_and_again_leaves_its_task_uncancelled() -> None:
    client = Client()

    async def work() -> int:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(ApiError, match="cut"):
            await client.downstream.while_present(asyncio.sleep(60))
        return task.cancelling()

    def cut(downstream: Downstream, began: float) -> None:
        for _ in range(3):
            downstream.cut(ApiError("aborted", "cut"))

    assert await looked_at(client, work(), cut) == 0


async def test_a_cut_at_the_works_last_step_is_raised_by_it_and_by_nothing_that_follows() -> None:
    client, reason = Client(), ApiError("aborted", "cut")

    async def last_step() -> None:
        client.downstream.cut(reason)

    async def work() -> str:
        with pytest.raises(ApiError, match="cut"):
            await client.downstream.while_present(last_step())
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="cut"):
            await client.downstream.body(4, 60.0, 60.0)
        return "goes on"

    assert await looked_at(client, work()) == "goes on"


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    client = Client()
    for work in (client.downstream.while_present(asyncio.sleep(60)), client.downstream.body(4, 60.0, 60.0)):
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_refusal_is_a_status_before_the_answer_an_event_inside_it_and_nothing_after_it() -> None:
    error = ApiError("overloaded", "later", retry_after_s=3)
    client = Client()
    await client.downstream.refuse(error)
    start, body = client.told
    headers = dict(start["headers"])
    assert start["status"] == 503
    assert headers[b"retry-after"] == b"3"
    assert headers[b"content-length"] == b"%d" % len(body["body"])
    assert headers[b"x-request-id"] == client.downstream.request_id.encode()
    await client.downstream.refuse(error)
    assert len(client.told) == 2
    client = Client()
    await client.downstream.start_stream(200, [("a", "b")])
    await client.downstream.write(b"data: x\n\n")
    await client.downstream.refuse(error)
    start, *bodies = client.told
    assert (start["status"], start["headers"]) == (200, [(b"a", b"b")])
    assert [message.get("more_body", False) for message in bodies] == [True, True, False]
    assert bodies[1]["body"].startswith(b"data: ")
    assert b"later" in bodies[1]["body"]


def test_a_head_is_what_the_server_has_read() -> None:
    scope = {
        "type": "http", "method": "PUT", "path": "/v1/a b", "raw_path": b"/v1/a%20b", "query_string": b"c=d", "scheme": "https",
        "headers": [(b"x-api-key", b"k"), (b"sec-websocket-key", b"1")],
    }  # fmt: skip
    head = head_of(scope)
    assert (head.method, head.path, head.target, head.scheme) == ("PUT", "/v1/a b", "/v1/a%20b?c=d", "https")
    assert head.headers == [("authorization", "Bearer k"), ("sec-websocket-key", "1")]
    plain = head_of({**scope, "path": "/fn/f", "raw_path": b"/fn/f", "query_string": b"", "scheme": "ws"})
    assert (plain.target, plain.scheme, plain.headers[0]) == ("/fn/f", "http", ("x-api-key", "k"))
    socket = head_of({**scope, "type": "websocket", "scheme": "wss", "subprotocols": ["a", "b"]})
    assert (socket.is_websocket, socket.scheme, socket.header("sec-websocket-protocol")) == (True, "https", "a, b")
    assert not socket.has("sec-websocket-key")
    assert not head_of({**scope, "type": "websocket", "subprotocols": []}).has("sec-websocket-protocol")
