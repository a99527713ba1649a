"""Responses as rows of a database: SQLite for one process, or PostgreSQL for several routers.

A row has only the items that its response adds to the previous one, so a conversation is stored once. If a response is deleted or expires, its row
keeps the items that later responses need. A row is found only by its id and its tenant. A response in progress is written by the process that
computes it, its maker, until another process ends or deletes it. Each function takes a connection and runs in one transaction, in SQL that both
databases accept: `?` is a value, `now_s()` the time by the database's clock.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from pilotlight.response_store.kept_responses import (
    LOST,
    KeptResponse,
    PreviousResponse,
    ended_fields,
    joined,
    plain_event,
)
from pilotlight.response_store.response_database import RowConnection
from pilotlight.wire.errors import ApiError
from pilotlight.wire.sse import EventDecoder

MADE, ENDED, GONE = range(3)  # states: in progress; ended; deleted, but needed by later responses
ROW_BYTES = 500  # overhead of a row, including its entries in indexes
SWEPT = 200  # rows deleted at once, which takes some milliseconds
DEFLATE = 1  # compression level: the fastest one shrinks events, which repeat names, to a twelfth
EXPIRES_S = 10.0  # a process that has not reported for this time counts as dead
CLAIMED_AT_ONCE = 20  # responses of dead processes that a process continues per report, so that others get some, too
MOST_DEATHS = 2  # a response is continued after so many deaths of processes: its request may be what kills them
RELEASED = ""  # maker of a response that its process has left for another one
NAMES_AT_ONCE = 500  # maximum number of ids in one statement
FOREVER_S = 1e12
_DAMAGE = (orjson.JSONDecodeError, zlib.error)

Name = tuple[str, str]  # a response's tenant and id


class ResponseRow(NamedTuple):
    """The values of a row that is written for a response."""

    tenant: str
    id: str
    state: int
    before: PreviousResponse | None
    input: bytes
    output: bytes
    item_ids: tuple[str, ...]
    fields: bytes
    events: tuple[bytes, ...]
    is_started: bool  # the row was written before, so if it is missing, another process deleted it
    request: bytes | None

    @classmethod
    def of(cls, response: KeptResponse) -> "ResponseRow":
        state = ENDED if response.is_ended else MADE
        ids = tuple(str(item["id"]) for item in response.fields["output"])
        return cls(
            response.tenant, response.id, state, response.before, response.own, response.output, ids, _fields(response),
            tuple(response.all_events), response.is_started, response.request,
        )  # fmt: skip


class Progress(NamedTuple):
    """The progress of a response since the last report, for processes other than its maker."""

    name: Name
    fields: bytes | None  # None if unchanged
    events: tuple[bytes, ...]  # new events
    till: int  # number of events up to the last one

    @classmethod
    def of(cls, response: KeptResponse) -> "Progress":
        name = (response.tenant, response.id)
        if response.is_ended:  # the fields and events of an ended response are stored with its end
            return cls(name, None, (), len(response.events))
        changed = None if response.told_fields is response.fields else _fields(response)
        return cls(name, changed, tuple(response.untold), len(response.events) + len(response.untold))


class FoundResponse(NamedTuple):
    """A stored response, without its events."""

    number: int
    maker: str | None
    response: KeptResponse


class EventPage(NamedTuple):
    """Consecutive events of a response."""

    response: KeptResponse
    events: list[bytes]
    till: int  # number of events up to the last one


class LostResponse(NamedTuple):
    """A response whose process has ended, for the process that continues it."""

    response: KeptResponse
    request: bytes
    events: list[bytes]  # with their resume points


class Confirmed(NamedTuple):
    made: set[Name]  # responses that this maker computes, according to the database
    # new state of each reported response that another process changed; None if it was deleted
    taken: dict[Name, KeptResponse | None]
    lost: list[LostResponse]  # responses that this maker continues from now on


def schema(number: str, blob: str) -> str:
    """Return the statements that create the tables. Triggers that count bytes by tenant are separate.
    `number` and `blob` are types in the database's SQL."""
    return f"""
CREATE TABLE IF NOT EXISTS responses (
    number {number}, tenant TEXT NOT NULL, id TEXT NOT NULL, state INTEGER NOT NULL, kept_s DOUBLE PRECISION NOT NULL,
    before BIGINT, input {blob} NOT NULL, output {blob} NOT NULL, fields {blob}, events {blob}, maker TEXT,
    num_bytes BIGINT GENERATED ALWAYS AS (
        length(input) + length(output) + COALESCE(length(fields), 0) + COALESCE(length(events), 0) + {ROW_BYTES}
    ) STORED
);
CREATE UNIQUE INDEX IF NOT EXISTS responses_named ON responses (tenant, id) WHERE state < {GONE};
CREATE INDEX IF NOT EXISTS responses_made ON responses (number) WHERE state = {MADE};
CREATE INDEX IF NOT EXISTS responses_of ON responses (tenant, number) WHERE state = {ENDED};
CREATE INDEX IF NOT EXISTS responses_old ON responses (kept_s) WHERE state = {ENDED};
CREATE INDEX IF NOT EXISTS responses_behind ON responses (before) WHERE before IS NOT NULL;
CREATE TABLE IF NOT EXISTS response_items (tenant TEXT NOT NULL, id TEXT NOT NULL, response BIGINT NOT NULL, PRIMARY KEY (tenant, id));
CREATE INDEX IF NOT EXISTS response_items_of ON response_items (response);
CREATE TABLE IF NOT EXISTS response_tenants (tenant TEXT PRIMARY KEY, num_bytes BIGINT NOT NULL);
CREATE INDEX IF NOT EXISTS response_tenants_largest ON response_tenants (num_bytes);
CREATE TABLE IF NOT EXISTS response_events (response BIGINT NOT NULL, till INTEGER NOT NULL, events {blob} NOT NULL, PRIMARY KEY (response, till));
CREATE TABLE IF NOT EXISTS response_makers (maker TEXT PRIMARY KEY, since_s DOUBLE PRECISION NOT NULL, seen_s DOUBLE PRECISION NOT NULL);
CREATE TABLE IF NOT EXISTS response_requests (response BIGINT PRIMARY KEY, request {blob} NOT NULL, num_deaths INTEGER NOT NULL)
"""


