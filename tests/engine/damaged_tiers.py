"""Damages to the tiers of the KV cache: each is done to the files, values or links of a tier that an engine has filled, and then another engine
answers with that tier.
"""

import logging
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, cast

import pytest

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.peers import peer_thread
from pilotlight.engine.kv.peers.messages import PeerError, TransportLostError
from pilotlight.engine.kv.peers.transports import INLINE, InlineTransport, RemoteBlock, SharedMemoryTransport
from pilotlight.engine.kv.shared_tiers import SharedTiers, open_tiers
from pilotlight.engine.kv.store import store_tier
from pilotlight.engine.kv.store.store_tier import StoreTier
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.kv.tiers import disk_tier, host_tier, slot_file
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from tests.engine.driver import Heard, drain, load_engine, submit
from tests.engine.kv.fake_store import FakeStore
from tests.engine.test_hand_over import BLOCK_SIZE, Pair
from tests.waiting import until

FILE_HEADER = struct.Struct("<8sIQQ")
SLOT_HEADER_BYTES, RECORD_HEADER_BYTES = 64, 64
Prompts = Sequence[list[int]]
# How often a tier counts a damage: in all blocks; in each block, or in the first one of each chain, because a chain is read up to a damaged block;
# once for a file, or for a run of bytes without a good header; or never, because it is the state after an ordinary end or update.
Counted = Literal["all", "each", "once", "none"]


class Damaged(NamedTuple):
    """The answers of an engine with a damaged tier, and the damages that it found."""

    answers: list[list[int]]
    num_cached: list[int | None]  # tokens that came from the tier
    num_corrupt: int
    num_warnings: int
    num_blocks: int = 0  # blocks that were damaged


def answers_of(engine: Engine, prompts: Prompts) -> list[Heard]:
    heard = drain(engine, [submit(str(i), prompt, max_tokens=16) for i, prompt in enumerate(prompts)])
    return [heard[str(i)] for i in range(len(prompts))]


def undamaged(model: Path, prompts: Prompts) -> list[list[int]]:
    """Return the answers of an engine without tiers."""
    engine = load_engine(model)
    answers = answers_of(engine, prompts)
    engine.close()
    return [answer.token_ids for answer in answers]


# The host tier: a file of slots, which begins with their headers.


class Slots:
    def __init__(self, directory: Path) -> None:
        (self.path,) = (directory / "host").glob("slots-*.kv")
        self.bytes = bytearray(self.path.read_bytes())
        _, _, self.slot_bytes, num_slots = FILE_HEADER.unpack_from(self.bytes)
        headers = num_slots * SLOT_HEADER_BYTES
        self.stride = whole_pages(self.slot_bytes)
        self.first_body = slot_file.PAGE + whole_pages(headers)
        self.used = [i for i in range(num_slots) if any(self.bytes[self.header(i)][:4])]
        assert len(self.used) >= 8

    def header(self, i: int) -> slice:
        start = slot_file.PAGE + i * SLOT_HEADER_BYTES
        return slice(start, start + SLOT_HEADER_BYTES)

    def body(self, i: int) -> slice:
        start = self.first_body + i * self.stride
        return slice(start, start + self.slot_bytes)


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // slot_file.PAGE) * slot_file.PAGE


def change_slots(change: Callable[[Slots, Random], None]) -> Callable[[Path, Random], None]:
    def apply(directory: Path, draw: Random) -> None:
        slots = Slots(directory)
        change(slots, draw)
        slots.path.write_bytes(slots.bytes)

    return apply


def flip(content: bytearray, at: int) -> None:
    content[at] ^= 0x80


def flip_bodies(slots: Slots, draw: Random) -> None:
    for i in slots.used:
        flip(slots.bytes, draw.randrange(slots.body(i).start, slots.body(i).stop))


def swap_bodies(slots: Slots, _: Random) -> None:
    exchange(slots.bytes, [slots.body(i) for i in slots.used])


def swap_headers(slots: Slots, _: Random) -> None:
    exchange(slots.bytes, [slots.header(i) for i in slots.used])


