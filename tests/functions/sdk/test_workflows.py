"""Workflows in real isolates, with storage at the runtime: each step once, retries, waits, and a process that crashes in between."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.host.faults import Fault
from pilotlight.support.database import Databases
from tests.functions.conftest import Served, ServedMaker

MANIFEST = '[[workflows]]\nname = "flow"\nbinding = "FLOW"\nclass_name = "Flow"\n[[kv_namespaces]]\nbinding = "KV"\n'
START = """
import asyncio, json, os, time
from urllib.parse import urlsplit, parse_qsl
from workers import Response, WorkerEntrypoint, WorkflowEntrypoint, env
from workers.workflows import NonRetryableError

QUICK = {"retries": {"limit": 2, "delay": 10, "backoff": "constant"}}

async def note(word):
    await env.KV.put("notes", (await env.KV.get("notes") or "") + word + " ")

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        parts = urlsplit(request.url)
        query, path = dict(parse_qsl(parts.query)), parts.path[1:]
        if path == "notes":
            return Response(await env.KV.get("notes") or "")
        if path == "create":
            made = await env.FLOW.create({"id": query.get("id", "one"), "params": query})
            return Response(made.id)
        instance = await env.FLOW.get(query.get("id", "one"))
        if path == "event":
            await instance.sendEvent({"type": query["type"], "payload": query})
            return Response("sent")
        return Response.json(await getattr(instance, path)())
"""
Make = Callable[[str], AbstractAsyncContextManager[Served]]


@pytest.fixture
def site(make_served: ServedMaker, tmp_path: Path) -> Make:
    """Return a function that starts a site; a second call keeps the state, like a restart."""

    @asynccontextmanager
    async def make(source: str) -> AsyncIterator[Served]:
        services = Services(databases=Databases())
        bindings = partial(FunctionBindings.open, tmp_path / "state", services)
        async with make_served(tier=1, open_bindings=bindings) as served:
            served.add(START + source, manifest=MANIFEST)
            yield served
        await services.databases.close()

    return make


async def until(served: Served, *statuses: str, id: str = "one") -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            status: dict[str, Any] = json.loads(await served.get(f"/status?id={id}"))
            if status["status"] in statuses:
                return status
            await asyncio.sleep(0.05)


async def notes(served: Served) -> list[str]:
    return (await served.get("/notes")).decode().split()


async def test_steps_depend_on_each_other_and_run_once(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        @step.do("first")
        async def a():
            await note("a")
            return {"n": 2}
        @step.do()
        async def b(a, ctx):
            return a["n"] + ctx["step"]["count"]
        @step.do("last", depends=[a, b], concurrent=True)
        async def c(x=None, y=None):
            return [x.n, y]
        return {"all": await c(), "name": event.workflowName, "id": event["instanceId"], "params": event["payload"]}
"""
    async with site(source) as served:
        assert await served.get("/create?k=v") == b"one"
        status = await until(served, "complete", "errored")
        assert status == {
            "status": "complete",
            "error": None,
            "output": {"all": [2, 3], "name": "flow", "id": "one", "params": {"k": "v"}},
        }
        assert await notes(served) == ["a"]
        with pytest.raises(Fault, match="already_exists"):
            await served.get("/create")
        with pytest.raises(Fault, match="not_found"):
            await served.get("/status?id=other")


