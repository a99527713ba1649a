"""Stored batches: limits per owner, times, and one answer for each request. Tests pass the time as an argument."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from pilotlight.edge_router.services.batches.batch_store import (
    KEPT_S,
    WITHIN_S,
    BatchCounts,
    BatchLimits,
    BatchStore,
    StoredBatch,
    batch_fields,
)
from pilotlight.edge_router.services.batches.lines import OUT_OF_TIME, AskedLine
from pilotlight.wire.errors import ApiError


@pytest.fixture
def limits() -> BatchLimits:
    return BatchLimits()


@pytest.fixture
def connection(tmp_path: Path) -> sqlite3.Connection:
    return sqlite3.connect(tmp_path / "batches.sqlite")


@pytest.fixture
def store(connection: sqlite3.Connection, limits: BatchLimits) -> Iterator[BatchStore]:
    made = BatchStore(connection, limits)
    yield made
    made.close()


def asked(store: BatchStore, *names: str, id: str = "batch_1", owner: str = "acme", at_s: int = 0) -> StoredBatch:
    batch = StoredBatch(id, owner, "", "/v1/chat/completions", "file-1", at_s, at_s + WITHIN_S)
    return store.add(batch, [AskedLine(name, "ember", name.encode()) for name in names])


def answer(
    store: BatchStore, behind: int = 0, *, owner: str = "acme", at_s: int = 1, status: int = 200, told: bytes = b"{}"
) -> int:
    """Answer the owner's next request; return its number."""
    request = store.next_waiting(owner, "ember", behind)
    assert request is not None
    store.answered(request, status, told, at_s)
    return request.number


def parts(store: BatchStore, name: str | None, owner: str = "acme") -> list[bytes]:
    assert name is not None
    file, found, behind = store.file(name, owner), [], 0
    while True:
        part, behind = store.part(file, behind)
        found.append(part)
        if not behind:
            assert file.num_bytes == sum(map(len, found))
            return found


def test_overdue_requests_are_given_up_and_reported_but_not_running_ones(store: BatchStore) -> None:
    made = asked(store, "a", "b", "c")
    number = answer(store)
    under_way = [number + 1]
    store.sweep(under_way, WITHIN_S - 1)
    assert store.counts(made) == BatchCounts(2, 1, 0, 0, 0)
    store.sweep(under_way, WITHIN_S)
    assert store.counts(made) == BatchCounts(1, 1, 0, 1, 0)
    assert store.batch("batch_1", "acme")[0].ended_s is None, "one is under way"
    store.sweep([], WITHIN_S + 1)
    ended, counts = store.batch("batch_1", "acme")
    assert (ended.ended_s, counts) == (WITHIN_S + 1, BatchCounts(0, 1, 0, 2, 0))
    told = batch_fields(ended, counts)
    assert (told["status"], told["expired_at"], told["completed_at"]) == ("expired", WITHIN_S + 1, None)
    assert told["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    assert b"".join(parts(store, ended.output_file)).count(b"\n") == 1
    assert b"".join(parts(store, ended.error_file)).count(OUT_OF_TIME.encode()) == 2
    assert store.waiting() == []


def test_an_ended_batch_is_kept_for_a_day_and_then_removed_completely(
    store: BatchStore, connection: sqlite3.Connection
) -> None:
    asked(store, "a")
    answer(store, at_s=10)
    file = store.batch("batch_1", "acme")[0].output_file
    assert file is not None
    store.sweep([], 10 + KEPT_S - 1)
    assert store.batch("batch_1", "acme")[1].answered == 1
    assert parts(store, file)
    store.sweep([], 10 + KEPT_S)
    for find in (lambda: store.batch("batch_1", "acme"), lambda: store.file(file, "acme")):
        with pytest.raises(ApiError, match="has expired"):
            find()
    left = [connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone() for table in ("requests", "files")]
    assert left == [(0,), (0,)]


def test_a_request_has_one_answer_and_the_first_stays(store: BatchStore) -> None:
    made = asked(store, "a", "b")
    request = store.next_waiting("acme", "ember", 0)
    assert request is not None
    assert (request.body, request.batch) == (b"a", made)
    store.answered(request, 200, b"first", 1)
    store.answered(request, 500, b"second", 2)
    assert next(row[2:] for row in store.answers(made.id)) == ("a", 200, b"first")
    assert store.counts(made) == BatchCounts(1, 1, 0, 0, 0)


def test_requests_wait_in_their_order_each_owners_and_models_apart(store: BatchStore) -> None:
    asked(store, "a", "b")
    asked(store, "c", id="batch_2", owner="bob")
    first = store.next_waiting("acme", "ember", 0)
    assert first is not None
    second = store.next_waiting("acme", "ember", first.number)
    assert second is not None
    assert (first.body, second.body) == (b"a", b"b")
    assert store.next_waiting("acme", "ember", second.number) is None
    assert store.next_waiting("acme", "another", 0) is None
    assert sorted(store.waiting()) == [("acme", "ember"), ("bob", "ember")]


@pytest.mark.parametrize("limits", [BatchLimits(part_bytes=15_000)])
def test_answers_that_are_more_than_the_database_has_in_one_value_end_their_batch_and_are_read_in_parts(
    store: BatchStore, connection: sqlite3.Connection
) -> None:
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 20_000)  # the default limit is 10^9 bytes
    asked(store, "a", "b", "c", "d")
    number = 0
    for status in (200, 200, 400, 200):
        number = answer(store, number, status=status, told=b'"%s"' % (b"x" * 9_000))
    ended, _ = store.batch("batch_1", "acme")
    assert ended.ended_s == 1
    told = parts(store, ended.output_file)
    assert [part.count(b"\n") for part in told] == [2, 1]
    lines = [orjson.loads(line) for line in b"".join(told).splitlines()]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in lines] == [
        ("a", 200),
        ("b", 200),
        ("d", 200),
    ]
    assert b'"custom_id":"c"' in b"".join(parts(store, ended.error_file))
    mine = store.add_file("acme", "mine", "batch", b"line", 0)
    assert parts(store, mine.id) == [b"line"]


