"""Batches of model calls and their file: accepted calls, the order of answers, and expiry."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.ai_batches import AT_ONCE, KEPT_S, MAX_REQUESTS, SCHEMA, Batches
from pilotlight.functions.bindings.binding import BindingError
from pilotlight.support.database import Database, DatabaseError, create
from tests.asgi import eventually


class Refusing(Database):
    """A database that refuses its next calls."""

    num_refused = 0

    async def run(self, *asked: Any, **limits: Any) -> Any:
        if self.num_refused:
            self.num_refused -= 1
            raise DatabaseError("too many wait", "overloaded")
        return await super().run(*asked, **limits)


class Made:
    """Batches with a fake clock and a stand-in for the model; prompts are numbers, and odd ones fail."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.now_s = 1000.0
        self.database = Refusing(folder / "batches.sqlite", lambda connection: create(connection, SCHEMA))
        self.batches = Batches(self.database, lambda: self.now_s, **limits)
        self.asked: list[int] = []
        self.num_at_once = self.most_at_once = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def close(self) -> None:
        await self.batches.close()
        await self.database.close()

    async def serve(self, model: str, inputs: dict[str, Any]) -> tuple[bool, bytes]:
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await self.may_answer.wait()
        self.num_at_once -= 1
        self.asked.append(number := inputs["prompt"])
        answer = {"errors": [{"code": 5004}]} if number % 2 else {"response": number}
        return number % 2 == 0, json.dumps(answer).encode()

    async def put(self, *numbers: int) -> str:
        queued = await self.batches.put("m", {"requests": [{"prompt": number} for number in numbers]})
        assert (queued["status"], queued["model"]) == ("queued", "m")
        return str(queued["request_id"])

    async def responses(self, batch: str) -> Any:
        async with asyncio.timeout(60):
            while (found := await self.batches.get(batch)) is not None and found["status"] != "complete":
                await asyncio.sleep(0.005)
        return None if found is None else found["responses"]


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Made]:
    found = Made(tmp_path)
    yield found
    await found.close()


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Made]:
    found = Made(tmp_path, max_bytes=1000, max_waiting=3)
    yield found
    await found.close()


async def test_requests_are_answered_in_their_order_a_few_at_once(made: Made) -> None:
    made.batches.serve(made.serve)
    made.may_answer.clear()
    first = await made.put(*range(2 * AT_ONCE))
    made.now_s += 1
    second = await made.put(100)
    await eventually(lambda: made.num_at_once == AT_ONCE)
    assert (await made.batches.get(first) or {})["status"] == "queued"
    made.may_answer.set()
    assert [response["success"] for response in await made.responses(first)] == [True, False] * AT_ONCE
    assert await made.responses(second) == [{"id": 0, "success": True, "result": {"response": 100}}]
    assert (sorted(made.asked[:AT_ONCE]), made.asked[-1], made.most_at_once) == ([*range(AT_ONCE)], 100, AT_ONCE)
    assert (await made.responses(first))[1] == {"id": 1, "success": False, "errors": [{"code": 5004}]}


async def test_a_batch_outlives_the_process_that_took_it(tmp_path: Path) -> None:
    first = Made(tmp_path)
    first.may_answer.clear()
    first.batches.serve(first.serve)
    batch = await first.put(*range(9))
    await eventually(lambda: first.num_at_once > 0)
    await first.close()
    second = Made(tmp_path)
    second.batches.serve(second.serve)
    assert [response["id"] for response in await second.responses(batch)] == [*range(9)]
    await second.close()


async def test_an_answered_batch_is_kept_for_a_day_and_one_that_waits_until_it_is_answered(made: Made) -> None:
    waiting = await made.put(2)
    made.batches.serve(made.serve)
    await made.responses(waiting)
    made.now_s += KEPT_S
    later = await made.put(4)
    assert await made.responses(waiting) is not None, "unanswered requests do not expire"
    made.now_s += 1
    await made.put(6)
    assert await made.responses(waiting) is None
    assert await made.responses(later) is not None


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([], f"1 to {MAX_REQUESTS} requests"),
        ([{}] * (MAX_REQUESTS + 1), f"1 to {MAX_REQUESTS} requests"),
        ({"prompt": "a"}, f"1 to {MAX_REQUESTS} requests"),
        ([{}, "a"], "every request of a batch is an object"),
        ([{"stream": True}], "leave stream out"),
        ([{}, {"prompt": {1, object()}}], "request 1 is not JSON"),
        ([{"prompt": "x" * 600}, {"prompt": "x" * 600}], "at most 1000 bytes"),
    ],
)
async def test_a_batch_that_cannot_be_taken_is_refused_whole(small: Made, requests: Any, sentence: str) -> None:
    with pytest.raises(BindingError, match=sentence):
        await small.batches.put("m", {"requests": requests})
    count = await small.database.run(lambda c: c.execute("SELECT count(*) FROM requests").fetchone()[0])
    assert count == 0


async def test_so_many_requests_wait_and_no_more(small: Made) -> None:
    small.may_answer.clear()
    small.batches.serve(small.serve)
    batch = await small.put(0, 2)
    with pytest.raises(BindingError, match="2 requests wait already") as refused:
        await small.put(4, 6)
    assert (refused.value.code, refused.value.status) == (3040, 429)
    await small.put(4)
    small.may_answer.set()
    await small.responses(batch)
    await eventually(lambda: len(small.asked) == 3)


async def test_a_file_that_cannot_be_written_is_reported_and_its_content_is_answered_later(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    made.database.num_refused = 1
    with pytest.raises(BindingError, match="AI: too many wait") as refused:
        await made.put(2)
    assert (refused.value.code, refused.value.status) == ("overloaded", 429)
    made.database.num_refused = 1
    made.batches.serve(made.serve)
    await eventually(lambda: "stop after an error; the next batch resumes them" in caplog.text)
    assert await made.responses(await made.put(2)) == [{"id": 0, "success": True, "result": {"response": 2}}]