async def test_a_step_is_repeated_as_its_policy_says(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        @step.do("flaky", config=QUICK)
        async def flaky(ctx):
            await note(f"try{ctx['attempt']}")
            if ctx["attempt"] < 3:
                raise ValueError("not yet")
            return ctx["config"]["retries"]["limit"]
        @step.do("hopeless", config=QUICK)
        async def hopeless():
            await note("once")
            raise NonRetryableError("never")
        given = await flaky()
        try:
            await hopeless()
        except NonRetryableError as error:
            return [given, str(error)]
"""
    async with site(source) as served:
        await served.get("/create")
        assert (await until(served, "complete", "errored"))["output"] == [2, "never"]
        assert await notes(served) == ["try1", "try2", "try3", "once"]


async def test_an_uncaught_failure_ends_the_instance(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        @step.do("bad", config={"retries": {"limit": 0, "delay": 0}, "timeout": "1 second"})
        async def bad():
            await asyncio.sleep(10)
        await bad()
"""
    async with site(source) as served:
        await served.get("/create")
        error = (await until(served, "complete", "errored"))["error"]
        assert error == {"name": "WorkflowTimeoutError", "message": "the step 'bad' took more than 1 s"}


SLEEPS = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        await note("run")
        await step.do("before", lambda: note("before"))
        await step.sleep("nap", "7 seconds")
        await step.do("after", lambda: note("after"))
        return "slept"
"""


async def test_a_long_sleep_leaves_memory_and_continues_in_another_process(site: Make) -> None:
    async with site(SLEEPS) as served:
        await served.get("/create")
        await until(served, "waiting")
    async with site(SLEEPS) as served:
        assert (await until(served, "complete", "errored"))["output"] == "slept"
        assert [word for word in await notes(served) if word != "run"] == ["before", "after"]


async def test_a_process_that_dies_in_a_step_costs_one_attempt(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        await step.do("first", lambda: note("first"))
        @step.do("dies", config={"retries": {"limit": 3, "delay": 1}})
        async def dies(ctx):
            if ctx["attempt"] == 1:
                await note("dies")
                os._exit(1)
            return ctx["attempt"]
        return await dies()
"""
    async with site(source) as served:
        await served.get("/create")
        with suppress(Fault):  # the call may hit the process that crashes
            await until(served, "complete", "errored")
        assert (await until(served, "complete", "errored"))["output"] == 2
        assert await notes(served) == ["first", "dies"]


async def test_an_event_wakes_waiters_for_its_type(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        one = await step.wait_for_event("first", "go")
        try:
            await step.wait_for_event("never", "other", timeout=50)
        except Exception as error:
            return [one["payload"]["n"], one.type, str(error), one.timestamp >= event.timestamp]
"""
    async with site(source) as served:
        await served.get("/create")
        await served.get("/event?type=wrong&n=0")
        await until(served, "waiting")
        await served.get("/event?type=go&n=1")
        status = await until(served, "complete", "errored")
        assert status["output"] == ["1", "go", "no event 'other' has come for the step 'never' in time", True]


async def test_an_instance_is_paused_resumed_terminated_and_restarted(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        await step.do("begin", lambda: note("begin"))
        await step.wait_for_event("go", "go", "1 hour")
        return "done"
"""
    async with site(source) as served:
        await served.get("/create")
        await until(served, "waiting")
        await served.get("/pause")
        await served.get("/event?type=go")
        assert (await until(served, "paused"))["status"] == "paused"
        await served.get("/resume")
        await until(served, "complete")
        with pytest.raises(Fault, match="is complete and cannot be terminated"):
            await served.get("/terminate")
        await served.get("/restart")
        await until(served, "waiting")
        await served.get("/terminate")
        await until(served, "terminated")
        assert await notes(served) == ["begin", "begin"]


async def replayed(served: Served) -> None:
    """Start the workflow's run again, once it waits in memory."""
    await served.get("/pause")
    await served.get("/resume")


async def test_a_step_may_be_repeated_without_end(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        @step.do("flaky", config={"retries": {"limit": float("inf"), "delay": 1, "backoff": "constant"}})
        async def flaky(ctx):
            if ctx["attempt"] < 9:
                raise ValueError("not yet")
            return str(ctx["config"]["retries"]["limit"])
        return await flaky()
"""
    async with site(source) as served:
        await served.get("/create")
        assert (await until(served, "complete", "errored"))["output"] == "inf"


async def test_an_event_that_came_too_late_is_too_late_in_every_run(site: Make) -> None:
    source = """
class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        got = []
        for name, timeout in (("first", 50), ("second", "1 hour")):
            try:
                got.append((await step.wait_for_event(name, "go", timeout=timeout)).payload["n"])
            except Exception as error:
                got.append(f"{type(error).__name__}: {error}")
                await note("late")
            await step.sleep(name, 3000)
        return got
"""
    async with site(source) as served:
        await served.get("/create")
        async with asyncio.timeout(30):
            while await notes(served) != ["late"]:
                await asyncio.sleep(0.01)
        await served.get("/event?type=go&n=1")
        await replayed(served)
        late = "WorkflowTimeoutError: no event 'go' has come for the step 'first' in time"
        assert (await until(served, "complete", "errored"))["output"] == [late, "1"]
        assert set(await notes(served)) == {"late"}


async def test_a_step_fails_in_the_same_way_in_every_run(site: Make) -> None:
    source = """
class MyError(Exception):
    def __init__(self, amount):
        super().__init__(f"no {amount} left")
        self.amount = amount

class Strange(MyError):
    def __str__(self):
        return f"strange {self.amount}"

class Flow(WorkflowEntrypoint):
    async def run(self, event, step):
        class Local(ValueError):
            pass
        class Nameless(Exception):
            pass
        errors = [MyError(5), Strange(6), KeyError("key"), OSError(2, "gone", "file"), Local("local"), Nameless("none"), Exception("plain"),
                  UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), MyError(object())]
        found = []
        for number, error in enumerate(errors):
            async def fail(error=error):
                raise error
            try:
                await step.do(f"fail {number}", fail, config={"retries": {"limit": 0}})
            except Exception as caught:
                fields = [repr(getattr(caught, name, None)) for name in ("amount", "errno", "filename")]
                found.append([type(caught).__name__, str(caught), *fields])
        await env.KV.put("run " + ("second" if await env.KV.get("run first") else "first"), json.dumps(found))
        await note("rests")
        await step.sleep("rest", 3000)
        return [json.loads(await env.KV.get(key)) for key in ("run first", "run second")]
"""
    async with site(source) as served:
        await served.get("/create")
        async with asyncio.timeout(30):
            while await notes(served) != ["rests"]:
                await asyncio.sleep(0.01)
        await replayed(served)
        first, second = (await until(served, "complete", "errored"))["output"]
        assert first == second
        assert [each[:2] for each in first[:-1]] == [
            ["MyError", "no 5 left"], ["Strange", "strange 6"], ["KeyError", "'key'"], ["FileNotFoundError", "[Errno 2] gone: 'file'"],
            ["ValueError", "local"], ["Exception", "Nameless: none"], ["Exception", "plain"],
            ["UnicodeDecodeError", "'utf-8' codec can't decode byte 0x78 in position 0: bad"],
        ]  # fmt: skip
        assert (first[0][2], first[3][3:]) == ("5", ["2", "'file'"])
        assert first[-1][0] == "MyError"