def add(
    connection: RowConnection, rows: Iterable[ResponseRow], maker: str, max_bytes: int
) -> dict[Name, KeptResponse | None]:
    """Write responses in their current state.
    The oldest responses of the tenant with the most bytes are deleted to make room. Return the state of each response that was not written, because
    another process has ended it; None for a deleted one."""
    first, taken = None, dict[Name, KeptResponse | None]()
    for row in rows:
        found = find(connection, row.tenant, row.id)
        if row.is_started and (found is None or found.maker != maker):
            taken[row.tenant, row.id] = None if found is None else found.response
            continue
        if row.state == MADE:
            _confirm_maker(connection, maker)
        if found is not None:
            _forget(connection, found.number)
        number = _insert(connection, row, maker)
        first = number if first is None else first
    while first is not None and _total(connection) > max_bytes and (victim := _victim(connection, first)) is not None:
        _forget(connection, victim)
    return taken


def confirm(
    connection: RowConnection, maker: str, told: Iterable[Progress], *, is_alone: bool = False, may_claim: bool = True
) -> Confirmed:
    """Record that a maker is alive, and its progress; claim responses of dead makers.
    A maker is dead if it has not reported for EXPIRES_S, and this one has for that long without a gap: after an outage of the database no maker has.
    In a file, which one process has alone, all others are dead."""
    lost = list[LostResponse]()
    if (_confirm_maker(connection, maker) or is_alone) and may_claim:
        lost = _claim_lost(connection, maker, -FOREVER_S if is_alone else EXPIRES_S)
    chosen = f"SELECT tenant, id, number FROM responses WHERE state = {MADE} AND maker = ?"
    made = {(tenant, id): number for tenant, id, number in connection.execute(chosen, (maker,)).fetchall()}
    taken = dict[Name, KeptResponse | None]()
    for one in told:
        number = made.get(one.name)
        if number is not None:
            _tell(connection, number, one)
        elif (found := find(connection, *one.name)) is None or found.maker != maker:
            taken[one.name] = None if found is None else found.response
    return Confirmed(set(made), taken, lost)


def release(connection: RowConnection, maker: str, tenant: str, name: str) -> None:
    """Let another process continue a response at once."""
    changed = f"UPDATE responses SET maker = ? WHERE tenant = ? AND id = ? AND maker = ? AND state = {MADE}"
    connection.execute(changed, (RELEASED, tenant, name, maker))


