"""Routers that share stored responses in a real PostgreSQL: each reads those of the others, and marks those of a dead router as failed."""

import asyncio
import json
import logging
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest

from load_tests.postgres import Postgres
from pilotlight.edge_router.app import build_app
from pilotlight.edge_router.services.shared_responses import WRITERS_LOCK, PostgresResponses, WriterLimits
from pilotlight.response_store.kept_responses import KeptResponse, failed_event
from pilotlight.response_store.response_database import Result, RetentionPolicy, Work
from pilotlight.response_store.response_rows import EXPIRES_S, confirm
from pilotlight.response_store.storage import ResponseStore, StoreTimings
from pilotlight.sites.config import ConfigError
from pilotlight.wire.errors import ApiError
from pilotlight.wire.sse import EventDecoder
from tests.edge_router.builders import network as network_of
from tests.edge_router.conftest import without_responses
from tests.edge_router.fakes import FakeSite, sites
from tests.edge_router.test_kept_responses import Client, answered, keys
from tests.edge_router.test_serve import network_file, process, ready

DAY_S = 86_400.0


@pytest.fixture
def server(postgres: Postgres) -> Postgres:
    return without_responses(postgres)


OFTEN = StoreTimings(progress_s=0.02, presence_s=0.1, follow_s=0.02, retry_s=0.05)


class Database(PostgresResponses):
    """The routers' database, with which a router's reports can be held back."""

    def __init__(self, url: str, limits: WriterLimits | None) -> None:
        super().__init__(url, limits)
        self.may_report = asyncio.Event()
        self.may_report.set()

    async def run(self, work: Work[Result], within_s: float, *, is_write: bool) -> Result:
        if isinstance(work, partial) and work.func is confirm:
            await self.may_report.wait()
        return await super().run(work, within_s, is_write=is_write)


@asynccontextmanager
async def opened(
    server: Postgres, max_bytes: int = 1 << 30, limits: WriterLimits | None = None, **timings: float
) -> AsyncIterator[ResponseStore]:
    policy = RetentionPolicy(Path("nowhere"), max_bytes, 30 * DAY_S)
    store = ResponseStore(policy, Database(server.url, limits), OFTEN._replace(**timings))
    try:
        yield store
    finally:
        await store.close()


def response(name: str, *, tenant: str = "t", size: int = 10, status: str = "completed") -> KeptResponse:
    output = [{"id": f"msg_{name}", "text": "x" * size}] if status == "completed" else []
    return KeptResponse(tenant, {"id": name, "status": status, "output": output, "background": True}, b'{"id":"i"}')


async def started(store: ResponseStore, name: str) -> KeptResponse:
    """Start a response that runs until it is ended or cancelled."""
    made = response(name, status="in_progress")
    await store.begin(made)

    async def make() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            made.end_as("cancelled")
            raise
        finally:
            await store.settle(made)

    made.make_by(make())
    await asyncio.sleep(0)
    return made


async def status_of(store: ResponseStore, name: str, tenant: str = "t") -> str:
    """Return a response's status; "" if there is none with this name."""
    try:
        return str((await store.find(name, tenant)).fields["status"])
    except ApiError as error:
        return "" if error.word == "not_found" else error.word


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


async def is_well(store: ResponseStore) -> bool:
    return store.fault is None


def ask(server: Postgres, statement: str) -> list[Any]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def ask_number(server: Postgres, name: str) -> int:
    """Return the number of stored events of a response."""
    ((packed,),) = ask(server, f"SELECT events FROM responses WHERE id = '{name}'")
    return zlib.decompress(packed).count(b"\n\n")


def time_passes(server: Postgres, lost: ResponseStore, watching: ResponseStore) -> None:
    """Advance past the time after which a router counts as dead.

    `lost` is dead; `watching` has reported without a gap.
    """
    ask(server, f"UPDATE response_makers SET seen_s = seen_s - {EXPIRES_S + 1} WHERE maker = '{lost.maker}'")
    ask(server, f"UPDATE response_makers SET since_s = since_s - {EXPIRES_S + 1} WHERE maker = '{watching.maker}'")


async def stop(store: ResponseStore) -> None:
    """Stop the reports of a router, as if it had stopped."""
    assert isinstance(store.database, Database)
    store.database.may_report.clear()
    await idle(store)


