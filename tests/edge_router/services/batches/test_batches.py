"""Batches: idle sites answer and bill each request once, also if the router restarts. Clients are OpenAI's, or use Workers AI's form."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from aiohttp import web
from yarl import URL

from pilotlight.edge_router.assembly import RouterLimits
from pilotlight.edge_router.services.batches.batch_store import BatchLimits
from pilotlight.wire.hop.usage import USAGE
from tests.edge_router.builders import model_status
from tests.edge_router.fakes import FakeSite, Router, answer, hang, refuse, router, sites
from tests.edge_router.metering.test_usage_report import ACME, BOB, metered, usage

pytestmark = pytest.mark.process

RUN = "/client/v4/accounts/a/ai/run/ember?queueRequest=true"
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


async def echo(site: FakeSite, request: web.Request) -> web.StreamResponse:
    """Answer with the text of the request, and report its usage."""
    said = json.loads(site.bodies[-1])
    told = {"choices": [{"message": {"role": "assistant", "content": said["messages"][0]["content"]}}]}
    return web.json_response(told, headers={USAGE: "7,3,5,0"})


def lines(*texts: str, **fields: Any) -> bytes:
    rows = [
        {"custom_id": text, "method": "POST", "url": CHAT, "body": {"model": "ember", "messages": [{"role": "user", "content": text}], **fields}}
        for text in texts
    ]  # fmt: skip
    return b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + b"\n"


@asynccontextmanager
async def client(running: Router, name: str = "alice") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=name, max_retries=0) as made:
        yield made


async def started(made: openai.AsyncOpenAI, content: bytes) -> Any:
    file = await made.files.create(file=("asked.jsonl", content), purpose="batch")
    return await made.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "1"}
    )


async def ended(made: openai.AsyncOpenAI, name: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await made.batches.retrieve(name)).status in ("in_progress", "cancelling"):
            await asyncio.sleep(0.02)
    return batch


async def read(made: openai.AsyncOpenAI, name: str | None) -> dict[str, Any]:
    assert name is not None
    rows = [json.loads(line) for line in (await made.files.content(name)).text.splitlines()]
    return {row["custom_id"]: row["response"] for row in rows}


async def test_openais_client_has_a_batch_answered_and_billed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        sites("ams1", "iad1") as fakes,
        metered(fakes, tmp_path, monkeypatch) as running,
        client(running) as made,
    ):
        for site in fakes:
            site.behave = echo
        asked = [f"tëxt \r {i}" for i in range(10)]
        batch = await started(made, lines(*asked))
        done = await ended(made, batch.id)
        assert (done.status, done.request_counts.completed, done.error_file_id) == ("completed", 10, None)
        assert done.metadata == {"night": "1"}
        answers = await read(made, done.output_file_id)
        told = {name: each["body"]["choices"][0]["message"]["content"] for name, each in answers.items()}
        assert told == {text: text for text in asked}
        assert [each.id async for each in made.batches.list(limit=1)] == [batch.id]
        assert {file.purpose for file in (await made.files.list()).data} == {"batch", "batch_output"}
        await made.files.delete(done.output_file_id)
        with pytest.raises(openai.NotFoundError):
            await made.files.content(done.output_file_id)
        (row,) = await usage(running)
        assert (row["account"], row["requests"], row["output_tokens"]) == ("acme", 10, 50)


async def test_a_batch_of_responses_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"model": "ember", "input": "Hi"}}
    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
        fakes[0].behave = answer(200, {"object": "response", "status": "completed"})
        file = await made.files.create(file=("a.jsonl", json.dumps(row).encode()), purpose="batch")
        batch = await made.batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h", extra_body={"priority": "low"}
        )
        done = await ended(made, batch.id)
        answers = await read(made, done.output_file_id)
        assert answers["a"]["body"] == {"object": "response", "status": "completed"}
        assert [request.path for request in fakes[0].seen] == ["/v1/responses"]


async def test_a_file_is_kept_for_as_long_as_its_client_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
        kept: dict[str, Any] = {"anchor": "created_at", "seconds": 3600}
        file = await made.files.create(file=b"{}", purpose="batch", expires_after=kept)
        assert (file.expires_at or 0) - file.created_at == 3600
        assert ((await made.files.create(file=b"{}", purpose="batch")).expires_at or 0) >= file.created_at + 86_400
        for seconds, anchor in ((60, "created_at"), (86_401, "created_at"), (3600, "last_active_at")):
            with pytest.raises(openai.BadRequestError, match="expires_after must have"):
                await made.files.create(
                    file=b"{}", purpose="batch", extra_body={"expires_after": {"anchor": anchor, "seconds": seconds}}
                )
        raw = await made.files.with_raw_response.create(file=b"{}", purpose="batch", extra_body={"colour": "red"})
        assert raw.headers["x-ignored-fields"] == "colour"
        with pytest.raises(openai.BadRequestError, match="output_expires_after: answers of a batch"):
            await made.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", output_expires_after=kept
            )


async def test_a_file_with_faults_is_refused_line_by_line_and_nothing_of_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        sites("ams1") as fakes,
        metered(fakes, tmp_path, monkeypatch, RouterLimits(batches=BatchLimits(num_batches=2))) as running,
        client(running) as made,
    ):
        content = lines("a", "a") + b"{\n" + lines("b", stream=True) + lines("c", model=7) + b"[]\n"
        batch = await started(made, content)
        assert batch.status == "failed"
        assert [fault.line for fault in batch.errors.data] == [2, 3, 4, 5, 6]
        assert "custom_id 'a' is used twice" in batch.errors.data[0].message
        assert (await started(made, b"\n")).errors.data[
            0
        ].message == "a batch has 1 to 50000 requests, and this file has 0"
        for content_type in ("text/plain", "multipart/form-data", "multipart/form-data; boundary=x"):
            headers = {**ACME, "content-type": content_type}
            async with running.http.post(running.url + "/v1/files", data=b"--y\r\n\r\n", headers=headers) as response:
                assert response.status == 400, content_type
        with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
            await made.files.create(file=b"{}", purpose="assistants")
        with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
            await made.batches.create(input_file_id="x", endpoint="/v1/moderations", completion_window="24h")
        assert not fakes[0].seen
        with pytest.raises(openai.RateLimitError, match="already has 2 batches"):
            await started(made, lines("a"))


async def test_a_batch_is_its_accounts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running:
        fakes[0].behave = echo
        async with client(running) as made, client(running, "bob") as other, client(running, "al") as same:
            batch = await started(made, lines("a"))
            done = await ended(same, batch.id)
            for refused in (
                other.batches.retrieve(batch.id), other.batches.cancel(batch.id), other.files.content(done.output_file_id),
                other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
            ):  # fmt: skip
                with pytest.raises(openai.NotFoundError, match="belongs to another account"):
                    await refused
            assert (await other.batches.list()).data == []
            assert [each.request_counts.completed for each in (await same.batches.list()).data] == [1]


async def test_a_request_that_cannot_be_answered_is_in_the_error_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def judge(site: FakeSite, request: web.Request) -> web.StreamResponse:
        bad = b"too long" in site.bodies[-1]
        error = {"error": {"message": "shorten it", "code": "context_length_exceeded"}}
        return web.json_response(error, status=400) if bad else await echo(site, request)

    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
        fakes[0].behave = judge
        done = await ended(made, (await started(made, lines("good", "too long"))).id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 1)
        assert (await read(made, done.error_file_id))["too long"]["status_code"] == 400
        assert [*await read(made, done.output_file_id)] == ["good"]


async def test_a_cancelled_batch_keeps_its_answers_and_starts_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(site: FakeSite, request: web.Request) -> web.StreamResponse:
        await site.go_on.wait()
        return await echo(site, request)

    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
        fakes[0].behave = wait
        batch = await started(made, lines(*(f"{i}" for i in range(12))))
        await running.until(lambda: fakes[0].active == 8)
        assert (await made.batches.cancel(batch.id)).status == "cancelling"
        fakes[0].go_on.set()
        done = await ended(made, batch.id)
        assert (done.status, done.request_counts.completed, len(fakes[0].seen)) == ("cancelled", 8, 8)
        with pytest.raises(openai.ConflictError):
            await made.batches.cancel(batch.id)


async def test_a_router_that_goes_leaves_its_batches_to_the_next_and_each_is_billed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store loses some answers that the ledger has, as if the router were killed between the two writes."""
    async with sites("ams1") as fakes:
        fakes[0].behave = echo
        async with metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
            batch = await started(made, lines("a", "b", "c"))
            await ended(made, batch.id)
        connection = sqlite3.connect(tmp_path / "batches.sqlite")
        with connection:
            connection.execute("UPDATE requests SET status = NULL, answer = NULL")
            connection.execute("UPDATE batches SET ended_s = NULL, output_file = NULL")
        connection.close()
        async with metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
            done = await ended(made, batch.id)
            assert (done.status, done.request_counts.completed, len(fakes[0].seen)) == ("completed", 3, 6)
            (row,) = await usage(running)
            assert (row["requests"], row["output_tokens"]) == (3, 15)