def exchange(content: bytearray, places: list[slice]) -> None:
    """Write to each place the bytes of the next one."""
    found = [bytes(content[place]) for place in places]
    for place, other in zip(places, found[1:] + found[:1], strict=True):
        content[place] = other


def flip_headers(slots: Slots, draw: Random) -> None:
    for i in slots.used:
        flip(slots.bytes, slots.header(i).start + draw.randrange(8 + 32 + 4))  # in the mark, checksums or name


def tear_slots(slots: Slots, _: Random) -> None:
    del slots.bytes[slots.body(slots.used[-1]).start + 100 :]


def zero_bodies(slots: Slots, _: Random) -> None:
    for i in slots.used:
        slots.bytes[slots.body(i)] = bytes(slots.slot_bytes)


def change_slot_size(slots: Slots, _: Random) -> None:
    FILE_HEADER.pack_into(slots.bytes, 0, b"PLkvslot", 1, slots.slot_bytes + 16, len(slots.used))


def change_slot_version(slots: Slots, _: Random) -> None:
    struct.pack_into("<I", slots.bytes, 8, 2)


def kill_between_body_and_header(slots: Slots, _: Random) -> None:
    for i in slots.used:
        struct.pack_into("<I", slots.bytes, slots.header(i).start, 0)
        slots.bytes[slots.body(i)] = bytes(reversed(slots.bytes[slots.body(i)]))


# The disk tier: files that are segments of records.


class Records:
    def __init__(self, directory: Path) -> None:
        (self.path,) = (directory / "disk").glob("segment-*.kv")
        self.bytes = bytearray(self.path.read_bytes())
        self.block_bytes = int.from_bytes(self.bytes[40:48], "little")
        self.stride = RECORD_HEADER_BYTES + self.block_bytes
        self.starts = range(0, len(self.bytes), self.stride)
        assert len(self.starts) >= 8

    def body(self, start: int) -> slice:
        return slice(start + RECORD_HEADER_BYTES, start + self.stride)


def change_records(change: Callable[[Records, Random], None]) -> Callable[[Path, Random], None]:
    def apply(directory: Path, draw: Random) -> None:
        records = Records(directory)
        change(records, draw)
        records.path.write_bytes(records.bytes)

    return apply


def flip_records(records: Records, draw: Random) -> None:
    for start in records.starts:
        flip(records.bytes, draw.randrange(records.body(start).start, records.body(start).stop))


def swap_records(records: Records, _: Random) -> None:
    exchange(records.bytes, [records.body(start) for start in records.starts])


def flip_record_headers(records: Records, draw: Random) -> None:
    for start in records.starts:
        flip(records.bytes, start + draw.randrange(52))  # anywhere but in the unused bytes


def tear_records(records: Records, _: Random) -> None:
    del records.bytes[records.stride + 100 :]


def shift_records(records: Records, _: Random) -> None:
    records.bytes[records.stride : records.stride] = b"PLkv" * 25