async def idle(store: ResponseStore) -> None:
    """Wait until a router's thread has finished its work."""
    assert isinstance(store.database, PostgresResponses)
    await asyncio.get_running_loop().run_in_executor(store.database._thread, int)


async def test_what_one_router_keeps_another_one_has_and_its_tenants_alone(server: Postgres) -> None:
    async with opened(server) as a, opened(server) as b:
        assert await a.keep(response("1"))
        later = response("2")
        later.before = await b.conversation("1", "t", "p")
        assert await b.keep(later)
        found = await a.find("2", "t")
        assert found.fields == later.fields
        assert await a.input_items(found) == b'{"id":"i"},' + response("1").output + b',{"id":"i"}'
        assert await a.items(["msg_1", "msg_2"], "t") == {f"msg_{i}": response(i).output for i in "12"}
        assert [await status_of(b, "2", tenant) for tenant in ("t", "u")] == ["completed", ""]
        await b.delete(await b.find("1", "t"))
        assert [await status_of(a, name) for name in "12"] == ["", "completed"]


async def test_one_that_is_made_is_followed_at_another_router_from_any_event(server: Postgres) -> None:
    async with opened(server) as a, opened(server) as b:
        made = await started(a, "1")
        shown = await b.find("1", "t")
        assert (shown.task, shown.fields["status"]) == (None, "in_progress")
        with pytest.raises(ApiError) as refused:
            await b.conversation("1", "t", "p")
        assert refused.value.word == "conflict"
        reading = asyncio.create_task(b.after(shown, 0))
        told = [b"data: %d\n\n" % i for i in range(4)]
        for one in told[:3]:
            made.untold.append(one)
        async with asyncio.timeout(30):
            events, is_last = await reading
            while len(events) < 3:
                more, is_last = await b.after(shown, len(events))
                events += more
            assert (events, is_last) == (told[:3], False)
            assert await b.after(shown, 2) == (told[2:3], False)
            made.untold.append(told[3])
            await a.end(made, response("1").fields)
            assert await b.after(shown, 3) == (told[3:], True)
            assert await b.after(shown, 9) == ([], True)
        assert (await b.find("1", "t")).fields == response("1").fields


@pytest.mark.parametrize("ends", ["cancelled", "deleted"])
async def test_what_is_ended_at_another_router_is_no_longer_made(server: Postgres, ends: str) -> None:
    async with opened(server) as a, opened(server) as b:
        made = await started(a, "1")
        other = await started(a, "2")
        shown = await b.find("1", "t")
        if ends == "cancelled":
            assert (await b.cancel(shown)).fields["status"] == "cancelled"
            assert (await b.cancel(shown)).fields["status"] == "cancelled"
        else:
            await b.delete(shown)
        assert made.task is not None
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(30):
                await made.task
        assert made.fields["status"] == "cancelled"
        assert [await status_of(store, "1") for store in (a, b)] == 2 * ["cancelled" if ends == "cancelled" else ""]
        assert other.fields["status"] == "in_progress"


async def test_what_a_router_that_is_gone_was_making_has_failed_and_stays_so_when_it_is_back(server: Postgres) -> None:
    async with opened(server) as a, opened(server) as b:
        made, ending = await started(a, "1"), response("2", status="in_progress")
        await a.begin(ending)
        made.untold.append(b"data: 0\n\n")
        shown = await b.find("1", "t")
        async with asyncio.timeout(30):
            assert await b.after(shown, 0) == ([b"data: 0\n\n"], False)
        made.untold.append(b"data: 1\n\n")
        await stop(a)
        following = asyncio.create_task(b.after(shown, 2))
        await until(partial(asyncio.to_thread, ask, server, f"SELECT 1 FROM response_makers WHERE maker = '{b.maker}'"))
        time_passes(server, a, b)
        async with asyncio.timeout(30):
            (last,), is_last = await following
        failed = (await b.find("1", "t")).fields
        told = json.loads(EventDecoder().feed(last)[0].data or b"")
        assert (told, is_last) == ({"type": "response.failed", "sequence_number": 2, "response": failed}, True)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "aborted")
        (first, *_, last), _ = await b.after(shown, 0)
        assert (first, last) == (b"data: 0\n\n", failed_event(failed, ask_number(server, "1")))
        assert (await b.conversation("1", "t", "p")).items == b'{"id":"i"}', "the row can be read again"

        # router a is back, beginning with the end of one of its responses
        ending.untold.append(b"data: end\n\n")
        await a.end(ending, response("2").fields)
        assert ending.fields["status"] == "failed"
        assert ending.is_settled
        assert isinstance(a.database, Database)
        a.database.may_report.set()
        assert made.task is not None
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(30):
                await made.task
        assert made.fields == failed
        assert [await status_of(store, name) for store in (a, b) for name in "12"] == 4 * ["failed"]