async def test_accounts_have_their_turns_whichever_came_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(site: FakeSite, request: web.Request) -> web.StreamResponse:
        await site.go_on.wait()
        return await echo(site, request)

    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running:
        fakes[0].behave = wait
        async with client(running) as made, client(running, "bob") as other:
            many = await started(made, lines(*(f"acme {i}" for i in range(24))))
            await running.until(lambda: fakes[0].active == 8)
            few = await started(other, lines(*(f"bob {i}" for i in range(2))))
            fakes[0].go_on.set()
            await ended(other, few.id)
            turns = [b"bob" in body for body in fakes[0].bodies]
            assert sum(turns[:16]) == 2, "an account does not wait for another's whole batch"
            assert (await ended(made, many.id)).request_counts.completed == 24


async def test_a_batch_waits_while_sites_are_at_work_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
        fakes[0].behave = echo
        fakes[0].status_fields = {"models": (model_status(waiting=1),)}
        backend = running.proxy.selector.backends["ams1"]
        await running.until(lambda: backend.status is not None and backend.status.models[0].waiting == 1)
        batch, sequence = await started(made, lines("a")), backend.status.sequence
        await running.until(lambda: backend.status is not None and backend.status.sequence > sequence + 1)
        assert not fakes[0].seen
        fakes[0].status_fields = {}
        assert (await ended(made, batch.id)).status == "completed"


