"""Stored responses as rows: a conversation is stored once, belongs to one tenant, and deletions leave rows that other responses need."""

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotlight.edge_router.metering.ledger.postgres import PostgresDatabase
from pilotlight.edge_router.services.shared_responses import PostgresResponses, TranslatedConnection
from pilotlight.response_store import response_rows as rows
from pilotlight.response_store.kept_responses import KeptResponse, PreviousResponse
from pilotlight.response_store.response_database import ResponseDatabase, RowConnection
from pilotlight.response_store.response_file import ResponseFile
from pilotlight.response_store.response_rows import EXPIRES_S, ROW_BYTES, Progress, ResponseRow
from tests.edge_router.conftest import postgres, without_responses  # noqa: F401

LARGE = 1 << 40
LONG_S = 1e6
MAKER = "maker"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.network)])
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowConnection]:
    """Yield a connection to an empty SQLite or PostgreSQL database."""
    if request.param == "sqlite":
        with opened(tmp_path / "responses.sqlite") as connection:
            yield connection
        return
    url = without_responses(request.getfixturevalue("postgres")).url
    asyncio.run(made_by(PostgresResponses(url)))
    shared = PostgresDatabase(url, lambda connection: None)
    with shared.working() as working:
        yield TranslatedConnection(working)
    shared.close()