async def test_a_router_that_stops_leaves_what_it_was_making_failed_for_the_others(server: Postgres) -> None:
    async with opened(server) as b:
        async with opened(server) as a:
            made = await started(a, "1")
            made.untold.append(b"data: 0\n\n")
        shown = await b.find("1", "t")
        assert shown.fields["status"] == "failed"
        events, is_last = await b.after(shown, 0)
        assert (events, is_last) == (made.events, True)


async def test_routers_that_write_at_once_lose_nothing_of_conversations(server: Postgres) -> None:
    """Responses that others continue are deleted meanwhile, because of a limit on bytes."""
    async with opened(server) as a, opened(server) as b:
        for i in range(20):
            assert await a.keep(response(f"first{i}"))

        async def go_on(i: int) -> None:
            later = response(f"later{i}")
            later.before = await b.conversation(f"first{i}", "t", "p")
            await asyncio.gather(b.keep(later), a.delete(await a.find(f"first{i}", "t")))

        await asyncio.gather(*(go_on(i) for i in range(20)))
        for i in range(20):
            said = json.loads(b"[" + (await a.conversation(f"later{i}", "t", "p")).items + b"]")
            assert [item["id"] for item in said] == ["i", f"msg_first{i}", "i", f"msg_later{i}"]


@pytest.mark.parametrize("fails", ["killed", "stopped"])
async def test_a_database_that_is_away_costs_records_that_end_meanwhile_and_no_long_waits(
    server: Postgres, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    fail, mend = (server.kill, server.start) if fails == "killed" else (server.stop, server.go_on)
    async with opened(server, answer_s=1.0) as a, opened(server, answer_s=1.0) as b:
        assert await a.keep(response("before"))
        made = await started(a, "made")
        assert await status_of(b, "made") == "in_progress"
        await asyncio.to_thread(fail)
        try:
            async with asyncio.timeout(20):
                assert not await a.keep(response("lost"))
                with pytest.raises(ApiError) as refused:
                    await a.begin(response("refused", status="queued"))
                assert (refused.value.word, refused.value.retry_after_s) == ("overloaded", 5)
                assert "pilotlight-pg" not in refused.value.message, "clients see no host name"
                assert "cannot be read or written right now: their database" in refused.value.message
                with pytest.raises(ApiError):
                    await b.after(response("made", status="in_progress"), 0)
            assert [store.fault is None for store in (a, b)] == [False, False]
            await asyncio.sleep(0.5)
            errors = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert len(errors) == 2, "once for each router, not for each failure"
            made.untold.append(b"data: 0\n\n")
            ending = asyncio.create_task(a.end(made, response("made").fields))
            await asyncio.wait({ending})
            assert made.fields["status"] == "completed", "readers of this router get it"
        finally:
            await asyncio.to_thread(mend)
        for store in (a, b):
            store.timings = store.timings._replace(answer_s=30.0, answer_after_fault_s=30.0)
        assert await a.keep(response("after"))
        assert await status_of(b, "after") == "completed"
        await a.settle(made)
        assert (await b.find("made", "t")).fields == response("made").fields
        assert [await status_of(b, name) for name in ("before", "refused")] == ["completed", ""]
        await until(lambda: is_well(a))
        await until(lambda: is_well(b))


FULL = """CREATE OR REPLACE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file "base/5/1": No space left on device' USING ERRCODE = '53100'; END $$;
    CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON responses FOR EACH STATEMENT EXECUTE FUNCTION full_disk();
    CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON response_makers FOR EACH STATEMENT EXECUTE FUNCTION full_disk()"""
MENDED = "DROP TRIGGER full_disk ON responses; DROP TRIGGER full_disk ON response_makers"


async def test_a_database_that_is_full_is_read_and_said_once_to_be_full(
    server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server) as a:
        assert await a.keep(response("before"))
        ask(server, FULL)
        for i in range(10):
            assert not await a.keep(response(f"lost{i}"))
            assert await status_of(a, "before") == "completed"
            await asyncio.sleep(0.02)
        assert a.fault is not None, "although it can be read"
        assert [record.message for record in caplog.records if "pilotlight.responses" in record.name] == [
            'responses cannot be read or written in the routers\' database: could not extend file "base/5/1": No space left on device CONTEXT: '
            "PL/pgSQL function full_disk() line 1 at RAISE"
        ]
        ask(server, MENDED)
        assert await a.keep(response("after"))
        assert a.fault is None


async def test_an_idle_database_that_was_restarted_costs_nothing(server: Postgres) -> None:
    async with opened(server) as a:
        assert await a.keep(response("before"))
        await stop(a)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert await a.keep(response("after"))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert await status_of(a, "before") == "completed"


async def test_what_was_refused_and_is_there_all_the_same_is_dropped(server: Postgres) -> None:
    """The database may have stored a response although its confirmation was lost."""
    async with opened(server) as a:
        refused, made = response("refused", status="queued"), await started(a, "made")
        assert await a.keep(refused)

        async def is_dropped() -> bool:
            return ask(server, "SELECT id FROM responses") == [("made",)]

        await until(is_dropped)
        await asyncio.sleep(0.1)
        assert (await a.find("made", "t")) is made
        assert made.fields["status"] == "in_progress"


def waits_for_its_turn(server: Postgres) -> Callable[[], Any]:
    return partial(asyncio.to_thread, ask, server, "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory'")


async def test_who_writes_does_so_alone(server: Postgres) -> None:
    patient, goes_on = WriterLimits(30.0, 30.0), threading.Event()
    async with opened(server, limits=patient) as a, opened(server, limits=patient) as b:
        for store in (a, b):
            assert await store.keep(response("before"))
            await stop(store)
        writing = asyncio.create_task(a.database.run(lambda _: goes_on.wait(60), 30.0, is_write=True))
        await until(
            partial(asyncio.to_thread, ask, server, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted")
        )
        keeping = asyncio.create_task(b.keep(response("after")))
        await until(waits_for_its_turn(server))
        assert not keeping.done()
        goes_on.set()
        assert await writing
        assert await keeping


@pytest.mark.parametrize("leaves", [False, True])
async def test_work_without_waiting_callers_delays_no_other(server: Postgres, leaves: bool) -> None:
    async with opened(server) as a:
        assert await a.keep(response("before"))
        await stop(a)
        a.timings = a.timings._replace(answer_s=0.2)
        await asyncio.to_thread(server.stop)
        try:
            reading = asyncio.create_task(status_of(a, "before"))
            await asyncio.sleep(0.05)
            if leaves:
                reading.cancel()
            await asyncio.wait({reading})
            async with asyncio.timeout(60):
                await idle(a)
        finally:
            await asyncio.to_thread(server.go_on)


@pytest.mark.long
async def test_a_router_that_stands_still_amid_its_turn_loses_it(server: Postgres) -> None:
    limits = WriterLimits(1.0, 1.0)
    with psycopg.connect(server.url) as standing:
        standing.execute(limits.statement)
        async with opened(server, limits=limits) as a:
            assert await a.keep(response("1"))
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            standing.execute("SELECT 1")


@pytest.mark.long
async def test_a_waiter_for_a_turn_that_does_not_come_keeps_no_connection_for_it(server: Postgres) -> None:
    with psycopg.connect(server.url) as holding:
        holding.execute(f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})".encode())
        async with opened(server, limits=WriterLimits(1.0, 1.0), answer_s=0.1) as a:
            for i in range(5):
                assert not await a.keep(response(str(i)))
            a.timings = a.timings._replace(answer_s=5.0)
            assert await status_of(a, "0") == "", "who reads needs none"

            async def nobody_waits() -> bool:
                return not await waits_for_its_turn(server)()

            await stop(a)
            await until(nobody_waits)


async def test_routers_that_start_at_once_make_one_set_of_tables(server: Postgres) -> None:
    async with opened(server) as a, opened(server) as b, opened(server) as c:
        stores = (a, b, c)
        assert all(await asyncio.gather(*(store.keep(response(f"{i}")) for i, store in enumerate(stores))))
        assert [await status_of(a, name) for name in "012"] == 3 * ["completed"]


def test_a_store_that_cannot_be_used_stops_the_start_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"responses\.store is not a database URL") as refused:
        build_app(network_of({"ams1": "http://h"}, responses={"store": "postgresql://u:sec%ret@h/d"}))
    assert "ret" not in str(refused.value)