async def test_a_request_is_asked_again_while_the_network_cannot_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
        fakes[0].behave = refuse("overloaded")
        batch = await started(made, lines("a"))
        await running.until(lambda: bool(fakes[0].seen))
        fakes[0].behave = echo
        assert (await ended(made, batch.id)).request_counts.completed == 1


async def test_a_request_that_sites_fail_at_is_tried_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def fails(site: FakeSite, request: web.Request) -> web.StreamResponse:
        said = json.loads(site.bodies[-1])["messages"][0]["content"]
        tried.append(said)
        is_ready = said == "late" and tried.count("late") == 3
        return await echo(site, request) if is_ready else web.json_response({"error": {"message": "no"}}, status=500)

    async with (
        sites("ams1") as fakes,
        metered(fakes, tmp_path, monkeypatch, RouterLimits(batches=BatchLimits(first_wait_s=0.0))) as running,
        client(running) as made,
    ):
        fakes[0].behave = fails
        done = await ended(made, (await started(made, lines("late", "never"))).id)
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        assert sorted(tried) == 3 * ["late"] + 3 * ["never"]


async def test_workers_ais_queue_answers_by_request_id_with_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        sites("ams1") as fakes,
        metered(fakes, tmp_path, monkeypatch, RouterLimits(batches=BatchLimits(part_bytes=1))) as running,
    ):
        fakes[0].behave = answer(200, {"result": {"response": "Hi"}, "success": True, "errors": [], "messages": []})

        async def run(fields: dict[str, Any], headers: dict[str, str] = ACME) -> tuple[int, Any]:
            async with running.http.post(running.url + RUN, json=fields, headers=headers) as response:
                return response.status, await response.json()

        _, told = await run({"requests": [{"prompt": "a", "external_reference": "A"}, {"prompt": "b"}]})
        assert told["result"]["status"] == "queued"
        poll = {"request_id": told["result"]["request_id"]}
        async with asyncio.timeout(60):
            while (told := (await run(poll))[1])["result"]["status"] != "complete":
                await asyncio.sleep(0.02)
        result = told.pop("result")
        assert told == {"success": True, "errors": [], "messages": []}
        assert result["request_id"] == poll["request_id"]
        assert result["model"] == RUN.partition("/run/")[2].partition("?")[0]
        assert result["responses"] == [
            {"id": 0, "success": True, "result": {"response": "Hi"}, "external_reference": "A"},
            {"id": 1, "success": True, "result": {"response": "Hi"}},
        ]
        assert sorted(json.loads(body)["prompt"] for body in fakes[0].bodies) == ["a", "b"]
        assert (await run(poll, BOB))[0] == 404
        wrongs: list[dict[str, Any]] = [
            {"requests": []},
            {"requests": ["a"]},
            {"requests": [{"prompt": "a", "stream": True}]},
            {"request_id": 7},
        ]
        for wrong in wrongs:
            status, told = await run(wrong)
            assert (status, told["errors"][0]["code"]) == (400, 5004), wrong


async def test_a_path_that_must_be_encoded_reaches_the_site_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/client/v4/accounts/a%20b/ai/run/@cf/%E6%97%A5"
    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running:
        fakes[0].behave = answer(200, {"result": {"response": "x"}, "success": True})
        url = URL(f"{running.url}{path}?queueRequest=true", encoded=True)
        asked: dict[str, Any] = {"requests": [{"prompt": "x"}]}
        async with asyncio.timeout(60):
            while "responses" not in asked:
                async with running.http.post(url, json=asked, headers=ACME) as response:
                    asked = (await response.json())["result"]
        assert [each["success"] for each in asked["responses"]] == [True]
        assert fakes[0].seen[0].raw_path == path


