"""A model's adapters in one process: read from a disk, and put into the slots of its runner.

The only or first rank chooses the slot of each adapter, and sends orders to the others: all place their parts between the same two steps.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pilotlight.engine.adapters.bank import AdapterBank
from pilotlight.engine.adapters.content import SlotContent
from pilotlight.engine.api.protocol import AdapterSource
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.parallel.orders import PlaceAdapter, ReadAdapter

_MOST_READ = 16  # limit of adapters that a rank keeps in memory until they are placed


class RunnerAdapters:
    def __init__(
        self, runner: ModelRunner, bank: AdapterBank, host_bytes: int, model: str, send: Callable[[object], None]
    ) -> None:
        """`bank`: the adapter bank of `runner`; `send`: sends orders about `model` to other ranks."""
        self.num_slots = bank.num_slots
        self.host_bytes = host_bytes
        self._runner = runner
        self._bank = bank
        self._model = model
        self._send = send

    def announce(self, source: AdapterSource) -> None:
        self._send(ReadAdapter(self._model, source))

    def read(self, source: AdapterSource) -> SlotContent:
        return self._bank.read(source)

    def num_bytes(self, content: SlotContent) -> int:
        return content.values.nbytes

    def place(self, slot: int, source: AdapterSource, content: SlotContent) -> None:
        self._send(PlaceAdapter(self._model, slot, source))
        self._runner.place_adapter(slot, content)


class FollowedAdapters:
    """The adapters of a rank that is not the first, read when they are announced."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._read: OrderedDict[str, Future[SlotContent]] = OrderedDict()  # by digest, the newest last
        self._threads = ThreadPoolExecutor(1, "adapters")

    def read(self, source: AdapterSource) -> "Future[SlotContent]":
        """Start to read an adapter, unless it has been read."""
        assert self._runner.adapters is not None
        found = self._read.pop(source.digest, None) or self._threads.submit(self._runner.adapters.read, source)
        self._read[source.digest] = found
        if len(self._read) > _MOST_READ:
            self._read.popitem(last=False)
        return found

    def place(self, slot: int, source: AdapterSource) -> None:
        """Put an adapter into a slot. Call it between the same steps as on the first rank."""
        self._runner.place_adapter(slot, self.read(source).result())
        del self._read[source.digest]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