@asynccontextmanager
async def two_routers(
    folder: Path, server: Postgres
) -> AsyncIterator[tuple[FakeSite, list[Path], aiohttp.ClientSession]]:
    async with sites("ams1") as fakes, aiohttp.ClientSession() as session:
        fakes[0].behave = answered
        files = []
        for name in "ab":
            (folder / name).mkdir()
            extra = f'{keys()}[responses]\nstore = "{server.url}"\ndirectory = "{folder / name}"'
            files.append(network_file(folder / name, fakes[0].url, extra=extra, drain_timeout_s=0))
        yield fakes[0], files, session


async def test_clients_continue_at_another_router_and_learn_when_one_was_killed(
    server: Postgres, tmp_path: Path
) -> None:
    async with two_routers(tmp_path, server) as (site, files, session), process(files[1]) as (_, b_url):
        async with process(files[0]) as (a_process, a_url):
            await ready(session, a_url)
            await ready(session, b_url)
            at_a, at_b = (Client(session, url, "alice") for url in (a_url, b_url))
            first = await at_a.ask(input="one", stream=True)
            second = await at_b.ask(input="two", previous_response_id=first["id"])
            assert await at_b.fields(first["id"]) == first
            items = await at_a.fields(f"{second['id']}/input_items?order=asc")
            assert [item["said"] if "said" in item else item["content"][0]["text"] for item in items["data"]] == [
                "one", first["output"][0]["said"], "two",
            ]  # fmt: skip
            assert [item["id"] for item in json.loads(site.bodies[-1])["input"]] == [
                item["id"] for item in items["data"]
            ]
            bob = Client(session, b_url, "bob")
            assert (await bob.get(first["id"]))[0] == 404
            async with session.delete(f"{b_url}/v1/responses/{first['id']}", headers=at_b.headers) as deleted:
                assert deleted.status == 200
            assert (await at_a.get(first["id"]))[0] == 404

            made = await at_a.ask(input="hang", background=True)
            assert made["status"] == "in_progress"
            assert (await at_b.fields(made["id"]))["status"] in ("queued", "in_progress")
            events = await streamed(session, b_url, f"{made['id']}?stream=true", 2)
            assert events == [b"response.created", b"response.output_text.delta"]
            assert await streamed(session, b_url, f"{made['id']}?stream=true&starting_after=0", 1) == events[1:]
            assert (await at_b.fields(made["id"]))["status"] == "in_progress"
            before = site.cancelled
            async with session.post(f"{b_url}/v1/responses/{made['id']}/cancel", headers=at_b.headers) as cancelled:
                assert (await cancelled.json())["status"] == "cancelled"
            async with asyncio.timeout(30):
                while site.cancelled == before or (await at_a.fields(made["id"]))["status"] != "cancelled":
                    await asyncio.sleep(0.02)

            lost = await at_a.ask(input="hang", background=True)
            assert await streamed(session, b_url, f"{lost['id']}?stream=true", 2) == events
            a_process.kill()
            await a_process.wait()
        async with asyncio.timeout(30):
            while len(ask(server, "SELECT 1 FROM response_makers")) < 2:
                await asyncio.sleep(0.02)
        ask(server, f"UPDATE response_makers SET since_s = since_s - {EXPIRES_S}")
        ask(
            server,
            f"UPDATE response_makers SET seen_s = seen_s - {EXPIRES_S} FROM responses WHERE responses.maker = response_makers.maker AND state = 0",
        )
        failed = await at_b.fields(lost["id"])
        async with asyncio.timeout(30):
            while failed["status"] != "failed":
                await asyncio.sleep(0.02)
                failed = await at_b.fields(lost["id"])
        assert failed["error"]["code"] == "aborted"
        assert await streamed(session, b_url, f"{lost['id']}?stream=true", 3) == [*events, b"response.failed"]
        async with process(files[0]) as (_, a_url):
            await ready(session, a_url)
            assert await Client(session, a_url, "alice").fields(lost["id"]) == failed


