"""The tools for authors' tests: a function in isolates, its bindings from outside, its handlers, and a clock."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pilotlight.functions.testing.local_worker import FunctionFailed, LocalWorker, TestClock

pytestmark = pytest.mark.process
pytest_plugins = ["pytester"]

MANIFEST = """
name = "app"
main = "entry.py"
[vars]
GREETING = "Hello"
[ai]
binding = "AI"
[[kv_namespaces]]
binding = "KV"
[[d1_databases]]
binding = "DB"
[[r2_buckets]]
binding = "FILES"
bucket_name = "files"
[[queues.producers]]
binding = "JOBS"
queue = "jobs"
[[queues.consumers]]
queue = "jobs"
[[durable_objects.bindings]]
name = "ROOM"
class_name = "Room"
[[migrations]]
tag = "v1"
new_sqlite_classes = ["Room"]
[triggers]
crons = ["0 3 * * *"]
"""
ENTRY = """
import time
from workers import DurableObject, Response, WorkerEntrypoint

class Room(DurableObject):
    async def add(self, text):
        self.ctx.storage.kv.put("text", text)
        await self.ctx.storage.setAlarm(int(time.time() * 1000) + 3_600_000)

    async def alarm(self):
        await self.env.KV.put("rang", self.ctx.storage.kv.get("text"))

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.partition("//")[2].partition("/")[2]
        if path == "ai":
            answer = await self.env.AI.run("@cf/some/model", {"prompt": "hi"})
            return Response(answer["response"])
        if path == "boom":
            raise ValueError("it went wrong")
        if path == "job":
            await self.env.JOBS.send({"text": await request.text()})
            return Response("queued", status=202)
        print("greets")
        return Response.json([self.env.GREETING, request.method, await self.env.KV.get("name")])

    async def queue(self, batch):
        for message in batch.messages:
            if message.body["text"] == "bad":
                message.retry(delaySeconds=7)
            else:
                await self.env.KV.put("job", message.body["text"])

    async def scheduled(self, controller):
        await self.env.KV.put("cron", f"{controller.cron} {controller.scheduledTime}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "app"
    made.mkdir()
    (made / "wrangler.toml").write_text(MANIFEST)
    (made / "migrations").mkdir()
    (made / "migrations" / "0001_t.sql").write_text("CREATE TABLE t (a);")
    (made / "entry.py").write_text(dedent(ENTRY))
    return made


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Callable[..., LocalWorker]]:
    made: list[LocalWorker] = []

    def make(**given: Any) -> LocalWorker:
        made.append(LocalWorker(folder, tmp_path / "state", **given).__enter__())
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_requests_and_bindings_meet_in_one_state(make: Callable[..., LocalWorker]) -> None:
    worker = make(vars={"GREETING": "Hi"})
    worker.run(worker.env.KV.put("name", "Ada"))
    response = worker.fetch("/x", method="POST", json={"a": 1})
    assert (response.status, response.json()) == (200, ["Hi", "POST", "Ada"])
    assert worker.logs == ["greets"]
    assert [(each.what, each.outcome) for each in worker.invocations] == [("POST /x", "ok")]
    failed = worker.fetch("/boom")
    assert (failed.status, "it went wrong" in failed.text) == (500, True)
    rows = worker.run(worker.env.DB.prepare("SELECT count(*) AS n FROM t").first())
    assert rows["n"] == 0
    worker.run(worker.env.FILES.put("a/b", b"bytes"))
    found = worker.run(worker.env.FILES.get("a/b"))
    assert worker.run(found.text()) == "bytes"


def test_without_a_folder_for_its_state_a_worker_leaves_nothing(folder: Path) -> None:
    for _ in range(2):
        with LocalWorker(folder) as worker:
            assert worker.fetch("/x").json() == ["Hello", "GET", None]
            worker.run(worker.env.KV.put("name", "Ada"))


def test_workers_share_the_packages_that_one_of_them_has_installed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "requirements.txt").write_text("idna==3.10\n")
    (folder / "entry.py").write_text("import idna\n" + dedent(ENTRY))
    layers = tmp_path / "layers"
    layers.mkdir()
    with LocalWorker(folder, layers=layers) as worker:
        assert worker.fetch("/x").status == 200
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/nothing")
    with LocalWorker(folder, layers=layers) as worker:
        assert worker.fetch("/x").status == 200


def test_models_answer_what_the_test_says(make: Callable[..., LocalWorker]) -> None:
    asked: list[Any] = []

    def answer(model: str, inputs: dict[str, Any]) -> str:
        asked.append((model, inputs))
        return "a short answer"

    assert make(ai=answer).fetch("/ai").text == "a short answer"
    assert asked == [("@cf/some/model", {"prompt": "hi"})]


def test_models_that_the_test_says_nothing_of_are_named(make: Callable[..., LocalWorker]) -> None:
    assert "the test provides no answers for @cf/some/model" in make().fetch("/ai").text


