"""The space of the host tier: slots of several sizes, in a file per size, within one limit of bytes.

Pages are counted whole. Not thread-safe. host_tier.py decides which slots to evict.
"""

import logging
from pathlib import Path

from pilotlight.engine.device.slot_memory import SlotMemory
from pilotlight.engine.kv.tier_protocol import TierError
from pilotlight.engine.kv.tiers.slot_file import PAGE, FoundSlot, SlotFile, slot_file_path

log = logging.getLogger(__name__)


class SlotSpace:
    def __init__(self, directory: Path, limit_bytes: int, memory: SlotMemory) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # whole pages of all slots that are filled or being filled
        self._directory = directory
        self._memory = memory
        self._files: dict[int, SlotFile] = {}  # files by the size of their slots
        self._free: dict[int, list[int]] = {}  # numbers of empty slots, by the size of the slots

    @property
    def num_corrupt(self) -> int:
        """The number of damaged headers that were found."""
        return sum(file.num_corrupt for file in self._files.values())

    def find(self) -> list[tuple[FoundSlot, SlotFile]]:
        """Take the slots that an earlier process has filled, and return them. Raises OSError."""
        found = []
        for path in sorted(self._directory.glob("slots-*.kv")):
            size = path.stem.removeprefix("slots-")
            if not size.isdecimal() or not self._num_slots(int(size)):
                path.unlink()
                continue
            file = self.file_of(int(size))
            slots = file.find()
            used = {slot.number for slot in slots}
            self._free[file.slot_bytes] = [i for i in reversed(range(file.num_slots)) if i not in used]
            self.used_bytes += len(slots) * file.stride
            found += [(slot, file) for slot in slots]
        return found

    def file_of(self, block_bytes: int) -> SlotFile:
        """Return the file of slots for this size. Raises TierError if not even one slot fits, and OSError."""
        if block_bytes not in self._files:
            num_slots = self._num_slots(block_bytes)
            if num_slots == 0:
                raise TierError(
                    f"a KV block of {block_bytes} bytes does not fit the host KV tier of {self.limit_bytes} bytes; raise kv_host_gib"
                )
            path = slot_file_path(self._directory, block_bytes)
            self._files[block_bytes] = SlotFile(path, block_bytes, num_slots, self._memory)
            self._free[block_bytes] = list(reversed(range(num_slots)))
        return self._files[block_bytes]

    def has_room(self, file: SlotFile) -> bool:
        return bool(self._free[file.slot_bytes]) and self.used_bytes + file.stride <= self.limit_bytes

    def take(self, file: SlotFile) -> int | None:
        """Take an empty slot, of which there must be one, and allocate its pages.

        If the file system is full, lower the limit and return None.
        """
        free = self._free[file.slot_bytes]
        try:
            file.provide(free[-1])
        except OSError as error:
            self._shrink(max(self.used_bytes, file.stride), error)
            return None
        self.used_bytes += file.stride
        return free.pop()

    def release(self, file: SlotFile, index: int, *, keeps_pages: bool = False) -> None:
        """Empty a slot. `keeps_pages`: keep its memory, because a slot of this file is filled next."""
        if keeps_pages:
            file.clear(index)
        else:
            file.give_back(index)
        self.used_bytes -= file.stride
        self._free[file.slot_bytes].append(index)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _num_slots(self, block_bytes: int) -> int:
        return self.limit_bytes // (-(-block_bytes // PAGE) * PAGE) if block_bytes else 0

    def _shrink(self, limit_bytes: int, error: OSError) -> None:
        """Lower the limit and log it, because a container's /dev/shm often has only 64 MiB."""
        if limit_bytes < self.limit_bytes:
            log.warning(
                "%s: %s; the host KV tier is limited to %.1f MiB instead of %.1f",
                self._directory, error.strerror, limit_bytes / 2**20, self.limit_bytes / 2**20,
            )  # fmt: skip
            self.limit_bytes = limit_bytes