def find(connection: RowConnection, tenant: str, name: str, keep_s: float = FOREVER_S) -> FoundResponse | None:
    chosen = f"SELECT number, maker, fields, output FROM responses WHERE tenant = ? AND id = ? AND state < {GONE} AND kept_s > now_s() - ?"
    row = connection.execute(chosen, (tenant, name, keep_s)).fetchone()
    return None if row is None else FoundResponse(row[0], row[1], _response(tenant, row[2], row[3]))


def events(connection: RowConnection, tenant: str, name: str, place: int) -> EventPage | None:
    """Return a response and its stored events from number `place` on; None if it is unknown."""
    chosen = f"SELECT number, fields, output, events FROM responses WHERE tenant = ? AND id = ? AND state < {GONE}"
    row = connection.execute(chosen, (tenant, name)).fetchone()
    if row is None:
        return None
    response = _response(tenant, row[1], row[2])
    if row[3] is not None:
        told = _split(row[3])
        return EventPage(response, told[place:], len(told))
    told = [plain_event(event) for event in _pieces(connection, row[0], place)]
    return EventPage(response, told, place + len(told) if told else 0)


def input_items(connection: RowConnection, tenant: str, name: str) -> bytes:
    """Return a response's input and the conversation before it, as JSON objects separated by commas."""
    found = find(connection, tenant, name)
    return b"" if found is None else joined(*_chain(connection, tenant, found.number)[:-1])


def conversation(connection: RowConnection, tenant: str, name: str, keep_s: float) -> PreviousResponse | None:
    """Return the conversation up to a response's end; None if the response is unknown."""
    found = find(connection, tenant, name, keep_s)
    if found is None:
        return None
    said = joined(*_chain(connection, tenant, found.number))
    return PreviousResponse(found.number, name, said, found.response.is_ended)


def items(connection: RowConnection, tenant: str, names: Sequence[str], keep_s: float) -> dict[str, bytes]:
    """Return the stored output items among `names`, by id."""
    found = dict[str, bytes]()
    for start in range(0, len(names), NAMES_AT_ONCE):
        wanted = names[start : start + NAMES_AT_ONCE]
        chosen = f"""SELECT output FROM responses WHERE kept_s > now_s() - ? AND number IN (
                SELECT response FROM response_items WHERE tenant = ? AND id IN ({", ".join("?" * len(wanted))})
            )"""
        for (output,) in connection.execute(chosen, (keep_s, tenant, *wanted)).fetchall():
            found |= {item["id"]: orjson.dumps(item) for item in _items(output) if item["id"] in wanted}
    return found


def cancel(connection: RowConnection, tenant: str, name: str) -> KeptResponse | None:
    """Cancel a response in progress, of any maker; return its final state, or None if it is unknown."""
    chosen = f"tenant = ? AND id = ? AND state < {GONE}"
    _end_made(connection, chosen, (tenant, name), "cancelled", None)
    found = find(connection, tenant, name)
    return None if found is None else found.response


def delete(connection: RowConnection, tenant: str, name: str) -> None:
    if (found := find(connection, tenant, name)) is not None:
        _forget(connection, found.number)


def delete_all(connection: RowConnection, names: Iterable[Name]) -> None:
    for tenant, name in names:
        delete(connection, tenant, name)


def drop(connection: RowConnection, maker: str, names: Iterable[Name]) -> None:
    """Delete those of the named responses that are in progress at this maker."""
    chosen = f"SELECT number FROM responses WHERE tenant = ? AND id = ? AND state = {MADE} AND maker = ?"
    for name in names:
        if (row := connection.execute(chosen, (*name, maker)).fetchone()) is not None:
            _forget(connection, row[0])


def sweep(connection: RowConnection, keep_s: float) -> bool:
    """Delete up to SWEPT responses that are older than `keep_s`; return whether there may be more."""
    chosen = f"SELECT number FROM responses WHERE state = {ENDED} AND kept_s <= now_s() - ? LIMIT {SWEPT}"
    over = connection.execute(chosen, (keep_s,)).fetchall()
    for (number,) in over:
        _forget(connection, number)
    return len(over) == SWEPT


