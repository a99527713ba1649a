"""Faults in the tiers of the KV cache: any part may be damaged, lost or late. Answers stay those of an engine without tiers, and each damage is
counted and logged. Without a tier's check the same damage changes an answer, which shows that these tests can fail.
"""

import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import pytest

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.peers import peer_thread
from pilotlight.engine.kv.peers.messages import PeerError, TransportLostError
from pilotlight.engine.kv.peers.transports import INLINE, InlineTransport, RemoteBlock, SharedMemoryTransport
from pilotlight.engine.kv.shared_tiers import SharedTiers, open_tiers
from pilotlight.engine.kv.store import store_tier
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.kv.tiers import disk_tier, host_tier, slot_file
from pilotlight.engine.kv.tiers.host_tier import HostSlot
from tests.checkpoints import write_llama
from tests.engine.driver import Heard, drain, load_engine, random_prompt, submit
from tests.engine.kv.fake_store import FakeStore
from tests.engine.test_hand_over import Pair
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("always_worth_it")

PROMPTS = [random_prompt(70, seed) for seed in (1, 2)]  # each has four full blocks
FILE_HEADER = struct.Struct("<8sIQQ")
SLOT_HEADER_BYTES, RECORD_HEADER_BYTES = 64, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_llama(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    engine = load_engine(model)
    answers = answers_of(engine)
    engine.close()
    return [answer.token_ids for answer in answers]


def answers_of(engine: Engine) -> list[Heard]:
    heard = drain(engine, [submit(str(i), prompt, max_tokens=16) for i, prompt in enumerate(PROMPTS)])
    return [heard[str(i)] for i in range(len(PROMPTS))]


class Damaged(NamedTuple):
    answers: list[list[int]]
    num_cached: list[int | None]
    num_corrupt: int
    num_warnings: int


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


HOST: dict[str, tuple[Callable[[Path, Random], None], bool]] = {
    "flipped bodies": (change_slots(flip_bodies), True),
    "swapped bodies": (change_slots(swap_bodies), True),
    "emptied bodies": (change_slots(zero_bodies), True),
    "swapped headers": (change_slots(swap_headers), True),
    "flipped headers": (change_slots(flip_headers), True),
    "torn file": (change_slots(tear_slots), True),
    "another size": (change_slots(change_slot_size), True),
    "another version": (change_slots(change_slot_version), False),
    "killed before the header": (change_slots(kill_between_body_and_header), False),
}
DISK: dict[str, tuple[Callable[[Path, Random], None], bool]] = {
    "flipped bodies": (change_records(flip_records), True),
    "swapped bodies": (change_records(swap_records), True),
    "flipped headers": (change_records(flip_record_headers), True),
    "torn file": (change_records(tear_records), True),
    "shifted records": (change_records(shift_records), True),
    "another size": (change_records(change_record_sizes), True),
}
STORE: dict[str, tuple[Callable[[FakeStore], None], bool]] = {
    "flipped values": (change_values(flip_values), True),
    "swapped values": (change_values(swap_values), True),
    "swapped bodies": (change_values(swap_value_bodies), True),
    "torn values": (change_values(tear_values), True),
    "longer values": (change_values(lengthen_values), True),
    "another version": (change_values(change_value_magic), True),
    "lost values": (change_values(drop_values), False),
}


class AnyChecksum(int):
    """A checksum that equals any other."""

    __hash__ = int.__hash__

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False


def remove_check(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(module, "crc32", lambda *_: AnyChecksum())


def opened(directory: Path, **changes: Any) -> SharedTiers:
    config = HostConfig(threads=1, kv_host_bytes=4 << 20, kv_host_dir=str(directory / "host"), **changes)
    tiers = open_tiers(config)
    assert tiers is not None
    if tiers.store is not None:
        until(lambda: tiers.store is not None and tiers.store.is_usable)
    return tiers


def answer_with(model: Path, tiers: SharedTiers, tier: str, caplog: pytest.LogCaptureFixture) -> Damaged:
    engine = load_engine(model, tiers=tiers)
    answers = answers_of(engine)
    assert cast(TieredCache, engine.tiers).wait_until_idle(10)
    num_corrupt = getattr(engine.load().corrupt_blocks, tier)
    engine.close()
    tiers.close()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    return Damaged(
        [answer.token_ids for answer in answers], [answer.num_cached_tokens for answer in answers], num_corrupt,
        len(warnings),
    )  # fmt: skip


def check(found: Damaged, expected: list[list[int]], is_damage: bool) -> None:
    assert found.answers == expected
    assert (found.num_corrupt > 0) == is_damage
    assert is_damage or found.num_cached == [0, 0]
    assert (found.num_warnings > 0) == is_damage


def fill(model: Path, directory: Path, **changes: Any) -> None:
    tiers = opened(directory, **changes)
    engine = load_engine(model, tiers=tiers)
    answers_of(engine)
    assert cast(TieredCache, engine.tiers).wait_until_idle(10)
    engine.close()
    tiers.close()


def damaged_host(model: Path, directory: Path, damage: str, caplog: pytest.LogCaptureFixture) -> Damaged:
    fill(model, directory)
    HOST[damage][0](directory, Random(damage))
    return answer_with(model, opened(directory), "host", caplog)


def damaged_disk(model: Path, directory: Path, damage: str, caplog: pytest.LogCaptureFixture) -> Damaged:
    disk = {"kv_disk_bytes": 4 << 20, "kv_disk_dir": str(directory / "disk")}
    fill(model, directory, **disk)
    shutil.rmtree(directory / "host")
    DISK[damage][0](directory, Random(damage))
    tiers = opened(directory, **disk)
    assert tiers.disk is not None
    assert tiers.disk.wait_until_idle(10)
    return answer_with(model, tiers, "disk", caplog)


def damaged_store(
    model: Path, directory: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Damaged:
    store = FakeStore()
    monkeypatch.setattr(store_tier, "open_member", lambda *_, **__: store)
    fill(model, directory, kv_store="127.0.0.1:1")
    shutil.rmtree(directory / "host")
    STORE[damage][0](store)
    return answer_with(model, opened(directory, kv_store="127.0.0.1:1"), "store", caplog)


@pytest.mark.parametrize("damage", HOST)
def test_a_damaged_host_tier_changes_no_answer(
    model: Path, expected: list[list[int]], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(damaged_host(model, tmp_path, damage, caplog), expected, HOST[damage][1])


@pytest.mark.parametrize("damage", DISK)
def test_a_damaged_disk_tier_changes_no_answer(
    model: Path, expected: list[list[int]], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(damaged_disk(model, tmp_path, damage, caplog), expected, DISK[damage][1])


@pytest.mark.process
@pytest.mark.parametrize("damage", STORE)
def test_a_damaged_store_changes_no_answer(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(damaged_store(model, tmp_path, damage, caplog, monkeypatch), expected, STORE[damage][1])


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
    model: Path, directory: Path, transport: type[Any], damage: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[int], int]:
    monkeypatch.setattr(transport, "read", corrupting(transport.read, damage))
    if transport is InlineTransport:
        monkeypatch.setattr(peer_thread.PeerThread, "_ways_to", lambda *_: (INLINE,))
    pair = Pair(model, directory)
    answers, fetched = [], []
    for i, prompt in enumerate(PROMPTS):
        heard = pair.answer([submit(str(i), prompt, max_tokens=16)])[str(i)]
        answers.append(heard.token_ids)
        fetched.append(heard.num_fetched_tokens)
    num_corrupt = pair.decode.load().corrupt_blocks.peer
    pair.close()
    return answers, fetched, num_corrupt


@pytest.mark.process
@pytest.mark.parametrize("transport", [SharedMemoryTransport, InlineTransport])
@pytest.mark.parametrize("damage", ["flipped bit", "other block", "torn block", "lost link", "block that is not there"])
def test_damage_between_two_hosts_changes_no_answer(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    transport: type[Any],
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, fetched, num_corrupt = damaged_peer(model, tmp_path, transport, damage, monkeypatch)
    assert answers == expected
    assert fetched[0] == 0
    assert damage == "lost link" or fetched[1] == 0  # after a lost link the next read uses another transport
    assert (num_corrupt > 0) == (damage in ("flipped bit", "other block", "torn block"))


@pytest.mark.process
@pytest.mark.parametrize("tier", ["host", "disk", "store", "peer"])
def test_without_its_check_a_tier_would_answer_wrongly(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    tier: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tier == "host":
        remove_check(monkeypatch, host_tier)
        answers = damaged_host(model, tmp_path, "swapped bodies", caplog).answers
    elif tier == "disk":
        remove_check(monkeypatch, disk_tier)
        answers = damaged_disk(model, tmp_path, "swapped bodies", caplog).answers
    elif tier == "store":
        remove_check(monkeypatch, store_tier)
        answers = damaged_store(model, tmp_path, "swapped bodies", caplog, monkeypatch).answers
    else:
        remove_check(monkeypatch, peer_thread)
        answers, _, _ = damaged_peer(model, tmp_path, SharedMemoryTransport, "other block", monkeypatch)
    assert answers != expected
