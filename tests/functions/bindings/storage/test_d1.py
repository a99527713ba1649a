"""D1 on SQLite: statements, results, transactions, the platform's errors, and SQL that tries to escape the database."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.storage.d1 import MAX_STATEMENTS, D1Database, GuardedDatabase
from pilotlight.functions.bindings.storage.sql import statements_of
from pilotlight.functions.channel.failure import Failure
from tests.functions.bindings.conftest import Wire
from workers.bindings.d1 import D1Database as Face

D1 = ("d1", "DB", {"database_name": "shop", "database_id": "0000-1111"})
CUSTOMERS = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, spent REAL, photo BLOB);
INSERT INTO customers (name, spent) VALUES ('Alfreds; Futterkiste', 1.5), ('Around the Horn', 2);
CREATE TRIGGER no_negative BEFORE INSERT ON customers WHEN NEW.spent < 0 BEGIN SELECT RAISE(ABORT, 'negative'); END;
-- the end;
"""


@pytest.fixture
async def db(wire: Wire) -> Face:
    face: Face = (await wire(D1)).env["DB"]
    assert (await face.exec(CUSTOMERS)).count == 3
    return face


async def test_a_statement_answers_with_rows_and_meta(db: Face) -> None:
    result = await db.prepare("SELECT id, name, spent FROM customers WHERE spent > ?1 ORDER BY id").bind(1).all()
    assert result.success is True
    assert result.results == [
        {"id": 1, "name": "Alfreds; Futterkiste", "spent": 1.5},
        {"id": 2, "name": "Around the Horn", "spent": 2.0},
    ]
    assert [row.name for row in result.results] == ["Alfreds; Futterkiste", "Around the Horn"]
    meta = result.meta
    assert (meta.rows_read, meta.rows_written, meta.changes, meta.changed_db) == (2, 0, 0, False)
    assert meta.duration >= 0
    assert meta.size_after % 4096 == 0
    assert (await db.prepare("SELECT 1 AS a WHERE 0").run()).results == []


async def test_writes_report_their_changes_and_the_last_row_id(db: Face) -> None:
    insert = db.prepare("INSERT INTO customers (name) VALUES (?), (?)")
    meta = (await insert.bind("a", "b").run()).meta
    assert (meta.changes, meta.last_row_id, meta.rows_written, meta.changed_db) == (2, 4, 2, True)
    meta = (await db.prepare("UPDATE customers SET spent = 0 WHERE id > ?").bind(2).run()).meta
    assert (meta.changes, meta.rows_written) == (2, 2)
    assert (await db.prepare("CREATE TABLE more (a)").run()).meta.changed_db is True
    returned = await db.prepare("DELETE FROM customers WHERE id = 4 RETURNING name").run()
    assert returned.results == [{"name": "b"}]


async def test_first_gives_a_row_a_column_or_none(db: Face) -> None:
    statement = db.prepare("SELECT * FROM customers ORDER BY id")
    assert (await statement.first()).name == "Alfreds; Futterkiste"
    assert await statement.first("spent") == 1.5
    assert await db.prepare("SELECT * FROM customers WHERE id = 99").first() is None
    assert await db.prepare("SELECT * FROM customers WHERE id = 99").first("name") is None
    with pytest.raises(ValueError, match="D1_ERROR: Column not found"):
        await statement.first("nothing")