async def streamed(session: aiohttp.ClientSession, url: str, rest: str, number: int) -> list[bytes | None]:
    """Return the names of the first events of a stream."""
    decoder, names = EventDecoder(), list[bytes | None]()
    async with asyncio.timeout(30):
        async with session.get(f"{url}/v1/responses/{rest}", headers={"authorization": "Bearer alice"}) as response:
            assert response.status == 200
            while len(names) < number:
                names += [event.name for event in decoder.feed(await response.content.readany())]
    return names


async def test_a_client_learns_what_is_not_kept_while_the_database_is_away_and_a_metric_counts_it(
    server: Postgres, tmp_path: Path
) -> None:
    async def is_failing() -> str:
        async with session.get(url + "/metrics") as response:
            text = await response.text()
        return next(
            line.split()[-1] for line in text.splitlines() if line.startswith("pilotlight_router_responses_failing")
        )

    async with two_routers(tmp_path, server) as (_, files, session), process(files[0]) as (_, url):
        await ready(session, url)
        alice = Client(session, url, "alice")
        assert (await alice.ask(input="one"))["store"]
        assert await is_failing() == "0.0"
        await asyncio.to_thread(server.kill)
        for stream in (False, True):
            assert (await alice.ask(input="one", stream=stream))["store"] is False
        assert await is_failing() == "1.0"
        body = {"model": "ember", "input": "hang", "background": True}
        async with session.post(f"{url}/v1/responses", json=body, headers=alice.headers) as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(30):
            while not (kept := await alice.ask(input="one"))["store"]:
                await asyncio.sleep(0.02)
        assert await alice.fields(kept["id"]) == kept
        assert await is_failing() == "0.0"


