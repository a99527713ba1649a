"""Responses as rows of SQLite. A row has what its response has beyond the one that it goes on from, so a conversation lies there once however many
responses it has. One that is deleted, or whose time is over, stays without what only it says for as long as others go on from it.

A row is found with its tenant alone. Functions of a connection, for the database's thread (wire/database.py); each is all or nothing.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from dialects.kept_responses import LOST, KeptResponse, PreviousResponse, ended_fields, joined
from wire.database import Connection, transaction
from wire.sse import EventDecoder

MADE, ENDED, GONE = range(3)  # states: it is being made, it has ended, only others need it
ROW_BYTES = 500  # what a row costs beside its bytes, with its places in the indexes
SWEPT = 200  # rows at once: some milliseconds
DEFLATE = 1  # the fastest: events repeat their names, and shrink to a twelfth

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, state INTEGER NOT NULL, kept_s INTEGER NOT NULL,
    before INTEGER, input BLOB NOT NULL, output BLOB NOT NULL, fields BLOB, events BLOB,
    num_bytes INTEGER AS (length(input) + length(output) + COALESCE(length(fields), 0) + COALESCE(length(events), 0) + {ROW_BYTES})
);
CREATE UNIQUE INDEX IF NOT EXISTS responses_named ON responses (tenant, id) WHERE state < {GONE};
CREATE INDEX IF NOT EXISTS responses_made ON responses (number) WHERE state = {MADE};
CREATE INDEX IF NOT EXISTS responses_of ON responses (tenant, number) WHERE state = {ENDED};
CREATE INDEX IF NOT EXISTS responses_old ON responses (kept_s) WHERE state = {ENDED};
CREATE INDEX IF NOT EXISTS responses_behind ON responses (before) WHERE before IS NOT NULL;
CREATE TABLE IF NOT EXISTS items (tenant TEXT NOT NULL, id TEXT NOT NULL, response INTEGER NOT NULL, PRIMARY KEY (tenant, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_of ON items (response);
CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tenants_largest ON tenants (num_bytes);
CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON responses BEGIN
    INSERT INTO tenants VALUES (NEW.tenant, NEW.num_bytes) ON CONFLICT DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS response_changed AFTER UPDATE ON responses BEGIN
    UPDATE tenants SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes WHERE tenant = NEW.tenant;
END;
CREATE TRIGGER IF NOT EXISTS response_removed AFTER DELETE ON responses BEGIN
    UPDATE tenants SET num_bytes = num_bytes - OLD.num_bytes WHERE tenant = OLD.tenant;
    DELETE FROM tenants WHERE tenant = OLD.tenant AND num_bytes <= 0;
END;
"""


class ResponseRow(NamedTuple):
    """A response as it is written."""

    tenant: str
    id: str
    state: int
    before: PreviousResponse | None
    input: bytes
    output: bytes
    item_ids: tuple[str, ...]
    fields: bytes
    events: tuple[bytes, ...]

    @classmethod
    def of(cls, response: KeptResponse) -> "ResponseRow":
        state = ENDED if response.is_ended else MADE
        ids = tuple(str(item["id"]) for item in response.fields["output"])
        fields = orjson.dumps({**response.fields, "output": None})
        return cls(
            response.tenant, response.id, state, response.before, response.own, response.output, ids, fields, tuple(response.events)
        )  # fmt: skip


def prepare(connection: Connection) -> None:
    """Set a connection up. What an earlier process was making then has failed."""
    connection.executescript(_SCHEMA)
    with transaction(connection):
        lost = connection.execute(f"SELECT number, fields FROM responses WHERE state = {MADE}").fetchall()
        for number, fields in lost:
            told = orjson.dumps(ended_fields(orjson.loads(fields), "failed", LOST))
            connection.execute(f"UPDATE responses SET state = {ENDED}, fields = ? WHERE number = ?", (told, number))


def add(connection: Connection, rows: Iterable[ResponseRow], now_s: float, max_bytes: int) -> None:
    """Write responses, or what they are by now. Whoever has most makes room, of its own the oldest."""
    with transaction(connection):
        first = None
        for row in rows:
            _forget(connection, _number(connection, row.tenant, row.id))
            number = _insert(connection, row, now_s)
            first = number if first is None else first
        while (
            first is not None and _total(connection) > max_bytes and (victim := _victim(connection, first)) is not None
        ):
            _forget(connection, victim)


def find(connection: Connection, tenant: str, name: str, since_s: float) -> tuple[int, KeptResponse] | None:
    """Return a response without its events, and its row's number."""
    chosen = (
        f"SELECT number, fields, output FROM responses WHERE tenant = ? AND id = ? AND state < {GONE} AND kept_s > ?"
    )
    row = connection.execute(chosen, (tenant, name, since_s)).fetchone()
    if row is None:
        return None
    fields = {**orjson.loads(row[1]), "output": _items(row[2])}
    return row[0], KeptResponse(tenant, fields)


