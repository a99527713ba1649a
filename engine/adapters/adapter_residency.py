"""A model's adapters in slots and host memory, and the sequences that wait for adapters.

A sequence holds its adapter's slot until it ends, so that all its tokens use the same weights. If its adapter is in no slot, the sequence waits
(engine/scheduling/awaited.py) until a thread has read the adapter and a slot is free. Sequences are served in order of arrival; the least recently
used of the free slots is taken. If all slots are held, the slot with the fewest sequences accepts no further sequence, so that a waiting adapter gets
it. This module is independent of tensors.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from pilotlight.engine.adapters.peft import AdapterError
from pilotlight.engine.api.protocol import AdapterSource
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.plan import Chunk

READ_S = 30.0  # a disk that takes longer for an adapter counts as stuck


class AdapterStore(Protocol):
    """Reads adapters and puts them into slots."""

    num_slots: int
    host_bytes: int  # limit for adapters kept in host memory; awaited adapters may exceed it

    def announce(self, source: AdapterSource) -> None:
        """Announce that an adapter will be placed soon, before it is read."""

    def read(self, source: AdapterSource) -> Any:
        """Read an adapter, from any thread; return the content for `place`. Raises AdapterError."""

    def num_bytes(self, content: Any) -> int: ...

    def place(self, slot: int, source: AdapterSource, content: Any) -> None:
        """Put an adapter into a slot. Raises AdapterError."""


class _Resident:
    """An adapter in its slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.users = 0
        self.is_leaving = False  # accepts no more sequences, because those with other adapters wait for a slot


class AdapterResidency:
    def __init__(self, model: str, store: AdapterStore | None) -> None:
        """`store`: None if the model supports no adapters; sequences that request one are then refused."""
        self._model = model
        self._store = store
        self._resident: OrderedDict[str, _Resident] = OrderedDict()  # by digest, the most recently used last
        self._free = [] if store is None else list(reversed(range(store.num_slots)))
        self._read: OrderedDict[str, Future[Any]] = OrderedDict()  # by digest, the newest last
        self._waiting: list[AwaitedAdapter] = []
        self._threads = ThreadPoolExecutor(2, "adapters")
        self.num_loads = 0  # number of loads into slots

    def awaited(self, sequence: Sequence, clock: Callable[[], float]) -> "AwaitedAdapter | None":
        """Give the sequence its adapter's slot and return None; return an AwaitedAdapter if it has to wait.

        Also returns None if the sequence needs no adapter, or the model supports none. `clock`: the scheduler's clock.
        """
        source = sequence.adapter
        if source is None or sequence.adapter_slot >= 0 or self._store is None:
            return None
        resident = self._resident.get(source.digest)
        if resident is not None and not resident.is_leaving:
            self._hold(sequence, resident)
            return None
        awaited = AwaitedAdapter(sequence, source, self, clock() + READ_S)
        self._waiting.append(awaited)
        return awaited

    def computable(self, chunks: list[Chunk], sequences: OpenSequences) -> list[Chunk]:
        """End sequences whose adapter failed or is not supported; return the other sequences' chunks."""
        lacking = [chunk.sequence for chunk in chunks if chunk.sequence.adapter and chunk.sequence.adapter_slot < 0]
        for sequence in lacking:
            if self._store is None:
                sequences.fail(
                    sequence, "invalid_request", f"{self._model} supports no adapters; request {self._model} itself"
                )
            else:
                sequences.fail(sequence, "model_load_failed", sequence.why_unadapted)
        return [chunk for chunk in chunks if chunk.sequence not in lacking] if lacking else chunks

    def release(self, sequence: Sequence) -> None:
        """Release the slot of a sequence that has ended here."""
        if sequence.adapter is not None and sequence.adapter_slot >= 0:
            sequence.adapter_slot = -1
            self._resident[sequence.adapter.digest].users -= 1
            self._resident.move_to_end(sequence.adapter.digest)

    def release_all(self) -> None:
        """Release all slots: all sequences have ended."""
        for resident in self._resident.values():
            resident.users = 0
        self._waiting.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def reading(self, source: AdapterSource) -> "Future[Any]":
        """Return the future content of an adapter; start to read it, unless it is being read or kept already."""
        assert self._store is not None
        self._store.announce(source)
        known = self._read.get(source.digest)
        if known is None or _has_failed(known):  # try again: the files may be repaired by now
            known = self._read[source.digest] = self._threads.submit(self._store.read, source)
        self._read.move_to_end(source.digest)
        return known

    def can_take(self, awaited: "AwaitedAdapter") -> bool:
        """True if the adapter is in a usable slot, or has been read and a slot is available for it.

        Also True if the read failed: `take` then raises its error. If no slot is available or being freed, a slot stops accepting sequences.
        """
        resident = self._resident.get(awaited.source.digest)
        if resident is not None and (not resident.is_leaving or not self._is_wanted_by_others(awaited)):
            return True
        if not awaited.is_read:
            return False
        if _has_failed(awaited.content) or self._free or any(each.users == 0 for each in self._resident.values()):
            return True
        if not any(each.is_leaving for each in self._resident.values()):
            min(self._resident.values(), key=lambda each: each.users).is_leaving = True
        return False

    def take(self, awaited: "AwaitedAdapter") -> None:
        """End a sequence's wait: give it a slot. Raises AdapterError, or any error of the read."""
        self._waiting.remove(awaited)
        resident = self._resident.get(awaited.source.digest) or self._load(awaited.source, awaited.content)
        resident.is_leaving = False
        self._hold(awaited.sequence, resident)

    def cancel(self, awaited: "AwaitedAdapter") -> None:
        """Remove a waiting sequence; the content is still read, and kept for the adapter's next sequence."""
        if awaited in self._waiting:
            self._waiting.remove(awaited)

    def _hold(self, sequence: Sequence, resident: _Resident) -> None:
        assert sequence.adapter is not None
        sequence.adapter_slot = resident.slot
        resident.users += 1
        self._resident.move_to_end(sequence.adapter.digest)

    def _load(self, source: AdapterSource, read: "Future[Any]") -> _Resident:
        """Put an adapter that has been read into a free or unused slot."""
        assert self._store is not None
        try:
            content = read.result(timeout=0)
        except BaseException:
            if self._read.get(source.digest) is read:
                del self._read[source.digest]
            raise
        resident = _Resident(self._free.pop() if self._free else self._evict())
        try:
            self._store.place(resident.slot, source, content)
        except BaseException:
            self._free.append(resident.slot)
            raise
        self._resident[source.digest] = resident
        self.num_loads += 1
        self._trim(self._store)
        return resident

    def _is_wanted_by_others(self, awaited: "AwaitedAdapter") -> bool:
        """True if a sequence waits for a slot with another adapter that has been read."""
        digest = awaited.source.digest
        return any(
            other.is_read and other.source.digest != digest and other.source.digest not in self._resident
            for other in self._waiting
        )

    def _evict(self) -> int:
        digest = next(digest for digest, resident in self._resident.items() if resident.users == 0)
        return self._resident.pop(digest).slot

    def _trim(self, store: AdapterStore) -> None:
        """Drop the least recently requested content from host memory, except awaited adapters."""
        wanted = {awaited.source.digest for awaited in self._waiting}
        done = {digest: read for digest, read in self._read.items() if read.done() and read.exception() is None}
        total = sum(store.num_bytes(read.result()) for read in done.values())
        for digest, read in done.items():
            if total <= store.host_bytes:
                break
            if digest not in wanted:
                total -= store.num_bytes(read.result())
                del self._read[digest]


