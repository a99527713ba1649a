"""The real Mooncake Store over loopback: members find each other's blocks, and what happens when the master is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import psutil
import pytest

from load_tests.local_network import free_ports
from pilotlight.engine.kv.store.store_tier import (
    BATCH_BYTES,
    StoredBlock,
    StoreError,
    StoreTier,
    open_member,
    own_address,
)
from tests.engine.kv.peers.test_peers import needs_mooncake
from tests.engine.kv.tiers.test_host_tier import SIZE, content, name
from tests.waiting import until

ROOT = Path(__file__).parents[4]
pytestmark = needs_mooncake


class Node:
    """The process of `pilotlight store` on a port of this machine."""

    def __init__(self, gib: float = 0.0625) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        command = [
            sys.executable,
            "-m",
            "pilotlight.engine.kv.store.store_node",
            "--address",
            self.address,
            "--gib",
            str(gib),
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.said: list[str] = []
        self.until_it_says("ready")

    @property
    def master(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def until_it_says(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if words in line:
                return
        raise AssertionError(f"the store ended: {self.said}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def node(process_tier: None) -> Iterator[Node]:
    made = Node()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def store(node: Node) -> Iterator[StoreTier]:
    made = StoreTier.join(node.address)
    yield made
    made.close()


def block(n: int) -> StoredBlock:
    return StoredBlock(name(n), memoryview(content(n)), crc32(content(n)))


def read(store: StoreTier, *numbers: int) -> list[bool]:
    """Read blocks; return for each whether its content is unchanged."""
    into = [bytearray(SIZE) for _ in numbers]
    found = store.read([name(n) for n in numbers], [memoryview(each) for each in into])
    return [
        checksum == crc32(content(n)) and bytes(each) == content(n)
        for n, checksum, each in zip(numbers, found, into, strict=True)
    ]


def test_members_find_each_others_blocks_and_what_they_wrote_outlives_them(node: Node, store: StoreTier) -> None:
    one = StoreTier.join(node.address)
    one.write([block(n) for n in range(5)])
    one.write([block(0)])  # a block that is stored already
    one_identity = one.identity()
    one.close()
    assert store.find([name(n) for n in range(7)]) == [name(n) for n in range(5)]
    assert len({one_identity, store.identity()} - {""}) == 1
    assert read(store, 0, 4, 5) == [True, True, False]


@pytest.mark.parametrize("value", [b"cut", content(9), b"long" * SIZE], ids=["cut", "without a header", "longer"])
def test_a_block_of_another_content_is_removed_and_can_be_stored_again(
    node: Node, store: StoreTier, value: bytes
) -> None:
    num_corrupt = store.num_corrupt
    member = open_member(node.address, own_address(node.address), segment_bytes=0)
    assert member.put(f"pilotlight/{name(9).hex()}", value) == 0
    assert store.find([name(9)]) == [name(9)]
    assert read(store, 9) == [False]
    assert store.num_corrupt == num_corrupt + 1
    store.write([block(9)])
    assert read(store, 9) == [True]
    store.remove([name(9)])
    member.close()


def test_signals_for_other_servers_do_not_end_a_store(node: Node, store: StoreTier) -> None:
    for number in (signal.SIGHUP, signal.SIGUSR2):
        node.process.send_signal(number)
    store.write([block(20)])
    assert read(store, 20) == [True]
    assert node.process.poll() is None


def test_a_store_needs_a_port_of_its_own(node: Node) -> None:
    command = [sys.executable, "-m", "pilotlight.engine.kv.store.store_node", "--address", node.address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"{node.address} is taken" in done.stderr


@pytest.mark.process
@pytest.mark.slow
def test_a_master_that_is_killed_comes_back_empty_and_takes_blocks_again() -> None:
    node = Node()
    store = StoreTier.join(node.address)
    store.write([block(1)])
    killed = node.master.pid
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(StoreError):
        store.find([name(1)])
    node.until_it_says("started again")
    until(lambda: is_writable(store))
    assert node.master.pid != killed
    assert store.find([name(1), name(2)]) == [name(2)]
    assert read(store, 1, 2) == [False, True]
    store.close()
    node.stop()


def is_writable(store: StoreTier) -> bool:
    try:
        store.write([block(2)])
    except StoreError:
        return False
    return True


@pytest.mark.process
def test_a_master_that_accepts_and_says_nothing_is_given_up_and_stops_no_other_thread() -> None:
    """A separate process joins: a wrong implementation would hold Python's lock for minutes."""
    script = """
import socket, threading, time
from pilotlight.engine.kv.store import store_tier
store_tier._ANSWER_S = 1.0
listening = socket.create_server(("127.0.0.1", 0))
refused = threading.Event()
def attempt():
    try:
        store_tier.open_member(f"127.0.0.1:{listening.getsockname()[1]}", "127.0.0.1", 0)
    except store_tier.StoreError:
        refused.set()
threading.Thread(target=attempt, daemon=True).start()
assert refused.wait(60)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)


@pytest.mark.long
def test_blocks_of_a_whole_batch_come_back_to_their_last_byte(store: StoreTier) -> None:
    sizes = (BATCH_BYTES // 2 - 100, BATCH_BYTES // 2 + 100)
    contents = [bytes([7 + i]) * size for i, size in enumerate(sizes)]
    names = [name(900 + i) for i in range(2)]
    store.write([StoredBlock(n, memoryview(c), crc32(c)) for n, c in zip(names, contents, strict=True)])
    into = [bytearray(size) for size in sizes]
    assert store.read(names, [memoryview(each) for each in into]) == [crc32(each) for each in contents]
    assert [bytes(each) for each in into] == contents