def change_record_sizes(records: Records, _: Random) -> None:
    for start in records.starts:
        struct.pack_into("<Q", records.bytes, start + 40, records.block_bytes // 2)


# The store: values by name.


def change_values(change: Callable[[dict[str, bytes], list[str]], None]) -> Callable[[FakeStore], None]:
    def apply(store: FakeStore) -> None:
        blocks = [key for key, value in store.values.items() if len(value) > 64]
        assert len(blocks) >= 8
        change(store.values, blocks)

    return apply


def flip_values(values: dict[str, bytes], keys: list[str]) -> None:
    for key in keys:
        values[key] = values[key][:-9] + bytes([values[key][-9] ^ 0x80]) + values[key][-8:]


def swap_values(values: dict[str, bytes], keys: list[str]) -> None:
    found = [values[key] for key in keys]
    values.update(zip(keys, found[1:] + found[:1], strict=True))


def swap_value_bodies(values: dict[str, bytes], keys: list[str]) -> None:
    header = struct.calcsize("<8sI32sQ")
    found = [values[key] for key in keys]
    values.update(
        {key: old[:header] + new[header:] for key, old, new in zip(keys, found, found[1:] + found[:1], strict=True)}
    )


def tear_values(values: dict[str, bytes], keys: list[str]) -> None:
    values.update({key: values[key][:-100] for key in keys})


def lengthen_values(values: dict[str, bytes], keys: list[str]) -> None:
    values.update({key: values[key] + b"x" for key in keys})


def change_value_magic(values: dict[str, bytes], keys: list[str]) -> None:
    values.update({key: b"PLkvnext" + values[key][8:] for key in keys})


def drop_values(values: dict[str, bytes], keys: list[str]) -> None:
    for key in keys:
        del values[key]


HOST: dict[str, tuple[Callable[[Path, Random], None], Counted]] = {
    "flipped bodies": (change_slots(flip_bodies), "each"),
    "swapped bodies": (change_slots(swap_bodies), "each"),
    "emptied bodies": (change_slots(zero_bodies), "each"),
    "swapped headers": (change_slots(swap_headers), "each"),
    "flipped headers": (change_slots(flip_headers), "all"),
    "torn file": (change_slots(tear_slots), "once"),
    "another size": (change_slots(change_slot_size), "once"),
    "another version": (change_slots(change_slot_version), "none"),
    "killed before the header": (change_slots(kill_between_body_and_header), "none"),
}
DISK: dict[str, tuple[Callable[[Path, Random], None], Counted]] = {
    "flipped bodies": (change_records(flip_records), "each"),
    "swapped bodies": (change_records(swap_records), "each"),
    "flipped headers": (change_records(flip_record_headers), "once"),
    "torn file": (change_records(tear_records), "once"),
    "shifted records": (change_records(shift_records), "once"),
    "another size": (change_records(change_record_sizes), "once"),
}
STORE: dict[str, tuple[Callable[[FakeStore], None], Counted]] = {
    "flipped values": (change_values(flip_values), "each"),
    "swapped values": (change_values(swap_values), "each"),
    "swapped bodies": (change_values(swap_value_bodies), "each"),
    "torn values": (change_values(tear_values), "each"),
    "longer values": (change_values(lengthen_values), "each"),
    "another version": (change_values(change_value_magic), "each"),
    "lost values": (change_values(drop_values), "none"),
}


class AnyChecksum(int):
    """A checksum that equals any other."""

    __hash__ = int.__hash__

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False


CHECKED_IN: dict[str, Any] = {"host": host_tier, "disk": disk_tier, "store": store_tier, "peer": peer_thread}


def remove_check(monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    """Let a tier return any block as if its checksum were right."""
    monkeypatch.setattr(CHECKED_IN[tier], "crc32", lambda *_: AnyChecksum())


def opened(directory: Path, package: FakeStore | None = None, **changes: Any) -> SharedTiers:
    options = {"kv_host_bytes": 4 << 20, "kv_host_dir": str(directory / "host"), **changes}
    config = HostConfig(threads=1, **options)
    tiers = open_tiers(config, join_store=lambda master: StoreTier(package))
    assert tiers is not None
    if tiers.store is not None:
        until(lambda: tiers.store is not None and tiers.store.is_usable)
    return tiers


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@contextmanager
def counting_warnings() -> Iterator[_Warnings]:
    handler = _Warnings()
    logging.getLogger("pilotlight.engine").addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger("pilotlight.engine").removeHandler(handler)


def answer_with(model: Path, prompts: Prompts, tiers: SharedTiers, tier: str, warnings: _Warnings) -> Damaged:
    engine = load_engine(model, tiers=tiers)
    answers = answers_of(engine, prompts)
    assert cast(TieredCache, engine.tiers).wait_until_idle(10)
    num_corrupt = getattr(engine.load().corrupt_blocks, tier)
    engine.close()
    tiers.close()
    return Damaged(
        [answer.token_ids for answer in answers], [answer.num_cached_tokens for answer in answers], num_corrupt,
        warnings.count,
    )  # fmt: skip


def fill(model: Path, prompts: Prompts, directory: Path, **changes: Any) -> None:
    tiers = opened(directory, **changes)
    engine = load_engine(model, tiers=tiers)
    answers_of(engine, prompts)
    assert cast(TieredCache, engine.tiers).wait_until_idle(10)
    engine.close()
    tiers.close()


def damaged_host(model: Path, prompts: Prompts, directory: Path, damage: str) -> Damaged:
    fill(model, prompts, directory)
    num_blocks = len(Slots(directory).used)
    HOST[damage][0](directory, Random(damage))
    with counting_warnings() as warnings:
        found = answer_with(model, prompts, opened(directory), "host", warnings)
    return found._replace(num_blocks=num_blocks)


def damaged_disk(model: Path, prompts: Prompts, directory: Path, damage: str) -> Damaged:
    disk = {"kv_disk_bytes": 256 << 20, "kv_disk_dir": str(directory / "disk")}
    fill(model, prompts, directory, **disk)
    shutil.rmtree(directory / "host")
    num_blocks = len(Records(directory).starts)
    DISK[damage][0](directory, Random(damage))
    with counting_warnings() as warnings:
        tiers = opened(directory, **disk)
        assert tiers.disk is not None
        assert tiers.disk.wait_until_idle(10)
        found = answer_with(model, prompts, tiers, "disk", warnings)
    return found._replace(num_blocks=num_blocks)


def damaged_store(model: Path, prompts: Prompts, directory: Path, damage: str) -> Damaged:
    store = FakeStore()
    fill(model, prompts, directory, package=store, kv_store="127.0.0.1:1")
    shutil.rmtree(directory / "host")
    num_blocks = sum(len(value) > 64 for value in store.values.values())
    STORE[damage][0](store)
    with counting_warnings() as warnings:
        found = answer_with(model, prompts, opened(directory, store, kv_store="127.0.0.1:1"), "store", warnings)
    return found._replace(num_blocks=num_blocks)


PEER: dict[str, Counted] = {
    "flipped bit": "each", "other block": "each", "torn block": "each", "lost link": "none", "block that is not there": "none",
}  # fmt: skip
TRANSPORTS: tuple[type[Any], ...] = (SharedMemoryTransport, InlineTransport)
Read = Callable[[Any, list[RemoteBlock], list[HostSlot]], None]


def corrupting(read: Read, damage: str) -> Read:
    """Wrap a transport's `read` so that blocks are damaged or lost on their way."""

    def damaged(transport: Any, blocks: list[RemoteBlock], into: list[HostSlot]) -> None:
        if damage == "lost link":
            raise TransportLostError("on purpose")
        if damage == "block that is not there":
            raise PeerError("on purpose")
        read(transport, blocks, into)
        for slot in into:
            if damage == "flipped bit":
                slot.memory[9] ^= 0x80
            elif damage == "other block":
                slot.memory[:] = bytes(reversed(slot.memory))
            else:
                slot.memory[len(slot.memory) // 2 :] = bytes(len(slot.memory) - len(slot.memory) // 2)

    return damaged


def damaged_peer(
    model: Path, prompts: Prompts, directory: Path, transport: type[Any], damage: str, monkeypatch: pytest.MonkeyPatch
) -> Damaged:
    monkeypatch.setattr(transport, "read", corrupting(transport.read, damage))
    if transport is InlineTransport:
        monkeypatch.setattr(peer_thread.PeerThread, "_ways_to", lambda *_: (INLINE,))
    with counting_warnings() as warnings:
        pair = Pair(model, directory)
        heard = [pair.answer([submit(str(i), prompt, max_tokens=16)])[str(i)] for i, prompt in enumerate(prompts)]
        num_corrupt = pair.decode.load().corrupt_blocks.peer
        pair.close()
    fetched: list[int | None] = [each.num_fetched_tokens for each in heard]
    num_blocks = sum(len(prompt) // BLOCK_SIZE for prompt in prompts)
    return Damaged([each.token_ids for each in heard], fetched, num_corrupt, warnings.count, num_blocks)