async def test_raw_gives_rows_as_lists(db: Face) -> None:
    statement = db.prepare("SELECT id AS x, id + 1 AS x FROM customers ORDER BY id")
    assert await statement.raw() == [[1, 2], [2, 3]]
    assert await statement.raw(columnNames=True) == [["x", "x"], [1, 2], [2, 3]]
    assert await statement.raw({"columnNames": False}) == [[1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("given", "back", "kind"),
    [
        (None, None, "null"),
        (True, 1, "integer"),
        (7, 7, "integer"),
        (2**63 - 1, 2**63 - 1, "integer"),
        (1.25, 1.25, "real"),
        ("wörld\0x", "wörld\0x", "text"),
        (b"\x00\xff", [0, 255], "blob"),
        (bytearray(b"ab"), [97, 98], "blob"),
        (memoryview(b"ab"), [97, 98], "blob"),
    ],
)
async def test_values_keep_their_types(db: Face, given: Any, back: Any, kind: str) -> None:
    row = await db.prepare("SELECT ? AS value, typeof(?1) AS kind").bind(given).first()
    assert (row.value, row.kind) == (back, kind)


@pytest.mark.parametrize("given", [{"a": 1}, [256], {1, 2}, object()])
async def test_values_that_sql_does_not_have_are_refused(db: Face, given: Any) -> None:
    with pytest.raises((Failure, TypeError), match=r"not supported|cannot be sent"):
        await db.prepare("SELECT ?").bind(given).all()


async def test_a_batch_is_one_transaction(db: Face) -> None:
    insert = db.prepare("INSERT INTO customers (name) VALUES (?)")
    results = await db.batch([insert.bind("c"), insert.bind("d"), db.prepare("SELECT count(*) AS n FROM customers")])
    assert [result.meta.last_row_id for result in results[:2]] == [3, 4]
    assert results[2].results[0].n == 4
    with pytest.raises(Failure, match=r"D1_ERROR: UNIQUE constraint failed: customers\.name: SQLITE_CONSTRAINT"):
        await db.batch([insert.bind("e"), insert.bind("c")])
    assert await db.prepare("SELECT count(*) AS n FROM customers").first("n") == 4
    select = db.prepare("SELECT 1 AS one")
    for number in (1, MAX_STATEMENTS):
        assert len(await db.batch([select] * number)) == number
    for number in (0, MAX_STATEMENTS + 1):
        with pytest.raises(Failure, match=f"a batch has 1 to {MAX_STATEMENTS}"):
            await db.batch([select] * number)


async def test_a_deferred_foreign_key_fails_the_whole_batch(db: Face) -> None:
    await db.exec("CREATE TABLE orders (customer INTEGER REFERENCES customers (id))")
    insert = db.prepare("INSERT INTO orders VALUES (77)")
    with pytest.raises(Failure, match="FOREIGN KEY constraint failed"):
        await insert.run()
    with pytest.raises(Failure, match="FOREIGN KEY constraint failed"):
        await db.batch([db.prepare("PRAGMA defer_foreign_keys = ON"), insert])
    late = db.prepare("INSERT INTO customers (id, name) VALUES (77, 'late')")
    await db.batch([db.prepare("PRAGMA defer_foreign_keys = ON"), insert, late])
    assert await db.prepare("SELECT customer FROM orders").first("customer") == 77


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT * FROM nowhere", "D1_ERROR: no such table: nowhere: SQLITE_ERROR"),
        ("SELEC 1", 'D1_ERROR: near "SELEC": syntax error: SQLITE_ERROR'),
        ("INSERT INTO customers (name) VALUES (NULL)", "NOT NULL constraint failed: customers.name: SQLITE_CONSTRAINT"),
        ("INSERT INTO customers (name, spent) VALUES ('x', -1)", "D1_ERROR: negative: SQLITE_CONSTRAINT"),
        ("SELECT ?1, ?2", "wrong number of parameter bindings"),
        ("SELECT 1; SELECT 2", "more than one statement"),
        ("SELECT zeroblob(3000000)", "string or blob too big: SQLITE_TOOBIG"),
        ("SELECT 1 -- " + "x" * 100_000, "SQLITE_TOOBIG"),
        ("SELECT " + ",".join(["1"] * 101), "too many columns"),
        ("SELECT ?101", "variable number must be between"),
        ("SELECT 'a' LIKE '" + "%" * 51 + "'", "LIKE or GLOB pattern too complex"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, zeroblob(100000) FROM n LIMIT 1000", "the result is larger than"),
    ],
)  # fmt: skip
async def test_what_sqlite_refuses_comes_in_the_platforms_shape(db: Face, sql: str, message: str) -> None:
    with pytest.raises(Failure) as caught:
        await db.prepare(sql).all()
    assert message in str(caught.value)
    assert str(caught.value).startswith("D1_ERROR: ")
    assert (await db.prepare("SELECT 1 AS one").first("one")) == 1


async def test_foreign_keys_cannot_be_switched_off_though_the_pragma_is_taken(db: Face) -> None:
    await db.exec("CREATE TABLE a (id INTEGER PRIMARY KEY);\nCREATE TABLE b (a INTEGER REFERENCES a (id));")
    for attempt in (db.prepare("PRAGMA foreign_keys = OFF").run(), db.exec("PRAGMA foreign_keys = 0")):
        await attempt
    with pytest.raises(Failure, match="FOREIGN KEY constraint failed"):
        await db.batch([db.prepare("PRAGMA foreign_keys(off)"), db.prepare("INSERT INTO b VALUES (7)")])
    assert await db.prepare("PRAGMA foreign_keys").first("foreign_keys") == 1


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH DATABASE '/tmp/other.sqlite' AS other",
        "VACUUM INTO '/tmp/copy.sqlite'",
        "VACUUM",
        "DETACH main",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA synchronous = OFF",
        "PRAGMA writable_schema = ON",
        "PRAGMA temp_store_directory = '/etc'",
        "PRAGMA max_page_count = 1000000",
        "PRAGMA user_version = 5",
        "SELECT load_extension('/tmp/evil.so')",
        "SELECT * FROM pragma_database_list",
        "CREATE TEMP TABLE t (a)",
        "CREATE VIRTUAL TABLE f USING fts3(a)",
        "CREATE VIRTUAL TABLE d USING dbstat",
        "BEGIN",
        "BEGIN IMMEDIATE",
        "COMMIT",
        "ROLLBACK",
        "SAVEPOINT a",
        "CREATE TABLE _cf_KV (a)",
        "UPDATE sqlite_master SET sql = 'x'",
    ],
)
async def test_sql_that_wants_out_is_not_authorized(db: Face, sql: str) -> None:
    for attempt in (db.prepare(sql).run(), db.exec(sql), db.batch([db.prepare("SELECT 1"), db.prepare(sql)])):
        with pytest.raises(
            Failure, match=r"not authorized|may not be modified|no such module|cannot VACUUM from within"
        ):
            await attempt
    assert await db.prepare("SELECT count(*) AS n FROM customers").first("n") == 2