async def test_what_is_under_way_when_a_router_stops_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sites("ams1") as fakes:
        fakes[0].behave = hang
        async with metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
            batch = await started(made, lines("a", "b"))
            await running.until(lambda: fakes[0].active == 2)
            await running.proxy.drain(0)
        fakes[0].behave = echo
        async with metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
            assert (await ended(made, batch.id)).request_counts.completed == 2


async def test_a_router_without_a_ledger_says_where_batches_would_be() -> None:
    async with sites("ams1") as fakes, router(fakes) as running, client(running) as made:
        with pytest.raises(openai.NotFoundError, match=r"ledger\.directory"):
            await made.batches.list()


async def test_lists_come_in_pages_that_say_where_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RouterLimits(batches=BatchLimits(num_listed=5))
    async with (
        sites("ams1") as fakes,
        metered(fakes, tmp_path, monkeypatch, limits) as running,
        client(running) as made,
    ):

        async def files(**query: str) -> tuple[list[str], Any]:
            url = running.url + "/v1/files"
            async with running.http.get(url, params=query, headers=ACME) as response:
                told = await response.json()
            return [each["id"] for each in told.get("data", ())], told

        none, told = await files()
        assert (none, told["first_id"], told["last_id"], told["has_more"]) == ([], None, None, False)
        for i in range(5):
            await made.files.create(file=(f"{i}.jsonl", lines(str(i))), purpose="batch")
        every, told = await files()
        assert (len(every), told["has_more"]) == (5, False)
        first, told = await files(limit="2")
        assert (first, told["first_id"], told["last_id"], told["has_more"]) == (every[:2], every[0], every[1], True)
        assert await files(limit="3", after=every[1]) == (
            every[2:],
            {
                **told,
                "data": (await files())[1]["data"][2:],
                "first_id": every[2],
                "last_id": every[4],
                "has_more": False,
            },
        )
        assert (await files(purpose="batch_output"))[0] == []
        assert (await files(purpose="batch", limit="10000"))[0] == every
        for query in (
            {"limit": "0"},
            {"limit": "10001"},
            {"limit": "x"},
            {"limit": "0" * 4301 + "1"},
            {"limit": "\u00b2"},
            {"after": "file-0"},
        ):
            error = (await files(**query))[1]["error"]
            assert (error["code"], error["param"]) == ("invalid_request", *query), query
        await made.files.create(file=("5.jsonl", lines("5")), purpose="batch")
        first, told = await files(limit="10000")
        assert (len(first), told["has_more"]) == (5, True)


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "param"),
    [
        ("PUT", "/v1/files", {}, "method_not_allowed", None),
        ("POST", "/v1/files/FILE", {}, "method_not_allowed", None),
        ("DELETE", "/v1/files/FILE/content", None, "method_not_allowed", None),
        ("DELETE", "/v1/batches/x", None, "method_not_allowed", None),
        ("GET", "/v1/batches/x/cancel", None, "method_not_allowed", None),
        ("GET", "/v1/files/none", None, "not_found", None),
        ("POST", "/v1/batches", {"endpoint": "/v1/x"}, "invalid_request", "endpoint"),
        ("POST", "/v1/batches", {"completion_window": "1h"}, "invalid_request", "completion_window"),
        ("POST", "/v1/batches", {"input_file_id": 7}, "invalid_request", "input_file_id"),
        ("POST", "/v1/batches", {"metadata": []}, "invalid_request", "metadata"),
        ("POST", "/v1/batches", {"metadata": {"a": 1}}, "invalid_request", "metadata"),
        ("POST", "/v1/batches", {"metadata": {"a" * 65: ""}}, "invalid_request", "metadata"),
        ("POST", "/v1/batches", {"metadata": {"a": "b" * 513}}, "invalid_request", "metadata"),
        ("POST", "/v1/batches", {"metadata": {str(i): "" for i in range(17)}}, "invalid_request", "metadata"),
        ("POST", "/v1/batches", {"metadata": {f"{i:064}": "b" * 512 for i in range(16)}}, None, None),
    ],
)
async def test_what_cannot_be_asked_of_files_and_batches_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any, code: str, param: str
) -> None:
    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch) as running, client(running) as made:
        file = await made.files.create(file=("asked.jsonl", b"no line"), purpose="batch")
        url = running.url + path.replace("FILE", file.id)
        if path == "/v1/batches":
            body = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file.id, **body}
        async with running.http.request(method, url, json=body, headers=ACME) as response:
            told = await response.json()
        if code is None:
            assert (told["status"], told["metadata"]) == ("failed", body["metadata"])
        else:
            assert (told["error"]["code"], told["error"]["param"]) == (code, param)
        assert (await made.files.content(file.id)).content == b"no line"