async def made_by(database: ResponseDatabase) -> None:
    """Let a database create or update its tables."""
    await database.run(lambda connection: None, 60.0, is_write=False)
    await database.close()


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to a SQLite file, after a process has used the file."""
    asyncio.run(made_by(ResponseFile(path, LARGE)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.create_function("now_s", 0, time.time)
        yield connection


def response(
    name: str, own: str = "asked", *, tenant: str = "t", status: str = "completed", **fields: Any
) -> KeptResponse:
    output = [{"id": f"msg_{name}", "said": name}] if status == "completed" else []
    return KeptResponse(tenant, {"id": name, "status": status, "output": output, **fields}, json.dumps(own).encode())


def add(connection: RowConnection, *responses: KeptResponse, age_s: float = 0.0, max_bytes: int = LARGE) -> None:
    rows.add(connection, [ResponseRow.of(one) for one in responses], MAKER, max_bytes)
    for one in responses:
        aged = "UPDATE responses SET kept_s = kept_s - ? WHERE tenant = ? AND id = ?"
        connection.execute(aged, (age_s, one.tenant, one.id))


def turns(connection: RowConnection, number: int, *, size: int = 10, tenant: str = "t") -> list[str]:
    """Store a conversation of `number` responses; return their names."""
    before, names = None, [f"{tenant}_{i}" for i in range(number)]
    for name in names:
        one = response(name, "x" * size, tenant=tenant)
        one.before = before
        add(connection, one)
        before = rows.conversation(connection, tenant, name, LONG_S)
    return names


def there(connection: RowConnection, names: list[str], tenant: str = "t", keep_s: float = LONG_S) -> list[bool]:
    return [rows.find(connection, tenant, name, keep_s) is not None for name in names]


def found(connection: RowConnection, name: str, tenant: str = "t") -> KeptResponse:
    one = rows.find(connection, tenant, name)
    assert one is not None
    return one.response


def said(conversation: PreviousResponse | None) -> list[Any]:
    assert conversation is not None
    found: list[Any] = json.loads(b"[" + conversation.items + b"]")
    return found


def told(connection: RowConnection, name: str, place: int = 0) -> tuple[list[bytes], int]:
    one = rows.events(connection, "t", name, place)
    assert one is not None
    return one.events, one.till


def count(connection: RowConnection, table: str = "responses") -> int:
    return int(connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


def num_bytes(connection: RowConnection) -> int:
    counted = connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM responses").fetchone()[0]
    assert connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM response_tenants").fetchone()[0] == counted
    return int(counted)


def test_a_response_is_found_as_it_was_by_its_tenant_alone(connection: RowConnection) -> None:
    one = response("a", usage={"input_tokens": 3}, model="m")
    one.events = [b"event: x\ndata: 1\n\n", b"data: 2\n\n"]
    add(connection, one)
    assert (found(connection, "a").fields, found(connection, "a").tenant) == (one.fields, "t")
    assert told(connection, "a") == (one.events, 2)
    assert [told(connection, "a", place)[0] for place in (1, 2, 9)] == [one.events[1:], [], []]
    assert rows.input_items(connection, "t", "a") == b'"asked"'
    assert rows.items(connection, "t", ["msg_a", "msg_b"], LONG_S) == {"msg_a": b'{"id":"msg_a","said":"a"}'}
    assert rows.find(connection, "u", "a", LONG_S) is None
    assert rows.conversation(connection, "u", "a", LONG_S) is None
    assert rows.events(connection, "u", "a", 0) is None
    assert rows.input_items(connection, "u", "a") == b""
    assert rows.items(connection, "u", ["msg_a"], LONG_S) == {}
    rows.delete(connection, "u", "a")
    assert there(connection, ["a"]) == [True], "another tenant must not delete it"


def test_two_tenants_may_have_responses_of_one_name(connection: RowConnection) -> None:
    for tenant in ("t", "u"):
        add(connection, response("a", tenant, tenant=tenant))
    assert [rows.input_items(connection, tenant, "a") for tenant in ("t", "u")] == [b'"t"', b'"u"']
    rows.delete(connection, "t", "a")
    assert (there(connection, ["a"]), there(connection, ["a"], "u")) == ([False], [True])


def test_a_conversation_never_leads_into_another_tenants(connection: RowConnection) -> None:
    add(connection, response("secret", "mine"))
    number = connection.execute("SELECT number FROM responses").fetchone()[0]
    for before in (PreviousResponse(number, "secret", b'"told"'), PreviousResponse(number, "other", b'"told"')):
        thief = response("thief", "?", tenant="u")
        thief.before = before
        add(connection, thief)
        assert said(rows.conversation(connection, "u", "thief", LONG_S))[:2] == ["told", "?"], (
            "only its own items are read"
        )
    connection.execute(
        "UPDATE responses SET before = ? WHERE tenant = 'u'", (number,)
    )  # as a fault elsewhere might have left it
    assert b"mine" not in rows.input_items(connection, "u", "thief")


def test_a_conversation_of_many_responses_is_kept_once_and_let_go_with_the_last(connection: RowConnection) -> None:
    names = turns(connection, 30, size=1000)
    assert num_bytes(connection) < 30 * (1000 + ROW_BYTES + 200)
    whole = said(rows.conversation(connection, "t", names[-1], LONG_S))
    assert whole == [part for name in names for part in ("x" * 1000, {"id": f"msg_{name}", "said": name})]
    assert json.loads(b"[" + rows.input_items(connection, "t", names[-1]) + b"]") == whole[:-1]
    for name in names[:-1]:
        rows.delete(connection, "t", name)
    assert there(connection, names) == [False] * 29 + [True]
    assert said(rows.conversation(connection, "t", names[-1], LONG_S)) == whole, (
        "the last response still has the whole conversation"
    )
    assert rows.items(connection, "t", [f"msg_{name}" for name in names], LONG_S).keys() == {f"msg_{names[-1]}"}
    rows.delete(connection, "t", names[-1])
    assert [
        count(connection, table) for table in ("responses", "response_items", "response_tenants", "response_events")
    ] == [0, 0, 0, 0]


def test_with_two_continuations_of_one_each_has_it_until_both_are_deleted(connection: RowConnection) -> None:
    add(connection, response("root", "r"))
    for name in ("left", "right"):
        branch = response(name, name)
        branch.before = rows.conversation(connection, "t", "root", LONG_S)
        add(connection, branch)
    rows.delete(connection, "t", "root")
    rows.delete(connection, "t", "left")
    assert said(rows.conversation(connection, "t", "right", LONG_S))[0] == "r"
    assert count(connection) == 2
    rows.delete(connection, "t", "right")
    assert count(connection) == 0


def test_what_was_deleted_while_another_was_made_from_it_is_kept_with_that(connection: RowConnection) -> None:
    add(connection, response("a", "first"))
    later = response("b", "second")
    later.before = rows.conversation(connection, "t", "a", LONG_S)
    rows.delete(connection, "t", "a")
    assert count(connection) == 0
    add(connection, later)
    found = said(rows.conversation(connection, "t", "b", LONG_S))
    assert [found[0], found[1]["said"], found[2]] == ["first", "a", "second"]


def test_keeping_one_again_is_keeping_what_it_is_by_now(connection: RowConnection) -> None:
    add(connection, response("a", status="in_progress"))
    assert told(connection, "a") == ([], 0)
    for _ in range(3):
        add(connection, response("a"))
    assert (count(connection), count(connection, "response_items")) == (1, 1)
    assert found(connection, "a").fields["status"] == "completed"


def test_the_tenant_that_has_most_makes_room_and_of_its_own_the_oldest(connection: RowConnection) -> None:
    add(connection, response("quiet", "q" * 100, tenant="u"))
    size = num_bytes(connection)
    for i in range(40):
        add(connection, response(f"loud{i}", "q" * 100), max_bytes=6 * size + 100)
    assert there(connection, ["quiet"], "u") == [True], "it is the oldest, but its tenant stores least"
    assert there(connection, [f"loud{i}" for i in range(40)]) == [False] * 35 + [True] * 5
    assert num_bytes(connection) <= 6 * size + 100


def test_what_is_being_made_makes_no_room_and_what_was_written_just_now_neither(connection: RowConnection) -> None:
    add(connection, response("made", "m" * 5000, status="in_progress"))
    add(connection, response("old"), max_bytes=1)
    add(connection, response("new"), response("newer"), max_bytes=1)
    assert there(connection, ["made", "old", "new", "newer"]) == [True, False, True, True]


@pytest.mark.long
def test_what_is_past_its_time_is_not_found_and_then_deleted(connection: RowConnection) -> None:
    add(connection, *(response(f"old{i}") for i in range(rows.SWEPT + 1)), age_s=200)
    add(connection, response("new"))
    add(connection, response("made", status="queued"), age_s=200)
    assert there(connection, ["old0", "new"], keep_s=100) == [False, True]
    assert rows.items(connection, "t", ["msg_old0", "msg_new"], 100).keys() == {"msg_new"}
    assert rows.conversation(connection, "t", "old0", 100) is None
    assert [rows.sweep(connection, 100) for _ in range(2)] == [True, False]
    assert [count(connection, table) for table in ("responses", "response_items")] == [2, 1], (
        "an unfinished response does not expire"
    )


def test_a_conversation_outlives_the_time_of_its_beginning(connection: RowConnection) -> None:
    add(connection, response("a", "first"), age_s=200)
    later = response("b", "second")
    later.before = rows.conversation(connection, "t", "a", LONG_S)
    add(connection, later)
    rows.sweep(connection, 100)
    assert there(connection, ["a", "b"], keep_s=100) == [False, True]
    assert len(said(rows.conversation(connection, "t", "b", 100))) == 4


def make(connection: RowConnection, name: str, maker: str = MAKER, **fields: Any) -> KeptResponse:
    """Store a queued response, as its maker does at the start."""
    one = response(name, status="queued", **fields)
    rows.add(connection, [ResponseRow.of(one)], maker, LARGE)
    one.is_started = True
    return one


def ended(one: KeptResponse) -> ResponseRow:
    one.fields = response(one.id).fields
    return ResponseRow.of(one)


def unheard_of(connection: RowConnection, maker: str, seconds: float) -> None:
    connection.execute("UPDATE response_makers SET seen_s = seen_s - ? WHERE maker = ?", (seconds, maker))


def watching(connection: RowConnection, maker: str) -> None:
    """Confirm that this maker is alive, and pretend that it has run long enough to declare others lost."""
    rows.confirm(connection, maker, [])
    connection.execute("UPDATE response_makers SET since_s = since_s - ? WHERE maker = ?", (EXPIRES_S, maker))


def test_how_far_a_response_is_is_read_by_others_from_any_event(connection: RowConnection) -> None:
    one = make(connection, "a")
    for upto in (0, 3, 3, 4, 9):
        one.untold = [b"data: %d\n\n" % i for i in range(len(one.events), upto)]
        one.fields = {**one.fields, "status": "in_progress"}
        assert rows.confirm(connection, MAKER, [Progress.of(one)]) == ({("t", "a")}, {}, [])
        one.publish(len(one.untold))
        one.told_fields = one.fields
    assert found(connection, "a").fields["status"] == "in_progress"
    assert [told(connection, "a", place) for place in range(11)] == [
        (one.events[place:], 9 if place < 9 else 0) for place in range(11)
    ]
    one.untold, one.events = [*one.events[2:], b"data: 9\n\n"], one.events[:2]  # as if the last reply had been lost
    rows.confirm(connection, MAKER, [Progress.of(one)])
    assert told(connection, "a") == (one.all_events, 10)
    rows.add(connection, [ended(one)], MAKER, LARGE)
    assert told(connection, "a", 4) == (one.all_events[4:], 10)
    assert count(connection, "response_events") == 0


def test_responses_of_a_lost_maker_have_failed_with_the_events_it_reported(connection: RowConnection) -> None:
    watching(connection, "other")
    one = make(connection, "a", model="m")
    one.untold = [b"data: 0\n\n", b":pl [0,[7]]\ndata: 1\n\n"]
    rows.confirm(connection, MAKER, [Progress.of(one)])
    one.publish(2)
    unheard_of(connection, MAKER, EXPIRES_S - 2)
    rows.confirm(connection, "other", [])
    assert found(connection, "a").fields["status"] == "queued"
    unheard_of(connection, MAKER, 3)
    rows.confirm(connection, "other", [])
    fields = found(connection, "a").fields
    assert (fields["status"], fields["error"]["code"], fields["model"]) == ("failed", "aborted", "m")
    assert told(connection, "a", 1) == (one.events[1:], 2)
    assert num_bytes(connection) > 0
    assert count(connection, "response_makers") == 1


POINTED = [b":pl [0,[7]]\ndata: 0\n\n", b"data: 1\n\n"]


def in_progress(connection: RowConnection, name: str, before: PreviousResponse | None = None) -> KeptResponse:
    """Store a response in progress that another process can continue, with two events."""
    one = response(name, status="queued", model="m")
    one.request, one.before = b"request", before
    rows.add(connection, [ResponseRow.of(one)], MAKER, LARGE)
    one.untold = [*POINTED]
    rows.confirm(connection, MAKER, [Progress.of(one)])
    return one


def die(connection: RowConnection, maker: str, next_maker: str) -> list[rows.LostResponse]:
    """Let a maker die; return the responses that the next one continues."""
    watching(connection, next_maker)
    unheard_of(connection, maker, EXPIRES_S + 1)
    return rows.confirm(connection, next_maker, []).lost


def test_a_response_of_a_lost_maker_is_continued_by_one_other_with_all_that_was_stored(
    connection: RowConnection,
) -> None:
    add(connection, response("first", "one"))
    one = in_progress(connection, "a", rows.conversation(connection, "t", "first", LONG_S))
    rows.delete(connection, "t", "first")
    watching(connection, "third")
    (lost,) = die(connection, MAKER, "other")
    assert rows.confirm(connection, "third", []).lost == []
    assert (lost.request, lost.events, lost.response.events) == (b"request", POINTED, [b"data: 0\n\n", b"data: 1\n\n"])
    assert (lost.response.fields, lost.response.input) == (one.fields, one.input)
    assert told(connection, "a", 1) == ([b"data: 1\n\n"], 2)
    assert rows.confirm(connection, MAKER, [Progress.of(one)]).taken["t", "a"] is not None, "the first maker is back"
    lost.response.is_started = True
    rows.add(connection, [ended(lost.response)], "other", LARGE)
    assert [count(connection, table) for table in ("response_events", "response_requests")] == [0, 0]
    assert len(said(rows.conversation(connection, "t", "a", LONG_S))) == 4


def test_a_response_is_continued_after_two_deaths_and_no_more_and_after_any_number_of_releases(
    connection: RowConnection,
) -> None:
    in_progress(connection, "a")
    for i in range(5):
        rows.release(connection, MAKER if i == 0 else f"released{i - 1}", "t", "a")
        watching(connection, f"released{i}")
        assert len(rows.confirm(connection, f"released{i}", []).lost) == 1
    assert len(die(connection, "released4", "second")) == 1
    assert len(die(connection, "second", "third")) == 1
    assert die(connection, "third", "fourth") == []
    assert (found(connection, "a").fields["status"], count(connection, "response_requests")) == ("failed", 0)
    assert told(connection, "a") == ([b"data: 0\n\n", b"data: 1\n\n"], 2)


def test_in_a_file_all_other_makers_are_dead(connection: RowConnection) -> None:
    in_progress(connection, "a")
    assert rows.confirm(connection, "other", [], is_alone=True, may_claim=False).lost == []
    assert len(rows.confirm(connection, "other", [], is_alone=True).lost) == 1
    assert rows.confirm(connection, "other", [], is_alone=True).lost == []


def test_a_database_that_was_away_has_lost_no_maker(connection: RowConnection) -> None:
    """No maker could report during the outage, so the first one to return must not declare the others lost."""
    watching(connection, "other")
    make(connection, "a")
    for maker in ("other", MAKER):
        unheard_of(connection, maker, 100)
    for _ in range(2):
        rows.confirm(connection, "other", [])
        assert found(connection, "a").fields["status"] == "queued"
    rows.confirm(connection, MAKER, [])
    watching(connection, "other")
    rows.confirm(connection, "other", [])
    assert found(connection, "a").fields["status"] == "queued"


def test_a_maker_that_is_back_brings_nothing_back_to_life(connection: RowConnection) -> None:
    watching(connection, "other")
    lost, deleted, cancelled, kept = (make(connection, name) for name in ("lost", "deleted", "cancelled", "kept"))
    connection.execute("UPDATE responses SET maker = 'gone' WHERE id = 'lost'")
    rows.confirm(connection, "other", [])
    rows.delete(connection, "t", "deleted")
    assert (rows.cancel(connection, "t", "cancelled") or lost).fields["status"] == "cancelled"
    all_ = [lost, deleted, cancelled, kept]
    confirmed = rows.confirm(connection, MAKER, [Progress.of(one) for one in all_])
    assert confirmed.made == {("t", "kept")}
    for taken in (confirmed.taken, rows.add(connection, [ended(one) for one in all_], MAKER, LARGE)):
        assert {name: one and one.fields["status"] for (_, name), one in taken.items()} == {
            "lost": "failed", "deleted": None, "cancelled": "cancelled",
        }  # fmt: skip
    assert there(connection, ["lost", "deleted", "cancelled", "kept"]) == [True, False, True, True]
    assert found(connection, "kept").fields["status"] == "completed"
    assert rows.add(connection, [ended(kept)], MAKER, LARGE) == {}, "it may be written again if a reply was lost"
    assert rows.confirm(connection, MAKER, [Progress.of(kept)]) == (set(), {}, [])


def test_ended_responses_are_not_cancelled(connection: RowConnection) -> None:
    add(connection, response("a"), response("a", tenant="u", status="queued"))
    assert (rows.cancel(connection, "t", "a") or response("b")).fields["status"] == "completed"
    assert found(connection, "a", "u").fields["status"] == "queued", (
        "another tenant's response of the same name is unaffected"
    )
    assert rows.cancel(connection, "t", "b") is None


def test_what_a_maker_is_not_making_after_all_is_dropped_unless_it_has_ended(connection: RowConnection) -> None:
    for name in ("a", "b", "c"):
        make(connection, name)
    rows.add(connection, [ended(response("b"))], MAKER, LARGE)
    rows.drop(connection, "other", [("t", "c")])
    rows.drop(connection, MAKER, [("t", "a"), ("t", "b"), ("u", "c"), ("t", "d")])
    assert there(connection, ["a", "b", "c"]) == [False, True, True]


def test_a_conversation_says_whether_it_has_ended(connection: RowConnection) -> None:
    add(connection, response("a"), response("b", status="in_progress"))
    for name in ("a", "b"):
        one = rows.conversation(connection, "t", name, LONG_S)
        assert one is not None
        assert one.is_ended == (name == "a")


def test_a_name_is_whatever_a_client_says(connection: RowConnection) -> None:
    for name in ("\0", "\ufffd", "?", "%s", "now_s()", "x" * 100_000):
        assert rows.find(connection, "t", name, LONG_S) is None
        assert rows.items(connection, "t", [name], LONG_S) == {}


EARLIER = f"""
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, state INTEGER NOT NULL, kept_s INTEGER NOT NULL,
    before INTEGER, input BLOB NOT NULL, output BLOB NOT NULL, fields BLOB, events BLOB,
    num_bytes INTEGER AS (length(input) + length(output) + COALESCE(length(fields), 0) + COALESCE(length(events), 0) + {ROW_BYTES})
);
CREATE UNIQUE INDEX responses_named ON responses (tenant, id) WHERE state < 2;
CREATE TABLE items (tenant TEXT NOT NULL, id TEXT NOT NULL, response INTEGER NOT NULL, PRIMARY KEY (tenant, id)) WITHOUT ROWID;
CREATE INDEX items_of ON items (response);
CREATE TABLE tenants (tenant TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    INSERT INTO tenants VALUES (NEW.tenant, NEW.num_bytes) ON CONFLICT DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER response_removed AFTER DELETE ON responses BEGIN
    UPDATE tenants SET num_bytes = num_bytes - OLD.num_bytes WHERE tenant = OLD.tenant;
    DELETE FROM tenants WHERE tenant = OLD.tenant AND num_bytes <= 0;
END;
INSERT INTO responses (tenant, id, state, kept_s, input, output, fields) VALUES (
    't', 'old', 1, strftime('%s'), CAST('"asked"' AS BLOB), CAST('{{"id": "msg_old"}}' AS BLOB),
    CAST('{{"id": "old", "status": "completed"}}' AS BLOB)
);
INSERT INTO items VALUES ('t', 'msg_old', 1);
"""


@pytest.mark.parametrize(
    "chosen",
    [
        "SELECT number, fields, output FROM responses WHERE tenant = 't' AND id = 'a' AND state < 2 AND kept_s > now_s() - 7",
        "SELECT 1 FROM responses WHERE before = 7",
        "SELECT number, fields FROM responses WHERE state = 0 AND maker = 'm'",
        "SELECT number FROM responses WHERE state = 1 AND kept_s <= now_s() - 7 LIMIT 200",
        "SELECT MIN(number) FROM responses WHERE tenant = 't' AND state = 1 AND number < 7",
        "SELECT tenant FROM response_tenants ORDER BY num_bytes DESC LIMIT 1",
        "SELECT till, events FROM response_events WHERE response = 7 AND till > 7 ORDER BY till",
    ],
)
def test_no_question_is_answered_by_reading_all_rows(connection: RowConnection, chosen: str) -> None:
    if isinstance(connection, TranslatedConnection):
        for way in ("seqscan", "bitmapscan"):  # PostgreSQL prefers these for small tables
            connection.execute(f"SET enable_{way} = off")
        plan = "\n".join(row[0] for row in connection.execute(f"EXPLAIN {chosen}").fetchall())
        assert "Seq Scan" not in plan, plan
        assert "Sort" not in plan, plan
    else:
        (plan,) = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {chosen}").fetchall()]
        assert "INDEX" in plan, plan
