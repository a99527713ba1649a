"""Storage of responses: they survive a restart, and belong to their tenants for a limited time.

Responses in progress are in memory. A response is written before its last event is sent, together with other responses that end at the same time;
earlier events do not wait. If the database is full or does not answer, responses that end meanwhile are lost, and their clients get `store` as false;
background responses are written later. Each process reports the progress of its background responses, whose readers get what is stored, and that it
is alive. Responses of a dead process are continued by another one, or fail; a response that was ended or deleted through another process ends here.
This module is independent of HTTP and of the kind of database.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from pilotlight.response_store import response_rows as rows
from pilotlight.response_store.kept_responses import (
    LOST,
    KeptResponse,
    PreviousResponse,
    cancelled,
    failed_event,
    is_failed_event,
    joined,
)
from pilotlight.response_store.response_database import ResponseDatabase, ResponsesFault, Result, RetentionPolicy, Work
from pilotlight.response_store.response_rows import LostResponse, Name, Progress, ResponseRow
from pilotlight.support import background
from pilotlight.wire.errors import ApiError

log = logging.getLogger("pilotlight.responses")


class StoreTimings(NamedTuple):
    """The store's time limits, in seconds."""

    answer_s: float = 5.0  # longest wait for the database
    # longest wait after the database has failed to answer: short, so that responses are not delayed at their end
    answer_after_fault_s: float = 0.2
    retry_s: float = 5.0
    progress_s: float = 0.1  # interval between reports of the progress of responses
    # interval between reports to processes with the same database that this one is alive, while it computes no response
    presence_s: float = rows.EXPIRES_S / 4
    follow_s: float = 0.25  # interval between reads of a response that another process computes
    # if a background response is refused within this time, its client gets the refusal as an error
    refused_within_s: float = 1.0