def events(connection: Connection, tenant: str, name: str) -> list[bytes]:
    chosen = f"SELECT events FROM responses WHERE tenant = ? AND id = ? AND state < {GONE}"
    row = connection.execute(chosen, (tenant, name)).fetchone()
    if row is None or row[0] is None:
        return []
    told = zlib.decompress(row[0])
    return EventDecoder(len(told) + 1).split(told)


def input_items(connection: Connection, tenant: str, name: str) -> bytes:
    """Return all that a response was asked, as JSON with commas between."""
    number = _number(connection, tenant, name)
    return joined(*reversed([part for row in _chain(connection, tenant, number) for part in reversed(row)][1:]))


def conversation(connection: Connection, tenant: str, name: str, since_s: float) -> PreviousResponse | None:
    """Return all that was said until a response's end."""
    found = find(connection, tenant, name, since_s)
    if found is None:
        return None
    said = [part for row in _chain(connection, tenant, found[0]) for part in reversed(row)]
    return PreviousResponse(found[0], name, joined(*reversed(said)))


def items(connection: Connection, tenant: str, names: Sequence[str], since_s: float) -> dict[str, bytes]:
    """Return those items of answers that are there."""
    chosen = "SELECT output FROM items JOIN responses ON number = response WHERE items.tenant = ? AND items.id = ? AND kept_s > ?"
    found = dict[str, bytes]()
    for name in names:
        row = connection.execute(chosen, (tenant, name, since_s)).fetchone()
        if row is not None:
            found |= {item["id"]: orjson.dumps(item) for item in _items(row[0]) if item["id"] == name}
    return found


def delete(connection: Connection, tenant: str, name: str) -> None:
    with transaction(connection):
        _forget(connection, _number(connection, tenant, name))


def sweep(connection: Connection, until_s: float) -> bool:
    """Delete some of what was kept by then. Return whether there may be more."""
    with transaction(connection):
        chosen = f"SELECT number FROM responses WHERE state = {ENDED} AND kept_s <= ? LIMIT {SWEPT}"
        over = connection.execute(chosen, (until_s,)).fetchall()
        for (number,) in over:
            _forget(connection, number)
    return len(over) == SWEPT


def _insert(connection: Connection, row: ResponseRow, now_s: float) -> int:
    number, given = None, row.input
    if (before := row.before) is not None:
        # It may have been deleted meanwhile, and with it its row.
        known = "SELECT 1 FROM responses WHERE number = ? AND tenant = ? AND id = ?"
        if connection.execute(known, (before.number, row.tenant, before.id)).fetchone() is not None:
            number = before.number
        else:
            given = joined(before.items, given)
    told = zlib.compress(b"".join(row.events), DEFLATE) if row.events else None
    added = connection.execute(
        "INSERT INTO responses (tenant, id, state, kept_s, before, input, output, fields, events) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (row.tenant, row.id, row.state, int(now_s), number, given, row.output, row.fields, told),
    ).lastrowid
    assert added is not None, "it was inserted"
    named = [(row.tenant, item, added) for item in row.item_ids]
    connection.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", named)
    return added


def _forget(connection: Connection, number: int | None) -> None:
    """Delete a response; and its row, with those before it that are deleted too, up to one that others still need."""
    if number is None:
        return
    connection.execute(f"UPDATE responses SET state = {GONE}, fields = NULL, events = NULL WHERE number = ?", (number,))
    connection.execute("DELETE FROM items WHERE response = ?", (number,))
    needless = f"""SELECT before FROM responses WHERE number = ? AND state = {GONE}
        AND NOT EXISTS (SELECT 1 FROM responses AS later WHERE later.before = responses.number)"""
    while number is not None and (row := connection.execute(needless, (number,)).fetchone()) is not None:
        connection.execute("DELETE FROM responses WHERE number = ?", (number,))
        number = row[0]


def _number(connection: Connection, tenant: str, name: str) -> int | None:
    chosen = f"SELECT number FROM responses WHERE tenant = ? AND id = ? AND state < {GONE}"
    row = connection.execute(chosen, (tenant, name)).fetchone()
    return None if row is None else row[0]


def _chain(connection: Connection, tenant: str, number: int | None) -> Iterable[tuple[bytes, bytes]]:
    """Yield input and output of a response and of those before it, the newest first."""
    chosen = "SELECT before, input, output FROM responses WHERE number = ? AND tenant = ?"
    while number is not None and (row := connection.execute(chosen, (number, tenant)).fetchone()) is not None:
        number = row[0]
        yield row[1], row[2]


def _total(connection: Connection) -> int:
    return int(connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM tenants").fetchone()[0])


def _victim(connection: Connection, first: int) -> int | None:
    """Return the oldest response of the tenant that has most, but none of those from `first` on."""
    oldest = f"SELECT number FROM responses WHERE tenant = ? AND state = {ENDED} AND number < ? ORDER BY number LIMIT 1"
    for (tenant,) in connection.execute("SELECT tenant FROM tenants ORDER BY num_bytes DESC"):
        if (row := connection.execute(oldest, (tenant, first)).fetchone()) is not None:
            return int(row[0])
    return None


def _items(output: bytes) -> list[Any]:
    found: list[Any] = orjson.loads(b"[" + output + b"]")
    return found