def _confirm_maker(connection: RowConnection, maker: str) -> bool:
    """Record that a maker is alive; return whether it has reported without a gap for EXPIRES_S."""
    row = connection.execute(
        f"""INSERT INTO response_makers AS known (maker, since_s, seen_s) VALUES (?, now_s(), now_s()) ON CONFLICT (maker) DO UPDATE SET
            since_s = CASE WHEN known.seen_s < excluded.seen_s - {EXPIRES_S / 2} THEN excluded.seen_s ELSE known.since_s END,
            seen_s = excluded.seen_s
            RETURNING since_s <= seen_s - {EXPIRES_S}""",
        (maker,),
    ).fetchone()
    return bool(row[0])


def _claim_lost(connection: RowConnection, maker: str, expires_s: float) -> list[LostResponse]:
    """Give some responses of dead makers to this one, and end those that cannot be continued."""
    connection.execute("DELETE FROM response_makers WHERE seen_s < now_s() - ? AND maker <> ?", (expires_s, maker))
    is_lost = "NOT EXISTS (SELECT 1 FROM response_makers WHERE response_makers.maker = responses.maker)"
    chosen = f"""SELECT number, tenant, fields, output, input, before, request, CASE maker WHEN '{RELEASED}' THEN 0 ELSE 1 END AS died
        FROM responses JOIN response_requests ON response = number WHERE state = {MADE} AND {is_lost} ORDER BY number LIMIT {CLAIMED_AT_ONCE}"""
    lost = list[LostResponse]()
    for number, tenant, fields, output, given, before, request, died in connection.execute(chosen).fetchall():
        counted = "UPDATE response_requests SET num_deaths = num_deaths + ? WHERE response = ? RETURNING num_deaths"
        (num_deaths,) = connection.execute(counted, (died, number)).fetchone()
        try:
            response, events = _response(tenant, fields, output), list(_pieces(connection, number))
        except _DAMAGE:
            num_deaths = MOST_DEATHS + 1
        if num_deaths > MOST_DEATHS:
            connection.execute("DELETE FROM response_requests WHERE response = ?", (number,))
            continue
        response.own, response.request, response.events = given, request, [plain_event(event) for event in events]
        if before is not None:
            (name,) = connection.execute("SELECT id FROM responses WHERE number = ?", (before,)).fetchone()
            response.before = PreviousResponse(before, name, joined(*_chain(connection, tenant, before)))
        connection.execute("UPDATE responses SET maker = ? WHERE number = ?", (maker, number))
        lost.append(LostResponse(response, request, events))
    _end_made(connection, f"number NOT IN (SELECT response FROM response_requests) AND {is_lost}", ())
    return lost


def _end_made(
    connection: RowConnection, which: str, values: Sequence[Any], status: str = "failed", error: ApiError | None = LOST
) -> None:
    """End the responses in progress that the condition `which` selects, and store their events so far.
    Damaged ones are deleted."""
    found = connection.execute(f"SELECT number, fields FROM responses WHERE state = {MADE} AND {which}", values)
    for number, fields in found.fetchall():
        try:
            told = orjson.dumps(ended_fields(orjson.loads(fields), status, error))
            events = _packed([plain_event(event) for event in _pieces(connection, number)])
        except _DAMAGE:
            _forget(connection, number)
            continue
        changed = f"UPDATE responses SET state = {ENDED}, maker = NULL, fields = ?, events = ? WHERE number = ?"
        connection.execute(changed, (told, events, number))
        _forget_progress(connection, number)


def _tell(connection: RowConnection, number: int, progress: Progress) -> None:
    if progress.fields is not None:
        connection.execute("UPDATE responses SET fields = ? WHERE number = ?", (progress.fields, number))
    if progress.events:  # DO NOTHING, because an earlier write may have succeeded although its answer was lost
        added = "INSERT INTO response_events (response, till, events) VALUES (?, ?, ?) ON CONFLICT (response, till) DO NOTHING"
        connection.execute(added, (number, progress.till, _packed(progress.events)))


def _pieces(connection: RowConnection, number: int, place: int = 0) -> Iterator[bytes]:
    """Yield the events of a response in progress with their resume points, from number `place` on."""
    chosen = "SELECT till, events FROM response_events WHERE response = ? AND till > ? ORDER BY till"
    for till, packed in connection.execute(chosen, (number, place)).fetchall():
        told = _split(packed)
        yield from told[max(0, place - (till - len(told))) :]
        place = till