class ResponseStore:
    """Storage of responses. Await `sweep()` from time to time, and `close()` at the end."""

    def __init__(
        self,
        keeping: RetentionPolicy,
        database: ResponseDatabase,
        timings: StoreTimings | None = None,
        lost: asyncio.Queue[LostResponse] | None = None,
    ) -> None:
        """Responses of ended processes are put into `lost`, whose reader continues them."""
        self.timings = timings or StoreTimings()
        self.fault: str | None = None  # why the latest attempt to read or write the database failed
        self._is_unwritable = False
        self._keeping = keeping
        self.database = database
        self.maker = os.urandom(8).hex()  # name of this process in the database
        # background responses of this process whose end is not stored yet
        self._made: dict[Name, KeptResponse] = {}
        self._unwritten: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self._confirming: asyncio.Task[None] | None = None
        # responses that were reported to clients as not stored, although the database may have stored them
        self._refused: set[Name] = set()
        self._taking_back: asyncio.Task[None] | None = None
        self._has_started = asyncio.Event()
        self._lost: asyncio.Queue[LostResponse] = asyncio.Queue() if lost is None else lost
        self._is_leaving = False  # responses are left to other processes, because this one ends
        self._is_closed = False

    async def keep(self, response: KeptResponse, row: ResponseRow | None = None) -> bool:
        """Write `row` or, if it is None, the response's current state. Return False if the database failed.
        A response that another process has ended is left as it is."""
        row = row or ResponseRow.of(response)
        write = _Write(response, row, asyncio.get_running_loop().create_future())
        self._unwritten.append(write)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="responses")
        return await asyncio.shield(write.is_kept)

    async def begin(self, response: KeptResponse) -> None:
        """Store a response that will be computed. Raises ApiError if it could not be stored."""
        name = (response.tenant, response.id)
        self._made[name] = response
        if not await self.keep(response):
            del self._made[name]
            raise self._failing()
        response.is_started = self.database.is_shared
        self._has_started.set()

    async def end(self, response: KeptResponse, fields: dict[str, Any]) -> None:
        """Store the end of a background response if possible, then publish its last events."""
        row = ResponseRow.of(KeptResponse(response.tenant, fields, response.own, response.before))
        row = row._replace(events=tuple(response.all_events), is_started=response.is_started)
        response.is_settled = await self.keep(response, row)
        if not (response.is_ended or response.is_left):
            response.fields = fields
            response.publish(len(response.untold))

    async def settle(self, response: KeptResponse) -> None:
        """Write an ended response; retry until that succeeds. Readers get it from memory meanwhile.
        Release one that this process leaves before its end."""
        if response.is_left and not response.is_settled:
            self._is_leaving = response.is_settled = True
            work = partial(rows.release, maker=self.maker, tenant=response.tenant, name=response.id)
            with suppress(ApiError):  # the error was logged
                await self._do(work, is_write=True)
        while not (response.is_deleted or response.is_settled or await self.keep(response)) and not self._is_closed:
            await asyncio.sleep(self.timings.retry_s)
        self._made.pop((response.tenant, response.id), None)

    async def find(self, name: str, tenant: str, param: str | None = None) -> KeptResponse:
        """Return a response. Raises ApiError (404) if it is unknown or belongs to another tenant."""
        if (made := self._made.get((tenant, name))) is not None:
            return made
        if (tenant, name) in self._refused:
            raise _unknown(name, param)
        found = await self._do(partial(rows.find, tenant=tenant, name=name, keep_s=self._keeping.keep_s))
        if found is None:
            raise _unknown(name, param)
        return found.response

    async def conversation(self, name: str, tenant: str, param: str) -> PreviousResponse:
        """Return the conversation up to a response's end. Raises ApiError."""
        found: PreviousResponse | None
        if (made := self._made.get((tenant, name))) is not None:
            found = PreviousResponse(0, name, joined(made.input, made.output), made.is_ended)
        elif (tenant, name) in self._refused:
            found = None
        else:
            found = await self._do(partial(rows.conversation, tenant=tenant, name=name, keep_s=self._keeping.keep_s))
        if found is None:
            raise _unknown(name, param)
        if not found.is_ended:
            raise ApiError("conflict", f"the response {name[:100]!r} has not ended yet", param=param)
        return found

    async def input_items(self, response: KeptResponse) -> bytes:
        """Return a response's input and the conversation before it, as JSON objects. Raises ApiError."""
        if (response.tenant, response.id) in self._made:
            return response.input
        return await self._do(partial(rows.input_items, tenant=response.tenant, name=response.id))

    async def after(self, response: KeptResponse, place: int) -> tuple[list[bytes], bool]:
        """Return events of a response that another process computes, and whether they include the last.

        The events begin at number `place`; this waits until there are any. If the other process has died, the last event is a failure. Raises
        ApiError.
        """
        work = partial(rows.events, tenant=response.tenant, name=response.id, place=place)
        while (told := await self._do(work)) is not None:
            if told.response.fields["status"] == "failed" and not (told.events and is_failed_event(told.events[-1])):
                return [*told.events, failed_event(told.response.fields, max(place, told.till))], True
            if told.events or told.response.is_ended:
                return told.response.page(told.events)
            await asyncio.sleep(self.timings.follow_s)
        raise cancelled()

    async def items(self, names: Sequence[str], tenant: str) -> dict[str, bytes]:
        """Return the stored output items among `names`, by id. Raises ApiError."""
        if not names:
            return {}
        return await self._do(partial(rows.items, tenant=tenant, names=names, keep_s=self._keeping.keep_s))

    async def cancel(self, response: KeptResponse) -> KeptResponse:
        """Cancel a response that another process computes, and return it. Raises ApiError.
        The other process stops computing when it next reports."""
        found = await self._do(partial(rows.cancel, tenant=response.tenant, name=response.id), is_write=True)
        if found is None:
            raise _unknown(response.id, None)
        self._end_claimed((response.tenant, response.id), found)
        return found

    async def delete(self, response: KeptResponse) -> None:
        """Delete a response; cancel it first if it is in progress. Raises ApiError."""
        response.is_deleted = True
        if response.task is not None:
            response.task.cancel()
            await asyncio.wait({response.task})
        self._made.pop((response.tenant, response.id), None)
        await self._do(partial(rows.delete, tenant=response.tenant, name=response.id), is_write=True)
        self._end_claimed((response.tenant, response.id), None)

    def _end_claimed(self, name: Name, found: KeptResponse | None) -> None:
        """End a response that this process has claimed from a dead one, but perhaps not continued yet.
        `found` is its new state; None if it was deleted."""
        if (made := self._made.get(name)) is not None:
            _end_elsewhere(made, found)

    async def sweep(self) -> None:
        """Delete expired responses. Raises ApiError."""
        while await self._do(partial(rows.sweep, keep_s=self._keeping.keep_s), is_write=True):
            continue
        await self.database.tidy(self._keeping.keep_s)

    async def close(self) -> None:
        """Leave the responses in progress to another process or end them, and close the database."""
        self._is_closed = True
        if self._confirming is not None:
            await background.stop(self._confirming)
        tasks = [made.task for made in self._made.values() if made.task is not None]
        for made in tuple(self._made.values()):
            if made.request is None:
                made.end_as("failed", LOST)
            elif not made.is_ended:
                made.leave()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writing is not None:
            await self._writing
        if self._taking_back is not None:
            await background.stop(self._taking_back)
        await self.database.close()

    async def _write(self) -> None:
        try:
            while self._unwritten:
                batch, self._unwritten = self._unwritten, []
                is_kept = False
                try:
                    is_kept = await self._add([write for write in batch if not write.response.is_deleted])
                except Exception:
                    log.exception("responses cannot be stored")
                finally:  # `keep` waits for each write
                    for write in batch:
                        write.is_kept.set_result(is_kept)
        finally:
            self._writing = None

    async def _add(self, batch: "list[_Write]") -> bool:
        """Write all responses or none; those that other processes have ended are left as they are.
        Return False if the database failed."""
        found = [write.row for write in batch]
        add = partial(rows.add, rows=found, maker=self.maker, max_bytes=self._keeping.max_bytes)
        try:
            taken = await self._do(add, is_write=True)
        except ApiError:  # the error was logged
            # The database may still commit once it works again, so refused responses are deleted later. Background responses are written again.
            new = {(write.row.tenant, write.row.id) for write in batch if not write.response.replaces_another}
            self._refused |= new - self._made.keys()
            if self._refused and (self._taking_back is None or self._taking_back.done()):
                self._taking_back = background.start(self._take_back, "deleting responses that were not to be kept")
            return False
        for write in batch:
            if (name := (write.row.tenant, write.row.id)) in taken:
                _end_elsewhere(write.response, taken[name])
        return True

    async def _take_back(self) -> None:
        """Delete responses that may have been stored although clients got `store` as false or an error."""
        while self._refused:
            await asyncio.sleep(self.timings.retry_s)
            with suppress(ResponsesFault):  # the next request will find the same fault
                while refused := frozenset(islice(self._refused, rows.SWEPT)):  # after a long outage there may be many
                    delete = partial(rows.delete_all, names=refused)
                    await self.database.run(delete, self.timings.answer_s, is_write=True)
                    self._refused -= refused

    async def _confirm_often(self) -> None:
        """Report periodically the progress of this process's responses and, to others, that it is alive."""
        while True:
            self._has_started.clear()
            with suppress(ApiError):  # the error was logged
                await self._confirm()
            await asyncio.sleep(self.timings.progress_s)
            is_watched = self.database.is_shared or self.fault is not None
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if self._made else self.timings.presence_s if is_watched else None):
                    await self._has_started.wait()

    async def _confirm(self) -> None:
        started = [made for made in self._made.values() if not (made.is_settled or made.is_left)]
        progress = [Progress.of(made) for made in started]
        shown = [made.fields for made in started]
        is_alone, may_claim = not self.database.is_shared, not self._is_leaving
        work = partial(rows.confirm, maker=self.maker, told=progress, is_alone=is_alone, may_claim=may_claim)
        confirmed = await self._do(work, is_write=True, within_s=self.timings.answer_s)
        for made, fields, one in zip(started, shown, progress, strict=True):
            if one.name not in confirmed.taken:
                made.reported(len(one.events), fields)
            elif made.is_started:
                _end_elsewhere(made, confirmed.taken[one.name])
        for lost in confirmed.lost:
            lost.response.is_started = self.database.is_shared
            self._made[lost.response.tenant, lost.response.id] = lost.response
            self._lost.put_nowait(lost)
        # The start of a response may have been stored although the database did not answer and the response was refused.
        unknown = confirmed.made - self._made.keys()
        if unknown and not self._is_leaving:
            await self._do(partial(rows.drop, maker=self.maker, names=unknown), is_write=True)

    async def _do(self, work: Work[Result], *, is_write: bool = False, within_s: float | None = None) -> Result:
        """Run work in the database. Raises ApiError."""
        if not self._keeping.is_on:
            raise ApiError("not_found", "responses are not stored here")
        if self._confirming is None and not self._is_closed:
            self._confirming = background.start(self._confirm_often, "publishing new responses")
        if within_s is None:
            within_s = self.timings.answer_s if self.fault is None else self.timings.answer_after_fault_s
        try:
            result = await self.database.run(work, within_s, is_write=is_write)
        except ResponsesFault as error:
            if self.fault is None:
                log.error("responses cannot be read or written in %s: %s", self.database.name, error)
            self.fault = error.told
            self._is_unwritable = self._is_unwritable or is_write
            raise self._failing() from None
        if self.fault is not None and (is_write or not self._is_unwritable):  # a full database can still be read
            log.warning("responses can be read and written again in %s", self.database.name)
            self.fault, self._is_unwritable = None, False
        return result

    def _failing(self) -> ApiError:
        sentence = f"stored responses cannot be read or written right now: {self.fault}"
        return ApiError("overloaded", sentence, retry_after_s=5)


class _Write(NamedTuple):
    response: KeptResponse
    row: ResponseRow
    is_kept: asyncio.Future[bool]


def _end_elsewhere(response: KeptResponse, found: KeptResponse | None) -> None:
    """End a response that another process has changed.
    `found` is its new state; None if it was deleted."""
    was_made = not response.is_ended
    if found is None:
        response.is_deleted = True
        response.end_as("cancelled")
    else:
        response.is_settled = True
        if found.is_ended:
            response.end_with(found.fields)
        else:
            response.leave()
    if was_made and response.task is not None:
        response.task.cancel()


def _unknown(name: str, param: str | None) -> ApiError:
    sentence = f"there is no response {name[:100]!r}: it was not stored, has expired, or belongs to another account"
    return ApiError("not_found", sentence, param=param)
