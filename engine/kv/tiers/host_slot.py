"""The state of one block in the host tier."""

from dataclasses import dataclass

from pilotlight.engine.kv.tiers.slot_file import SlotFile


@dataclass(eq=False, slots=True)
class HostSlot:
    """The place of a block in the host tier. Its bytes do not change while it is pinned."""

    file: SlotFile
    index: int
    block_hash: bytes
    checksum: int = 0
    pins: int = 0
    is_written: bool = False  # True once the block is complete and can be found
    is_verified: bool = False  # written by this process, or verified by its checksum
    is_protected: bool = False  # whether unpinning puts this pinned slot into the protected segment
    is_forgotten: bool = False  # whether this pinned slot is freed when it is unpinned

    @property
    def memory(self) -> memoryview:
        return self.file.body(self.index)
