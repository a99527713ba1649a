"""Responses that are kept between requests, bounded in bytes and in time: what was asked and answered, and the events of one that is made in the
background. A long conversation is kept once, however many responses it has.

A response belongs to the tenant that asked for it; nobody else learns that there is one. Knows no HTTP.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import orjson

from wire.errors import ApiError

KEEP_S = 24 * 3600.0
MAX_BYTES = 64 << 20  # of all that is kept
ENTRY_BYTES = 500  # what an item or an event costs beside its bytes


class KeptResponse:
    """One response: of a background one, as far as it is made."""

    def __init__(self, tenant: str, fields: dict[str, Any], items: tuple[bytes, ...], num_before: int) -> None:
        """`fields`: the response itself, as clients see it. `items`: all of its input, of which `num_before` came from responses before it."""
        self.tenant = tenant
        self.fields = fields
        self.items = items
        self.num_before = num_before
        self.events: list[bytes] = []
        self.task: asyncio.Task[None] | None = None
        self.touched_at = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return str(self.fields["id"])

    @property
    def is_ended(self) -> bool:
        return self.fields["status"] not in ("queued", "in_progress")

    @property
    def num_bytes(self) -> int:
        """Return what it has beside its items, which it shares with the responses before it."""
        events = sum(map(len, self.events)) + ENTRY_BYTES * (len(self.events) + 4)
        return events + 8 * len(self.items) + 2 * len(orjson.dumps(self.fields))

    def output_items(self) -> tuple[bytes, ...]:
        return tuple(orjson.dumps(item) for item in self.fields["output"])

    def add_event(self, event: bytes) -> None:
        self.events.append(event)
        self.notify()

    def end_as(self, status: str, error: ApiError | None = None) -> None:
        """End it from outside, unless it has ended."""
        if not self.is_ended:
            told = None if error is None else {"code": error.word, "message": error.message}
            self.fields = {**self.fields, "status": status, "error": told}
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, place: int) -> tuple[list[bytes], bool]:
        """Return the events from the one of that number on, once there are any, and whether they are the last."""
        while len(self.events) <= place and not self.is_ended:
            await self._changed.wait()
        return self.events[place:], self.is_ended


class _TenantResponses:
    """One tenant's part of what is kept. An item that several responses have is one object, and counts once."""

    def __init__(self) -> None:
        # With their bytes; the longest untouched first.
        self.responses: OrderedDict[str, tuple[KeptResponse, int]] = OrderedDict()
        self.num_bytes = 0
        self._uses: dict[int, int] = {}  # of an item, by its object

    def add(self, response: KeptResponse) -> int:
        """Return how many bytes more there are now."""
        num_bytes = response.num_bytes
        self.responses[response.id] = (response, num_bytes)
        for item in response.items:
            uses = self._uses.get(id(item), 0)
            self._uses[id(item)] = uses + 1
            num_bytes += 0 if uses else len(item) + ENTRY_BYTES
        self.num_bytes += num_bytes
        return num_bytes

    def drop(self, response_id: str) -> int:
        """Return how many bytes fewer there are now."""
        response, num_bytes = self.responses.pop(response_id)
        for item in response.items:
            uses = self._uses.pop(id(item)) - 1
            if uses:
                self._uses[id(item)] = uses
            else:
                num_bytes += len(item) + ENTRY_BYTES
        self.num_bytes -= num_bytes
        return num_bytes

    @property
    def victim(self) -> KeptResponse | None:
        """Return the longest untouched, but for those that are being made."""
        return next((response for response, _ in self.responses.values() if response.is_ended), None)


class ResponseStore:
    """Bounded for all tenants together: the one that has most makes room."""

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._all: OrderedDict[str, KeptResponse] = OrderedDict()  # the longest untouched first
        self._tenants: dict[str, _TenantResponses] = {}  # by tenant
        self._outputs: dict[tuple[str, str], bytes] = {}  # items of answers, by tenant and id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def keep(self, response: KeptResponse) -> None:
        """Keep a response, or what it is by now."""
        self._drop(response.id)
        self._all[response.id] = response
        self.num_bytes += self._tenants.setdefault(response.tenant, _TenantResponses()).add(response)
        response.touched_at = self._clock()
        for item in response.fields["output"]:
            self._outputs[response.tenant, str(item["id"])] = orjson.dumps(item)
        self._forget()

    def find(self, response_id: str, tenant: str, param: str | None = None) -> KeptResponse:
        """Return a response. Raises ApiError: somebody else's is none."""
        self._forget()
        kept = self._all.get(response_id)
        if kept is None or kept.tenant != tenant:
            sentence = f"there is no response {response_id[:100]!r} here: it was never kept, was never yours, or its time is over"
            raise ApiError("not_found", sentence, param=param)
        self._all.move_to_end(response_id)
        self._tenants[tenant].responses.move_to_end(response_id)
        kept.touched_at = self._clock()
        return kept

    def item(self, item_id: str, tenant: str) -> bytes | None:
        """Return an item of some answer that is kept."""
        return self._outputs.get((tenant, item_id))

    def has(self, response: KeptResponse) -> bool:
        """Tell whether a response has not been deleted."""
        return response.id in self._all

    def delete(self, response: KeptResponse) -> None:
        if response.task is not None:
            response.task.cancel()
        self._drop(response.id)

    async def close(self) -> None:
        """End those that are being made."""
        tasks = [kept.task for kept in self._all.values() if kept.task is not None and not kept.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop(self, response_id: str) -> None:
        kept = self._all.pop(response_id, None)
        if kept is None:
            return
        tenant = self._tenants[kept.tenant]
        self.num_bytes -= tenant.drop(response_id)
        if not tenant.responses:
            del self._tenants[kept.tenant]
        for item in kept.fields["output"]:
            self._outputs.pop((kept.tenant, str(item["id"])), None)

    def _forget(self) -> None:
        now, over = self._clock(), list[str]()
        for response_id, kept in self._all.items():
            if now - kept.touched_at <= self._keep_s:
                break
            if kept.is_ended:
                over.append(response_id)
        for response_id in over:
            self._drop(response_id)
        while self.num_bytes > self._max_bytes and (victim := self._victim()) is not None:
            self._drop(victim.id)

    def _victim(self) -> KeptResponse | None:
        tenants = sorted(self._tenants.values(), key=lambda tenant: tenant.num_bytes, reverse=True)
        return next((victim for tenant in tenants if (victim := tenant.victim) is not None), None)