def _insert(connection: RowConnection, row: ResponseRow, maker: str) -> int:
    before, given = None, row.input
    if row.before is not None:
        # The previous response and its row may have been deleted meanwhile.
        known = "SELECT 1 FROM responses WHERE number = ? AND tenant = ? AND id = ?"
        if connection.execute(known, (row.before.number, row.tenant, row.before.id)).fetchone() is not None:
            before = row.before.number
        else:
            given = joined(row.before.items, given)
    inserted = """INSERT INTO responses (tenant, id, state, kept_s, before, input, output, fields, events, maker)
        VALUES (?, ?, ?, now_s(), ?, ?, ?, ?, ?, ?) RETURNING number"""
    values = (row.tenant, row.id, row.state, before, given, row.output, row.fields, _packed(row.events), maker)
    (number,) = connection.execute(inserted, values).fetchone()
    named = """INSERT INTO response_items (tenant, id, response) VALUES (?, ?, ?)
        ON CONFLICT (tenant, id) DO UPDATE SET response = excluded.response"""
    for item in row.item_ids:
        connection.execute(named, (row.tenant, item, number))
    if row.request is not None and row.state == MADE:
        connection.execute("INSERT INTO response_requests VALUES (?, ?, 0)", (number, row.request))
    return int(number)


def _forget(connection: RowConnection, forgotten: int) -> None:
    """Delete a response. Its row, and deleted rows before it, stay while a later response needs them."""
    number: int | None = forgotten
    connection.execute(f"UPDATE responses SET state = {GONE}, fields = NULL, events = NULL WHERE number = ?", (number,))
    connection.execute("DELETE FROM response_items WHERE response = ?", (number,))
    _forget_progress(connection, forgotten)
    needless = f"""SELECT before FROM responses WHERE number = ? AND state = {GONE}
        AND NOT EXISTS (SELECT 1 FROM responses AS later WHERE later.before = responses.number)"""
    while number is not None and (row := connection.execute(needless, (number,)).fetchone()) is not None:
        connection.execute("DELETE FROM responses WHERE number = ?", (number,))
        number = row[0]


def _forget_progress(connection: RowConnection, number: int) -> None:
    for table in ("response_events", "response_requests"):
        connection.execute(f"DELETE FROM {table} WHERE response = ?", (number,))


def _chain(connection: RowConnection, tenant: str, number: int) -> list[bytes]:
    """Return the input and output of a response and of all responses before it, the oldest first."""
    chosen = """WITH RECURSIVE chain (number, before, input, output, back) AS (
            SELECT number, before, input, output, 0 FROM responses WHERE number = ? AND tenant = ?
            UNION ALL SELECT earlier.number, earlier.before, earlier.input, earlier.output, back + 1
            FROM chain JOIN responses AS earlier ON earlier.number = chain.before AND earlier.tenant = ?
        ) SELECT input, output FROM chain ORDER BY back DESC"""
    return [part for row in connection.execute(chosen, (number, tenant, tenant)).fetchall() for part in row]


def _total(connection: RowConnection) -> int:
    return int(connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM response_tenants").fetchone()[0])


def _victim(connection: RowConnection, first: int) -> int | None:
    """Return the oldest response of the tenant with the most bytes; rows from `first` on are excluded."""
    chosen = f"""SELECT MIN(number) FROM responses WHERE state = {ENDED} AND number < ? AND tenant = (
            SELECT tenant FROM response_tenants WHERE EXISTS (
                SELECT 1 FROM responses AS theirs WHERE theirs.tenant = response_tenants.tenant AND theirs.state = {ENDED} AND theirs.number < ?
            ) ORDER BY num_bytes DESC LIMIT 1
        )"""
    found: int | None = connection.execute(chosen, (first, first)).fetchone()[0]
    return found


def _response(tenant: str, fields: bytes, output: bytes) -> KeptResponse:
    return KeptResponse(tenant, {**orjson.loads(fields), "output": _items(output)})


def _fields(response: KeptResponse) -> bytes:
    return orjson.dumps({**response.fields, "output": None})


def _items(output: bytes) -> list[Any]:
    found: list[Any] = orjson.loads(b"[" + output + b"]")
    return found


def _packed(events: Sequence[bytes]) -> bytes | None:
    return zlib.compress(b"".join(events), DEFLATE) if events else None


def _split(packed: bytes) -> list[bytes]:
    told = zlib.decompress(packed)
    return EventDecoder(len(told) + 1).split(told)