async def test_schema_pragmas_and_full_text_search_work(db: Face) -> None:
    columns = (await db.prepare("PRAGMA table_info('customers')").all()).results
    assert [column.name for column in columns] == ["id", "name", "spent", "photo"]
    assert "customers" in [row.name for row in (await db.prepare("PRAGMA table_list").run()).results]
    assert (await db.prepare("SELECT count(*) AS n FROM pragma_table_info('customers')").first("n")) == 4
    assert (await db.prepare("PRAGMA foreign_keys").first()).foreign_keys == 1
    await db.exec("CREATE VIRTUAL TABLE notes USING fts5(body); INSERT INTO notes VALUES ('a pilot light burns')")
    assert await db.prepare("SELECT count(*) AS n FROM notes WHERE notes MATCH 'pilot'").first("n") == 1
    assert await db.prepare("SELECT json_extract(?, '$.a') AS a").bind('{"a": 5}').first("a") == 5


async def test_a_setting_ends_with_its_call(db: Face) -> None:
    likes = db.prepare("SELECT 'A' LIKE 'a' AS same")
    both = await db.batch([db.prepare("PRAGMA case_sensitive_like = 1"), likes])
    assert both[1].results[0].same == 0
    assert await likes.first("same") == 1


async def test_exec_says_which_statement_failed_and_keeps_those_before(db: Face) -> None:
    with pytest.raises(Failure, match="D1_EXEC_ERROR: Error in statement 2: INSERT INTO nowhere"):
        await db.exec("INSERT INTO customers (name) VALUES ('f');\nINSERT INTO nowhere VALUES (1);\nSELECT 1")
    assert await db.prepare("SELECT count(*) AS n FROM customers").first("n") == 3


async def test_a_script_may_have_a_statement_on_each_line(db: Face) -> None:
    script = "CREATE TABLE lines (i)\n\nINSERT INTO lines VALUES (1)\nINSERT INTO lines VALUES (2)"
    assert (await db.exec(script)).count == 3
    assert (await db.exec("INSERT INTO lines\nSELECT i + 2\nFROM lines")).count == 1  # one statement on three lines
    with pytest.raises(Failure, match="syntax error"):
        await db.exec("DELETE FROM lines\nWHRE i = 1")
    assert await db.prepare("SELECT count(*) AS n FROM lines").first("n") == 4


async def test_a_script_and_a_batch_have_so_many_statements(db: Face) -> None:
    for script in ("", " ; \n;", "SELECT 1;" * (MAX_STATEMENTS + 1)):
        with pytest.raises(Failure, match=f"a script has 1 to {MAX_STATEMENTS} statements, not"):
            await db.exec(script)
    assert (await db.exec("SELECT 1;" * 3)).count == 3


def test_a_script_is_cut_at_semicolons_that_end_statements() -> None:
    assert statements_of(CUSTOMERS)[2].endswith("END;")
    assert statements_of("SELECT ';'; /* ; */ SELECT 1;;\n-- x;\n") == ["SELECT ';';", "/* ; */ SELECT 1;"]
    assert statements_of(";SELECT 1;SELECT 2") == ["SELECT 1;", "SELECT 2"]
    assert statements_of("  ") == []


async def test_a_statement_is_stopped_at_its_time_limit_and_the_next_one_runs(tmp_path: Path) -> None:
    database = GuardedDatabase(tmp_path / "d1.sqlite", 1 << 30)
    binding = D1Database(database, time_limit_s=0.2)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) INSERT INTO t SELECT i FROM n"
    try:
        await binding.call("exec", ["CREATE TABLE t (i)"], {})
        with pytest.raises(Failure, match="D1 DB exceeded its time limit") as caught:
            await binding.call("batch", [[{"sql": "INSERT INTO t VALUES (1)"}, {"sql": endless}]], {})
        assert caught.value.status == 408
        answer = await binding.call("query", [{"sql": "SELECT count(*) FROM t"}], {})
        assert answer["rows"] == [[0]]
    finally:
        await database.close()