def test_queues_are_consumed_and_a_batch_can_be_given_by_hand(make: Callable[..., LocalWorker]) -> None:
    worker = make()
    assert worker.fetch("/job", method="POST", body="clean up").status == 202
    worker.until_idle()
    assert worker.run(worker.env.KV.get("job")) == "clean up"
    outcome = worker.queue("jobs", [{"text": "good"}, {"text": "bad"}])
    assert (outcome.acked, outcome.retried, outcome.error) == ([0], {1: 7}, "")


def test_the_outcome_of_a_batch_whose_handler_fails_has_its_decisions_and_its_traceback(
    make: Callable[..., LocalWorker], folder: Path
) -> None:
    (folder / "entry.py").write_text(
        dedent(ENTRY).replace('await self.env.KV.put("job"', 'message.ack()\n            await self.env.KV.put("job"')
    )
    worker = make()
    outcome = worker.queue("jobs", [{"text": "good"}, {}, {"text": "unseen"}])
    assert (outcome.acked, outcome.retried) == ([0], {1: None, 2: None})
    assert 'message.body["text"]' in outcome.error
    assert "KeyError" in outcome.error


def test_a_function_without_a_handler_for_a_batch_is_named(make: Callable[..., LocalWorker], folder: Path) -> None:
    (folder / "entry.py").write_text(dedent(ENTRY).replace("def queue", "def other"))
    with pytest.raises(FunctionFailed, match="queue"):
        make().queue("jobs", [{}])


def test_alarms_and_crons_go_by_the_tests_clock(make: Callable[..., LocalWorker]) -> None:
    worker = make()
    worker.scheduled("*/5 * * * *", at_s=12)
    assert worker.run(worker.env.KV.get("cron")) == "*/5 * * * * 12000"
    room = worker.env.ROOM.getByName("one")
    worker.run(room.add("text"))
    worker.until_idle()
    assert worker.run(worker.env.KV.get("rang")) is None
    worker.advance(3601)
    until(lambda: worker.run(worker.env.KV.get("rang")) == "text")
    worker.advance(86_400)
    until(lambda: str(worker.run(worker.env.KV.get("cron"))).startswith("0 3 * * * "))
    worker.run(worker.env.KV.put("short", "x", expirationTtl=60))
    worker.advance(61)
    assert worker.run(worker.env.KV.get("short")) is None


CRON_THAT_TAKES_LONG = """
import asyncio
from workers import WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def scheduled(self, controller):
        await self.env.KV.put("cron", "runs")
        await asyncio.sleep(60)
"""


def test_a_cron_that_runs_when_the_worker_closes_is_no_error(
    make: Callable[..., LocalWorker], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "entry.py").write_text(CRON_THAT_TAKES_LONG)
    worker = make()
    worker.advance(86_400)
    until(lambda: worker.run(worker.env.KV.get("cron")) == "runs")
    worker.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_the_time_of_crons_passes_only_when_the_test_advances_it() -> None:
    clock = TestClock()
    began_s = clock.schedule_s()
    until(lambda: clock.now_s() > began_s)
    assert clock.schedule_s() == began_s
    clock.added_s += 60
    assert clock.schedule_s() == began_s + 60


def until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def test_the_plug_in_offers_the_function_of_the_project(pytester: pytest.Pytester, folder: Path) -> None:
    pytester.makepyfile(
        """
        def test_it_greets(worker):
            assert worker.fetch("/").json()[0] == "Hello"

        def test_each_has_bindings_of_its_own(worker, make_worker):
            worker.run(worker.env.KV.put("name", "a"))
            other = make_worker(vars={"GREETING": "Ho"})
            assert [each.fetch("/").json()[2] for each in (worker, other)] == ["a", None]
        """
    )
    result = pytester.runpytest_subprocess("--worker", str(folder), "-p", "no:xdist")
    result.assert_outcomes(passed=2)


def test_a_second_run_uses_the_packages_that_the_first_has_installed(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "requirements.txt").write_text("idna==3.10\n")
    (folder / "entry.py").write_text("import idna\n" + dedent(ENTRY))
    pytester.makepyfile("def test_it(worker): assert worker.fetch('/').status == 200")
    for _ in range(2):
        result = pytester.runpytest_subprocess("--worker", str(folder), "-p", "no:xdist")
        result.assert_outcomes(passed=1)
        for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
            monkeypatch.setenv(name, "http://127.0.0.1:9/nothing")
        monkeypatch.setenv("UV_OFFLINE", "1")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


def test_a_project_without_a_function_is_refused_by_name(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(worker): ...")
    result = pytester.runpytest_subprocess("-p", "no:xdist")
    result.stdout.fnmatch_lines(["*has a wrangler.jsonc or wrangler.json or wrangler.toml: name one by --worker*"])
