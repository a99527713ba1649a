"""Rows of responses: a conversation lies there once, whoever's it is it stays so, and what is deleted leaves what others need of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dialects import response_rows as rows
from dialects.kept_responses import KeptResponse, PreviousResponse
from dialects.response_rows import ROW_BYTES, ResponseRow
from wire.database import Connection, Database

LARGE = 1 << 40


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    database = Database(tmp_path / "responses.sqlite", rows.prepare)
    yield database._opened()
    database._close()


def response(
    name: str, own: str = "asked", *, tenant: str = "t", status: str = "completed", **fields: Any
) -> KeptResponse:
    output = [{"id": f"msg_{name}", "said": name}] if status == "completed" else []
    return KeptResponse(tenant, {"id": name, "status": status, "output": output, **fields}, json.dumps(own).encode())


def add(connection: Connection, *responses: KeptResponse, now_s: float = 0.0, max_bytes: int = LARGE) -> None:
    rows.add(connection, [ResponseRow.of(one) for one in responses], now_s, max_bytes)


def turns(connection: Connection, number: int, *, size: int = 10, tenant: str = "t") -> list[str]:
    """Keep a conversation of so many responses; return their names."""
    before, names = None, [f"{tenant}_{i}" for i in range(number)]
    for name in names:
        one = response(name, "x" * size, tenant=tenant)
        one.before = before
        add(connection, one)
        before = rows.conversation(connection, tenant, name, -1)
    return names


def there(connection: Connection, names: list[str], tenant: str = "t", since_s: float = -1) -> list[bool]:
    return [rows.find(connection, tenant, name, since_s) is not None for name in names]


def said(conversation: PreviousResponse | None) -> list[Any]:
    assert conversation is not None
    found: list[Any] = json.loads(b"[" + conversation.items + b"]")
    return found


def count(connection: Connection, table: str = "responses") -> int:
    return int(connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


def num_bytes(connection: Connection) -> int:
    counted = connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM responses").fetchone()[0]
    assert connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM tenants").fetchone()[0] == counted
    return int(counted)


def test_a_response_is_found_as_it_was_by_its_tenant_alone(connection: Connection) -> None:
    one = response("a", usage={"input_tokens": 3}, model="m")
    one.events = [b"event: x\ndata: 1\n\n", b"data: 2\n\n"]
    add(connection, one)
    _, found = rows.find(connection, "t", "a", -1) or (0, None)
    assert found is not None
    assert (found.fields, found.tenant) == (one.fields, "t")
    assert rows.events(connection, "t", "a") == one.events
    assert rows.input_items(connection, "t", "a") == b'"asked"'
    assert rows.items(connection, "t", ["msg_a", "msg_b"], -1) == {"msg_a": b'{"id":"msg_a","said":"a"}'}
    assert rows.find(connection, "u", "a", -1) is None
    assert rows.conversation(connection, "u", "a", -1) is None
    assert rows.events(connection, "u", "a") == []
    assert rows.input_items(connection, "u", "a") == b""
    assert rows.items(connection, "u", ["msg_a"], -1) == {}
    rows.delete(connection, "u", "a")
    assert there(connection, ["a"]) == [True], "another tenant deletes none of it"


def test_two_tenants_may_have_responses_of_one_name(connection: Connection) -> None:
    for tenant in ("t", "u"):
        add(connection, response("a", tenant, tenant=tenant))
    assert [rows.input_items(connection, tenant, "a") for tenant in ("t", "u")] == [b'"t"', b'"u"']
    rows.delete(connection, "t", "a")
    assert (there(connection, ["a"]), there(connection, ["a"], "u")) == ([False], [True])


def test_a_conversation_never_leads_into_another_tenants(connection: Connection) -> None:
    add(connection, response("secret", "mine"))
    number, _ = rows.find(connection, "t", "secret", -1) or (0, None)
    for before in (PreviousResponse(number, "secret", b'"told"'), PreviousResponse(number, "other", b'"told"')):
        thief = response("thief", "?", tenant="u")
        thief.before = before
        add(connection, thief)
        assert said(rows.conversation(connection, "u", "thief", -1))[:2] == ["told", "?"], "what it was told, no more"
    connection.execute("UPDATE responses SET before = ? WHERE tenant = 'u'", (number,))  # whatever else may go wrong
    assert b"mine" not in rows.input_items(connection, "u", "thief")


def test_a_conversation_of_many_responses_is_kept_once_and_let_go_with_the_last(connection: Connection) -> None:
    names = turns(connection, 30, size=1000)
    assert num_bytes(connection) < 30 * (1000 + ROW_BYTES + 200)
    whole = said(rows.conversation(connection, "t", names[-1], -1))
    assert whole == [part for name in names for part in ("x" * 1000, {"id": f"msg_{name}", "said": name})]
    assert json.loads(b"[" + rows.input_items(connection, "t", names[-1]) + b"]") == whole[:-1]
    for name in names[:-1]:
        rows.delete(connection, "t", name)
    assert there(connection, names) == [False] * 29 + [True]
    assert said(rows.conversation(connection, "t", names[-1], -1)) == whole, "the last one has all of it"
    assert rows.items(connection, "t", [f"msg_{name}" for name in names], -1).keys() == {f"msg_{names[-1]}"}
    rows.delete(connection, "t", names[-1])
    assert [count(connection, table) for table in ("responses", "items", "tenants")] == [0, 0, 0]


def test_of_two_that_go_on_from_one_each_has_it_until_both_are_deleted(connection: Connection) -> None:
    add(connection, response("root", "r"))
    for name in ("left", "right"):
        branch = response(name, name)
        branch.before = rows.conversation(connection, "t", "root", -1)
        add(connection, branch)
    rows.delete(connection, "t", "root")
    rows.delete(connection, "t", "left")
    assert said(rows.conversation(connection, "t", "right", -1))[0] == "r"
    assert count(connection) == 2
    rows.delete(connection, "t", "right")
    assert count(connection) == 0


def test_what_was_deleted_while_another_was_made_from_it_is_kept_with_that(connection: Connection) -> None:
    add(connection, response("a", "first"))
    later = response("b", "second")
    later.before = rows.conversation(connection, "t", "a", -1)
    rows.delete(connection, "t", "a")
    assert count(connection) == 0
    add(connection, later)
    found = said(rows.conversation(connection, "t", "b", -1))
    assert [found[0], found[1]["said"], found[2]] == ["first", "a", "second"]


def test_keeping_one_again_is_keeping_what_it_is_by_now(connection: Connection) -> None:
    add(connection, response("a", status="in_progress"))
    assert rows.events(connection, "t", "a") == []
    for _ in range(3):
        add(connection, response("a"))
    assert (count(connection), count(connection, "items")) == (1, 1)
    _, found = rows.find(connection, "t", "a", -1) or (0, None)
    assert found is not None
    assert found.fields["status"] == "completed"


def test_what_an_earlier_process_was_making_has_failed(connection: Connection) -> None:
    add(connection, response("a", status="queued", model="m"), response("b"))
    rows.prepare(connection)
    _, found = rows.find(connection, "t", "a", -1) or (0, None)
    assert found is not None
    assert (found.fields["status"], found.fields["error"]["code"]) == ("failed", "aborted")
    assert (found.fields["model"], found.fields["output"]) == ("m", [])
    _, other = rows.find(connection, "t", "b", -1) or (0, None)
    assert other is not None
    assert other.fields["status"] == "completed"


def test_the_tenant_that_has_most_makes_room_and_of_its_own_the_oldest(connection: Connection) -> None:
    add(connection, response("quiet", "q" * 100, tenant="u"))
    size = num_bytes(connection)
    for i in range(40):
        add(connection, response(f"loud{i}", "q" * 100), max_bytes=6 * size + 100)
    assert there(connection, ["quiet"], "u") == [True], "the oldest, and of the one that has least"
    assert there(connection, [f"loud{i}" for i in range(40)]) == [False] * 35 + [True] * 5
    assert num_bytes(connection) <= 6 * size + 100


def test_what_is_being_made_makes_no_room_and_what_was_written_just_now_neither(connection: Connection) -> None:
    add(connection, response("made", "m" * 5000, status="in_progress"))
    add(connection, response("old"), max_bytes=1)
    add(connection, response("new"), response("newer"), max_bytes=1)
    assert there(connection, ["made", "old", "new", "newer"]) == [True, False, True, True]


def test_what_is_past_its_time_is_not_found_and_then_deleted(connection: Connection) -> None:
    add(connection, *(response(f"old{i}") for i in range(rows.SWEPT + 1)), now_s=100)
    add(connection, response("new"), now_s=200)
    add(connection, response("made", status="queued"), now_s=100)
    assert there(connection, ["old0", "new"], since_s=100) == [False, True]
    assert rows.items(connection, "t", ["msg_old0", "msg_new"], 100).keys() == {"msg_new"}
    assert rows.conversation(connection, "t", "old0", 100) is None
    assert [rows.sweep(connection, 100) for _ in range(2)] == [True, False]
    assert [count(connection, table) for table in ("responses", "items")] == [2, 1], "what is made has no age"


def test_a_conversation_outlives_the_time_of_its_beginning(connection: Connection) -> None:
    add(connection, response("a", "first"), now_s=100)
    later = response("b", "second")
    later.before = rows.conversation(connection, "t", "a", -1)
    add(connection, later, now_s=200)
    rows.sweep(connection, 150)
    assert there(connection, ["a", "b"], since_s=150) == [False, True]
    assert len(said(rows.conversation(connection, "t", "b", 150))) == 4


def test_writing_many_fails_or_succeeds_as_one(connection: Connection) -> None:
    good = ResponseRow.of(response("a"))
    with pytest.raises(Exception, match="NOT NULL"):
        rows.add(connection, [good, good._replace(id=None)], 0.0, LARGE)  # type: ignore[arg-type]
    assert (count(connection), num_bytes(connection)) == (0, 0)


@pytest.mark.parametrize(
    "chosen",
    [
        "SELECT number, fields, output FROM responses WHERE tenant = 't' AND id = 'a' AND state < 2 AND kept_s > 0",
        "SELECT 1 FROM responses WHERE before = 7",
        "SELECT number, fields FROM responses WHERE state = 0",
        "SELECT number FROM responses WHERE state = 1 AND kept_s <= 7 LIMIT 200",
        "SELECT number FROM responses WHERE tenant = 't' AND state = 1 AND number < 7 ORDER BY number LIMIT 1",
        "SELECT tenant FROM tenants ORDER BY num_bytes DESC",
    ],
)
def test_no_question_is_answered_by_reading_all_rows(connection: Connection, chosen: str) -> None:
    (plan,) = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {chosen}")]
    assert "INDEX" in plan, plan
