"""Durable Objects in real isolates, with storage at the runtime: one instance, one event at a time, and no lost writes."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.bindings.objects.object_migrations import MigrationError
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.host.faults import Fault
from pilotlight.support.database import Databases
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker

MANIFEST = """
[[durable_objects.bindings]]
name = "COUNTER"
class_name = "Counter"
[[migrations]]
tag = "v1"
new_sqlite_classes = ["Counter"]
"""
START = """
import asyncio, json
from workers import DurableObject, Response, WorkerEntrypoint
from urllib.parse import urlsplit, parse_qs

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        parts = urlsplit(request.url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        stub = self.env.COUNTER.getByName(query.pop("object", "main"))
        try:
            value = await getattr(stub, parts.path[1:])(**query)
        except Exception as error:
            return Response.json({"error": str(error)}, status=500)
        return Response.json(value)
"""

Make = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def site(make_served: ServedMaker, tmp_path: Path) -> Make:
    """Return a function that starts a site; a second call keeps the state, like a restart."""

    @asynccontextmanager
    async def make(source: str, manifest: str = MANIFEST, **options: Any) -> AsyncIterator[Served]:
        services = Services(databases=Databases())
        bindings = partial(FunctionBindings.open, tmp_path / "state", services)
        async with make_served(tier=1, open_bindings=bindings, **options) as served:
            served.add(START + source, manifest=manifest)
            yield served
        await services.databases.close()

    return make


async def ask(served: Served, path: str) -> Any:
    return json.loads(await served.get(path))


def object_file(tmp_path: Path) -> Path:
    return next((tmp_path / "state/bindings/durable_object/f/Counter").glob("*/*.sqlite"))


KEYS = """
class Counter(DurableObject):
    async def increment(self, by="1"):
        value = (await self.ctx.storage.get("value") or 0) + int(by)
        await self.ctx.storage.put("value", value)
        return value

    async def keys(self):
        storage = self.ctx.storage
        await storage.put({"b": [1, {"x": None}], "a": "text", "c": b"bytes", "ab": 2.5})
        several = await storage.get(["a", "none", "b"])
        listed = await storage.list({"prefix": "a"})
        backwards = await storage.list(reverse=True, limit=2)
        between = await storage.list({"start": "a", "end": "b", "startAfter": None})
        gone = [await storage.delete("a"), await storage.delete("a"), await storage.delete(["b", "c", "z"])]
        left = await storage.list()
        await storage.deleteAll()
        return [several.b[1].to_py(), list(several), list(listed), list(backwards), list(between), gone, list(left), len(await storage.list())]

    async def sync_keys(self):
        kv = self.ctx.storage.kv
        kv.put("k", {"n": 1})
        return [kv.get("k").n, [key for key, value in kv.list()], kv.delete("k"), kv.get("k")]

    async def own_id(self):
        return [str(self.ctx.id), self.ctx.id.name]
"""


async def test_keys_are_kept_across_restarts(site: Make) -> None:
    async with site(KEYS) as served:
        assert [await ask(served, "/increment") for _ in range(3)] == [1, 2, 3]
        assert await ask(served, "/increment?object=other&by=10") == 10
    async with site(KEYS) as served:
        assert await ask(served, "/increment") == 4
        assert await ask(served, "/increment?object=other") == 11


async def test_storage_has_the_platforms_methods(site: Make) -> None:
    async with site(KEYS) as served:
        assert await ask(served, "/keys") == [
            {"x": None}, ["a", "b"], ["a", "ab"], ["c", "b"], ["a", "ab"], [True, False, 2], ["ab"], 0,
        ]  # fmt: skip
        assert await ask(served, "/sync_keys") == [1, ["k"], True, None]
        first, second = await ask(served, "/own_id?object=x"), await ask(served, "/own_id?object=y")
        assert first[1] == "x"
        assert len(first[0]) == 64
        assert first[0] != second[0]


SQL = """
class Counter(DurableObject):
    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        self.sql = ctx.storage.sql
        self.sql.exec("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, name TEXT UNIQUE); CREATE INDEX IF NOT EXISTS i ON t (name)")

    async def add(self, name):
        return self.sql.exec("INSERT INTO t (name) VALUES (?) RETURNING id", name).one().id

    async def all(self):
        cursor = self.sql.exec("SELECT * FROM t ORDER BY id")
        return [cursor.columnNames, [row.name for row in cursor], self.sql.databaseSize > 0,
                self.sql.exec("SELECT count(*) AS n FROM t").toArray()[0]["n"], self.sql.exec("SELECT id, name FROM t").raw().toArray()]

    async def burst(self, fail=""):
        self.sql.exec("INSERT INTO t (name) VALUES ('first')")
        self.sql.exec("INSERT INTO t (name) VALUES ('second')")
        if fail:
            import os
            os._exit(1)

    async def both(self, fail=""):
        def work():
            self.sql.exec("INSERT INTO t (name) VALUES ('one')")
            try:
                self.ctx.storage.transactionSync(lambda: self.sql.exec("INSERT INTO t (name) VALUES ('inner'), ('one')"))
            except Exception:
                pass
            if fail:
                raise ValueError("no")
        self.ctx.storage.transactionSync(work)

    async def move(self, fail=""):
        async def work(txn):
            await txn.put("a", 1)
            await asyncio.sleep(0.05)
            self.sql.exec("INSERT INTO t (name) VALUES ('moved')")
            if fail == "rollback":
                txn.rollback()
            elif fail:
                raise ValueError("no")
        await self.ctx.storage.transaction(work)

    async def run(self, sql):
        return list(self.sql.exec(sql))
"""


async def test_sql_answers_at_once_and_outlives_the_process(site: Make) -> None:
    async with site(SQL) as served:
        assert [await ask(served, f"/add?name={name}") for name in "ab"] == [1, 2]
        assert (await ask(served, "/add?name=a"))["error"].startswith("UNIQUE constraint failed")
    async with site(SQL) as served:
        assert await ask(served, "/all") == [["id", "name"], ["a", "b"], True, 2, [[1, "a"], [2, "b"]]]


async def test_what_is_written_together_is_kept_together(site: Make, tmp_path: Path) -> None:
    async with site(SQL) as served:
        await ask(served, "/add?name=zero")
        with pytest.raises(Fault):
            await served.get("/burst?fail=1")
        assert await ask(served, "/all") == [["id", "name"], ["zero"], True, 1, [[1, "zero"]]]
        await ask(served, "/burst")
        found = sqlite3.connect(object_file(tmp_path)).execute("SELECT name FROM t ORDER BY id").fetchall()
        assert found == [("zero",), ("first",), ("second",)]  # committed before the response was sent


async def test_transactions_are_all_or_nothing(site: Make) -> None:
    async with site(SQL) as served:
        assert "no" in (await ask(served, "/both?fail=1"))["error"]
        assert (await ask(served, "/all"))[1] == []
        await ask(served, "/both")
        assert (await ask(served, "/all"))[1] == ["one"]
        assert "no" in (await ask(served, "/move?fail=1"))["error"]
        assert await ask(served, "/move?fail=rollback") is None
        assert (await ask(served, "/all"))[1] == ["one"]
        moving = asyncio.ensure_future(ask(served, "/move"))
        await asyncio.sleep(0.02)
        assert (await ask(served, "/all"))[1] == ["one", "moved"]  # starts after the transaction has ended
        await moving


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("BEGIN", "use transactionSync"),
        ("SELECT * FROM _cf_KV", "is the runtime's"),
        ("ATTACH '/tmp/x' AS x", "not authorized"),
        ("PRAGMA journal_mode = DELETE", "not offered"),
        ("SELECT", "incomplete input"),
        ("", "1 to 1000 statements"),
    ],
)
async def test_hostile_sql_is_refused_and_the_object_continues(site: Make, sql: str, sentence: str) -> None:
    async with site(SQL) as served:
        assert sentence in (await ask(served, f"/run?sql={quote(sql) or '%20'}"))["error"]
        assert await ask(served, "/add?name=a") == 1


GATES = """
class Counter(DurableObject):
    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        self.log = []
        async def load():
            await asyncio.sleep(0.05)
            self.log.append("loaded")
        ctx.blockConcurrencyWhile(load)

    async def note(self, what):
        self.log.append(what)
        return self.log

    async def read_and_write(self):
        value = await self.ctx.storage.get("n") or 0
        await self.ctx.storage.put("n", value + 1)
        return value + 1

    async def critical(self):
        async def work():
            value = await self.ctx.storage.get("m") or 0
            await asyncio.sleep(0.01)
            await self.ctx.storage.put("m", value + 1)
            return value + 1
        return await self.ctx.blockConcurrencyWhile(work)

    async def breaks(self):
        async def work():
            raise ValueError("broken")
        await self.ctx.blockConcurrencyWhile(work)

    async def aborts(self):
        await self.ctx.storage.put("n", 1000)
        self.ctx.abort("on purpose")

    async def instance(self):
        return id(self)
"""


async def test_events_wait_for_the_constructor_and_for_blocks(site: Make) -> None:
    async with site(GATES) as served:
        assert (await ask(served, "/note?what=a"))[0] == "loaded"
        numbers = await asyncio.gather(*(ask(served, "/read_and_write") for _ in range(20)))
        assert sorted(numbers) == list(range(1, 21))
        numbers = await asyncio.gather(*(ask(served, "/critical") for _ in range(5)))
        assert sorted(numbers) == [1, 2, 3, 4, 5]


async def test_an_instance_that_broke_is_replaced_by_the_next_event(site: Make) -> None:
    async with site(GATES) as served:
        before = await ask(served, "/note?what=a")
        assert before == ["loaded", "a"]
        assert "broken" in (await ask(served, "/breaks"))["error"]
        assert await ask(served, "/note?what=b") == ["loaded", "b"]
        assert "on purpose" in (await ask(served, "/aborts"))["error"]
        assert await ask(served, "/note?what=c") == ["loaded", "c"]
        assert await ask(served, "/read_and_write") == 1  # the uncommitted change was rolled back


async def test_what_a_constructor_wrote_before_it_failed_is_undone(site: Make) -> None:
    source = """
class Counter(DurableObject):
    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        tables = [row.name for row in ctx.storage.sql.exec("SELECT name FROM sqlite_master WHERE name = 't'")]
        ctx.storage.sql.exec("CREATE TABLE t (n INTEGER)")
        if not self.env.READY:
            raise ValueError(f"not ready, found {tables}")

    async def works(self):
        return True
"""
    async with site(source, MANIFEST + "[vars]\nREADY = false\n") as served:
        for _ in range(2):
            assert "not ready, found []" in (await ask(served, "/works"))["error"]
    async with site(source, MANIFEST + "[vars]\nREADY = true\n") as served:
        assert await ask(served, "/works") is True


async def test_an_object_goes_to_a_new_version_of_its_function_when_its_work_has_ended(
    site: Make, tmp_path: Path
) -> None:
    waits = """
class Counter(DurableObject):
    async def slow(self):
        await self.ctx.storage.put("n", 1)
        while await self.ctx.storage.get("n") == 1:
            await asyncio.sleep(0.01)
        await self.ctx.storage.put("n", 99)

    async def quick(self):
        value = (await self.ctx.storage.get("n") or 0) + 1
        await self.ctx.storage.put("n", value)
        return [value, VERSION]
"""
    async with site("VERSION = 1" + waits) as served:
        slow = asyncio.ensure_future(ask(served, "/slow"))
        await eventually(lambda: (tmp_path / "state/bindings/durable_object/f/Counter").is_dir())
        served.add(START + "VERSION = 2" + waits, manifest=MANIFEST)
        assert (await ask(served, "/quick"))[1] == 1
        await slow
        assert await ask(served, "/quick") == [100, 2]


ALARMS = """
class Counter(DurableObject):
    async def later(self, ms="50"):
        import time
        await self.ctx.storage.setAlarm(time.time() * 1000 + float(ms))
        return await self.ctx.storage.getAlarm() > 0

    async def alarm(self, info):
        storage = self.ctx.storage
        rung = await storage.get("rung") or []
        rung.append([info.retryCount, info.isRetry, await storage.getAlarm()])
        await storage.put("rung", rung)
        if await storage.get("failing"):
            raise ValueError("the alarm fails")
        if await storage.get("again"):
            await storage.put("again", False)
            await storage.setAlarm(0)

    async def set(self, key, value):
        await self.ctx.storage.put(key, bool(int(value)))

    async def rung(self):
        return await self.ctx.storage.get("rung") or []

    async def cancel(self):
        await self.ctx.storage.deleteAlarm()
        return await self.ctx.storage.getAlarm()

    async def undone(self):
        def work():
            self.ctx.storage.setAlarm(0)
            raise ValueError("undone")
        self.ctx.storage.transactionSync(work)
"""


async def rings(served: Served, count: int, timeout_s: float = 5.0) -> Any:
    async with asyncio.timeout(timeout_s):
        while len(found := await ask(served, "/rung")) < count:
            await asyncio.sleep(0.02)
    return found


async def test_an_alarm_rings_once_and_may_set_the_next_one(site: Make) -> None:
    async with site(ALARMS) as served:
        await ask(served, "/set?key=again&value=1")
        assert await ask(served, "/later") is True
        assert await rings(served, 2) == [[0, False, None], [0, False, None]]
        await asyncio.sleep(0.2)
        assert len(await ask(served, "/rung")) == 2
        assert await ask(served, "/later?ms=1500") is True
        assert await ask(served, "/cancel") is None
        assert "undone" in (await ask(served, "/undone"))["error"]
        await asyncio.sleep(1.7)
        assert len(await ask(served, "/rung")) == 2


async def test_an_alarm_that_was_due_while_the_site_was_down_rings_after_its_start(site: Make) -> None:
    async with site(ALARMS) as served:
        await ask(served, "/later?ms=300")
    await asyncio.sleep(0.4)
    async with site(ALARMS) as served:
        await eventually(lambda: served.functions.pools["f"].isolates.num_started == 1)  # started by the alarm
        assert len(await rings(served, 1)) == 1


async def test_an_alarm_rings_although_its_object_died_before_it_had_committed(site: Make) -> None:
    dies = (
        ALARMS
        + """
    async def dies(self):
        import os, time
        await self.ctx.storage.put("left", "open")
        os._exit(1)

    async def left(self):
        return await self.ctx.storage.get("left")
"""
    )
    async with site(dies) as served:
        await ask(served, "/later?ms=600")
        with pytest.raises(Fault):
            await served.get("/dies")
        await eventually(lambda: served.functions.pools["f"].isolates.num_started == 2)  # started by the alarm
        assert len(await rings(served, 1)) == 1
        assert await ask(served, "/left") is None


RECOVERY = """
from datetime import UTC, datetime

class Counter(DurableObject):
    async def put(self, value):
        await self.ctx.storage.put("value", value)
        self.ctx.storage.sql.exec("CREATE TABLE IF NOT EXISTS t (n)")
        self.ctx.storage.sql.exec("INSERT INTO t VALUES (?)", value)
        return await self.ctx.storage.getCurrentBookmark()

    async def value(self):
        rows = self.ctx.storage.sql.exec("SELECT n FROM t").toArray()
        return [await self.ctx.storage.get("value"), len(rows)]

    async def restore(self, bookmark):
        return await self.ctx.storage.onNextSessionRestoreBookmark(bookmark)

    async def abort(self):
        self.ctx.abort("restoration")

    async def times(self):
        now = datetime.now(UTC)
        storage = self.ctx.storage
        of_ms = await storage.getBookmarkForTime(now.timestamp() * 1000)
        return [of_ms == await storage.get_bookmark_for_time(now) == await storage.get_current_bookmark()]

    async def wrong(self):
        try:
            await self.ctx.storage.getBookmarkForTime("yesterday")
        except TypeError as error:
            return str(error)

    async def delete(self):
        await self.ctx.storage.deleteAll()
"""


async def test_an_object_is_restored_to_a_bookmark_when_it_starts_next(site: Make, tmp_path: Path) -> None:
    async with site(RECOVERY) as served:
        first = await ask(served, "/put?value=one")
        second = await ask(served, "/put?value=two")
        assert first < second
        undo = await ask(served, f"/restore?bookmark={first}")
        assert await ask(served, "/value") == ["two", 2]
        assert "restoration" in (await ask(served, "/abort"))["error"]
        assert await ask(served, "/value") == ["one", 1]
        assert await ask(served, "/times") == [True]
        await ask(served, f"/restore?bookmark={undo}")
    async with site(RECOVERY) as served:
        assert await ask(served, "/value") == ["two", 2]
        other = await ask(served, "/put?value=three&object=other")
        for bookmark, sentence in (("x", "is not a bookmark"), (other, "another object"), (undo[:8], "not a bookmark")):
            assert sentence in (await ask(served, f"/restore?bookmark={bookmark}"))["error"]
        assert "takes milliseconds since 1970" in await ask(served, "/wrong")
        await ask(served, "/delete")
        assert "before deleteAll" in (await ask(served, f"/restore?bookmark={first}"))["error"]


async def test_what_is_no_id_and_no_class_is_named(site: Make) -> None:
    source = """
class Counter(DurableObject):
    async def probe(self):
        return 1

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        ns, found = self.env.COUNTER, []
        for work in (lambda: ns.idFromString("12"), lambda: ns.get("name"), lambda: ns.idFromName(None), lambda: self.env.GONE.getByName("x").probe(),
                     lambda: ns.getByName("x").alarm(), lambda: ns.getByName("x").missing(), lambda: ns.getByName("x").fetch("http://x/")):
            try:
                value = work()
                if hasattr(value, "__await__"):
                    await value
            except Exception as error:
                found.append(str(error))
        id = ns.newUniqueId()
        same = ns.idFromString(str(id)).equals(id) and ns.idFromName("a") == ns.idFromName("a") and ns.newUniqueId() != id
        return Response.json([found, same, await ns.get(id).probe()])
"""
    manifest = MANIFEST.replace(
        "[[migrations]]", '[[durable_objects.bindings]]\nname = "GONE"\nclass_name = "Gone"\n[[migrations]]'
    )
    async with site(source, manifest) as served:
        found, same, one = await ask(served, "/")
        assert (same, one) == (True, 1)
        for sentence, text in zip(
            ("64 hexadecimal digits", "takes an id", "is a str, and not NoneType", "no `class Gone(DurableObject)`", "no method 'alarm'",
             "no method 'missing'", "has no fetch method"),
            found, strict=True,
        ):  # fmt: skip
            assert sentence in text


RENAMED = MANIFEST.replace('class_name = "Counter"', 'class_name = "Tally"') + (
    '[[migrations]]\ntag = "v2"\nrenamed_classes = [{ from = "Counter", to = "Tally" }]\n'
)
TALLY = KEYS.replace("class Counter", "class Tally")


async def test_a_renamed_class_keeps_its_objects_and_a_deleted_one_loses_them(site: Make) -> None:
    async with site(KEYS) as served:
        assert await ask(served, "/increment") == 1
    for expected in (2, 3):  # the migration runs only once
        async with site(TALLY, RENAMED) as served:
            assert await ask(served, "/increment") == expected
    deleted = RENAMED + '[[migrations]]\ntag = "v3"\ndeleted_classes = ["Tally"]\n'
    async with site(TALLY, deleted) as served:
        assert await ask(served, "/increment") == 1


async def test_a_class_is_renamed_when_the_version_that_says_so_is_served(site: Make) -> None:
    source = (
        KEYS
        + """
    async def forever(self):
        await asyncio.Event().wait()
"""
    )
    async with site(source) as served:
        assert [await ask(served, "/increment") for _ in range(2)] == [1, 2]
        running = asyncio.create_task(ask(served, "/forever"))
        await eventually(
            lambda: served.functions.pools["f"].isolates.load == 2
        )  # the request, and the call of its object
        served.add(START + TALLY, manifest=RENAMED)
        assert await ask(served, "/increment") == 3
        served.add(START + TALLY + "# again\n", manifest=RENAMED)
        assert await ask(served, "/increment") == 4
        with pytest.raises(MigrationError, match="the class Counter was renamed to Tally by the migration v2"):
            served.add(START + source, manifest=MANIFEST)
        assert await ask(served, "/increment") == 5
        running.cancel()
        await asyncio.wait({running})
    async with site(TALLY, RENAMED) as served:
        assert await ask(served, "/increment") == 6


async def test_a_class_that_is_deleted_while_it_is_served_loses_its_objects_and_their_alarms(
    site: Make, tmp_path: Path
) -> None:
    alarmed = (
        KEYS
        + """
    async def later(self):
        await self.ctx.storage.setAlarm(4_000_000_000_000)

    async def alarmed(self):
        return await self.ctx.storage.getAlarm()
"""
    )
    async with site(alarmed) as served:
        await ask(served, "/increment")
        await ask(served, "/later")
        served.add(START + alarmed.replace("class Counter", "class Tally"), manifest=RENAMED)
        assert await ask(served, "/alarmed") == 4_000_000_000_000
        assert alarms_in(tmp_path) == ["Tally"]
        deleted = RENAMED.replace('class_name = "Tally"', 'class_name = "New"')
        deleted += '[[migrations]]\ntag = "v3"\ndeleted_classes = ["Tally"]\n'
        served.add(START + alarmed.replace("class Counter", "class New"), manifest=deleted)
        assert await ask(served, "/increment") == 1
        await eventually(lambda: not (tmp_path / "state/bindings/durable_object/f/Tally").exists())
        await eventually(lambda: alarms_in(tmp_path) == [])


def alarms_in(tmp_path: Path) -> list[str]:
    connection = sqlite3.connect(tmp_path / "state/bindings/durable_object/f/alarms.sqlite")
    with closing(connection):
        return [row[0] for row in connection.execute("SELECT class FROM alarms")]