def _has_failed(read: "Future[Any]") -> bool:
    return read.done() and read.exception() is not None


class AwaitedAdapter:
    """An adapter for which a sequence waits while other sequences run."""

    is_admitted = False

    def __init__(self, sequence: Sequence, source: AdapterSource, residency: AdapterResidency, read_by: float) -> None:
        self.sequence = sequence
        self.source = source
        self.num_tokens = len(sequence.token_ids)
        self._residency = residency
        self._read_by = read_by
        self.content = residency.reading(source)
        self._is_cancelled = False

    @property
    def is_read(self) -> bool:
        return self.content.done()

    @property
    def deadline(self) -> float:
        """Return the time limit for the read, by the scheduler's clock; infinity after the read.

        The wait for a slot needs no limit: a slot is freed when a sequence ends.
        """
        return math.inf if self.is_read else self._read_by

    @property
    def is_done(self) -> bool:
        return self._residency.can_take(self)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._residency.cancel(self)

    def take(self) -> None:
        """Give the sequence its slot, or the reason why there is none."""
        name = self.source.name
        if self._is_cancelled:
            self.sequence.why_unadapted = f"adapter {name!r} could not be read within {READ_S:g} s"
            return
        try:
            self._residency.take(self)
        except AdapterError as error:
            self.sequence.why_unadapted = f"adapter {name!r} cannot be used: {error}"
        except Exception as error:  # any error of a disk or a device for one adapter ends only its sequences
            self.sequence.why_unadapted = f"adapter {name!r} cannot be used: {type(error).__name__}: {error}"