def test_answers_are_read_as_they_lie_and_not_sorted_for_each_part(
    store: BatchStore, connection: sqlite3.Connection
) -> None:
    asked(store, "a", id="before")
    asked(store, "b", "c")
    asked(store, "d", id="after")
    plans: list[str] = []
    connection.set_trace_callback(plans.append)
    number = next(row[1] for row in store.answers("batch_1"))
    assert [row[2] for row in store.answers("batch_1")] == ["b", "c"]
    assert [row[2] for row in store.answers("batch_1", number)] == ["c"]
    assert list(store.answers("none")) == []
    connection.set_trace_callback(None)
    (plan,) = connection.execute(f"EXPLAIN QUERY PLAN {plans[-1]}").fetchall()
    assert "INTEGER PRIMARY KEY" in plan[3]


def test_a_cancelled_batch_ends_with_its_running_requests(store: BatchStore) -> None:
    made = asked(store, "a", "b", "c")
    number = answer(store)
    store.cancel(made, [number + 1], 5)
    cancelled, counts = store.batch("batch_1", "acme")
    assert (counts, batch_fields(cancelled, counts)["status"]) == (BatchCounts(1, 1, 0, 0, 1), "cancelling")
    answer(store, number, at_s=7)
    ended, counts = store.batch("batch_1", "acme")
    told = batch_fields(ended, counts)
    assert (told["status"], told["cancelling_at"], told["cancelled_at"]) == ("cancelled", 5, 7)
    assert ended.error_file is None, "a cancelled request is not an error"


def test_a_cancelled_batch_of_which_nothing_is_under_way_has_ended(store: BatchStore) -> None:
    batch = asked(store, "a", "b")
    number = answer(store)
    store.cancel(batch, (), 7)
    found, counts = store.batch(batch.id, "acme")
    assert (found.cancelled_s, found.ended_s) == (7, 7)
    assert (counts.answered, counts.cancelled, counts.waiting) == (1, 1, 0)
    assert store.next_waiting("acme", "ember", number) is None
    store.cancel(found, (), 9)
    assert store.batch(batch.id, "acme")[0].cancelled_s == 7, "it had ended"


@pytest.mark.parametrize("limits", [BatchLimits(num_waiting=3, num_models=2, file_bytes=10)])
def test_what_waits_and_what_is_kept_of_one_owner_is_bounded(store: BatchStore) -> None:
    asked(store, "a", "b")
    with pytest.raises(ApiError, match="more than 3 requests of your account"):
        asked(store, "c", "d", id="batch_2")
    asked(store, "c", "d", id="batch_2", owner="bob")
    answer(store)
    asked(store, "c", "d", id="batch_3")
    several = [AskedLine("a", model, b"{}") for model in ("ember", "b", "c")]
    with pytest.raises(ApiError, match="for more than 2 models would wait"):
        store.add(asked(store, id="batch_4", owner="dave")._replace(id="batch_5"), several)
    store.add(asked(store, "e", id="batch_6", owner="dave")._replace(id="batch_5"), several[:2])
    store.add_file("carol", "a", "batch", b"x" * 6, 0)
    file = store.add_file("carol", "b", "batch", b"x" * 4, 0)
    with pytest.raises(ApiError, match="MiB of files"):
        store.add_file("carol", "c", "batch", b"x", 0)
    store.add_file("dave", "c", "batch", b"x", 0)
    store.delete_file(file)
    store.add_file("carol", "c", "batch", b"x", 1)
    assert [each.name for each in store.files("carol")] == ["c", "a"], "the newest first"


def test_a_batch_that_came_with_its_requests_has_its_answers_and_no_files(store: BatchStore) -> None:
    batch = StoredBatch("batch_1", "acme", "", "/run/ember", "", 0, WITHIN_S)
    made = store.add(batch, [AskedLine("a", "ember", b"a")])
    answer(store)
    ended, _ = store.batch("batch_1", "acme")
    assert (ended.ended_s, ended.output_file, ended.error_file) == (1, None, None)
    assert [(status, told) for _, _, _, status, told in store.answers(made.id)] == [(200, b"{}")]