async def test_leaving_a_statement_stops_it(db: Face) -> None:
    await db.exec("CREATE TABLE t (i)")
    endless = db.prepare(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) INSERT INTO t SELECT i FROM n"
    )
    started_s = time.monotonic()
    task = asyncio.ensure_future(endless.run())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await db.prepare("SELECT count(*) AS n FROM t").first("n") == 0
    assert time.monotonic() - started_s < 20  # the statement itself may run for 30 s


async def test_many_writers_lose_no_update(wire: Wire) -> None:
    wired = await wire(D1, ("d1", "SAME", {"database_name": "shop", "database_id": "0000-1111"}))
    await wired.env["DB"].exec("CREATE TABLE n (value INTEGER); INSERT INTO n VALUES (0)")
    add = "UPDATE n SET value = value + 1"
    await asyncio.gather(*[wired.env[name].prepare(add).run() for name in ("DB", "SAME") for _ in range(50)])
    assert await wired.env["DB"].prepare("SELECT value FROM n").first("value") == 100


async def test_a_full_database_says_so_and_still_answers(wire: Wire) -> None:
    db = (await wire(D1, max_bytes=1 << 20)).env["DB"]
    await db.exec("CREATE TABLE t (a)")
    insert = db.prepare("INSERT INTO t VALUES (randomblob(100000))")
    with pytest.raises(Failure, match="D1_ERROR: the storage is full") as caught:
        await db.batch([insert] * 20)
    assert caught.value.status == 507
    assert await db.prepare("SELECT count(*) AS n FROM t").first("n") == 0
    await insert.run()


LIMITED = """
import asyncio, resource, signal, sys
from pathlib import Path
from pilotlight.functions.bindings.storage.d1 import D1Database
from pilotlight.functions.bindings.storage.d1 import GuardedDatabase

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    binding = D1Database(GuardedDatabase(Path(sys.argv[1]), 1 << 30))
    await binding.call("exec", ["CREATE TABLE t (a)"], {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    done = 0
    try:
        for i in range(100):
            await binding.call("query", [{"sql": "INSERT INTO t VALUES (randomblob(50000))"}], {})
            done += 1
    except Exception as error:
        print(type(error).__name__, error.status, str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    answer = await binding.call("query", [{"sql": "SELECT count(*) FROM t"}], {})
    assert answer["rows"] == [[done]], (answer, done)
    await binding.call("query", [{"sql": "INSERT INTO t VALUES (1)"}], {})
    print("ok", done)

asyncio.run(main())
"""


@pytest.mark.process
def test_a_disk_that_is_full_fails_the_statement_and_keeps_the_database(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "d1.sqlite")],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    first, second = done.stdout.splitlines() or [done.stderr, ""]
    assert first.startswith("BindingError 507 D1_ERROR: the storage"), first
    assert second.startswith("ok "), done.stderr


KILLED = """
import asyncio, sys
from pathlib import Path
from pilotlight.functions.bindings.storage.d1 import D1Database
from pilotlight.functions.bindings.storage.d1 import GuardedDatabase

async def main():
    binding = D1Database(GuardedDatabase(Path(sys.argv[1]), 1 << 30))
    await binding.call("exec", ["CREATE TABLE t (i); CREATE TABLE u (i)"], {})
    for i in range(100000):
        statements = [{"sql": f"INSERT INTO {table} VALUES (?)", "parameters": [i]} for table in "tu"]
        await binding.call("batch", [statements], {})
        print(i, flush=True)

asyncio.run(main())
"""


def killed_writer(path: Path) -> int:
    """Kill a process while it writes batches; return the number of the last acknowledged batch."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    lines = [line for _, line in zip(range(40), process.stdout, strict=False)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    return max(int(line) for line in lines if line.endswith("\n"))


@pytest.mark.process
async def test_acknowledged_batches_survive_kill_9_whole(tmp_path: Path) -> None:
    path = tmp_path / "d1.sqlite"
    acknowledged = killed_writer(path)
    database = GuardedDatabase(path, 1 << 30)
    try:
        answer = await D1Database(database).call(
            "query", [{"sql": "SELECT (SELECT max(i) FROM t), (SELECT max(i) FROM u), count(*) FROM t"}], {}
        )
        in_t, in_u, count = answer["rows"][0]
        assert in_t == in_u >= acknowledged >= 39
        assert count == in_t + 1
    finally:
        await database.close()