async def test_a_response_confirmed_as_kept_is_kept_whichever_is_killed_under_load(
    server: Postgres, tmp_path: Path
) -> None:
    rng = random.Random(7)
    told: list[Any] = []

    async def asking(client: Client, number: int) -> None:
        previous = None
        while True:
            last = await client.ask(input="one", stream=number % 2 == 0, previous_response_id=previous)
            told.append(last)
            previous = last["id"] if last["store"] and rng.random() < 0.8 else None

    async def until_told(number: int) -> None:
        async with asyncio.timeout(60):
            until = len(told) + number
            while len(told) < until:
                await asyncio.sleep(0.001)

    async with two_routers(tmp_path, server) as (_, files, session), process(files[1]) as (_, b_url):
        await ready(session, b_url)
        asking_b = [asyncio.create_task(forever(asking, Client(session, b_url, "alice"), i)) for i in range(3)]
        for _ in range(2):
            async with process(files[0]) as (a_process, a_url):
                await ready(session, a_url)
                asking_a = [asyncio.create_task(asking(Client(session, a_url, "alice"), i)) for i in range(3)]
                await until_told(rng.randrange(20, 40))
                await asyncio.to_thread(server.kill)
                await until_told(10)
                await asyncio.to_thread(server.start)
                await until_told(rng.randrange(20, 40))
                a_process.kill()
                await a_process.wait()
                await asyncio.gather(*asking_a, return_exceptions=True)
        for task in asking_b:
            task.cancel()
        await asyncio.gather(*asking_b, return_exceptions=True)
        client = Client(session, b_url, "alice")
        kept = [one for one in told if one["store"]]
        assert len(kept) > 50
        for one in kept:
            assert await client.fields(one["id"]) == one
    counted = "SELECT COALESCE(SUM(num_bytes), 0) FROM"
    assert ask(server, f"{counted} responses") == ask(server, f"{counted} response_tenants")


async def forever(asking: Callable[..., Any], client: Client, number: int) -> None:
    """Repeat a request, ignoring that its previous response may be unreadable."""
    while True:
        with suppress(AssertionError):
            await asking(client, number)
