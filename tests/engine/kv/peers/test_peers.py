"""Blocks from another host's tier: they arrive while they are computed, over each transport, and a peer that lies, stops or dies causes no wrong
content."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import pytest
import zmq

from pilotlight.engine.api.keys import Keys
from pilotlight.engine.api.protocol import BlockSource
from pilotlight.engine.kv.peers.block_server import BlockServer
from pilotlight.engine.kv.peers.messages import (
    HEARTBEAT_S,
    LEASE_S,
    PEER_VERSION,
    SILENCE_S,
    BlocksReady,
    FromServer,
    NoMoreBlocks,
    PeerError,
    PeerHello,
    PeerReady,
    PeerRefused,
    ReadBlocks,
    ReadyBlock,
    TransportLostError,
    decode_from_reader,
    decode_from_server,
    encode,
)
from pilotlight.engine.kv.peers.mooncake import TransferEngine
from pilotlight.engine.kv.peers.peer_thread import PeerRead, PeerThread
from pilotlight.engine.kv.peers.transports import INLINE, MOONCAKE, SHARED_MEMORY
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier
from tests.engine.kv.tiers.test_host_tier import SIZE, content, name, put
from tests.waiting import until

IDENTITY = CacheIdentity("tiny", "float32", 16, "layout", b"weights")


try:
    import mooncake.engine
except ImportError:
    mooncake = None
needs_mooncake = pytest.mark.skipif(mooncake is None, reason="Mooncake or its libibverbs1 is not installed")


class Clock:
    """The machine's clock, which a test can stop or advance."""

    def __init__(self) -> None:
        self._skipped_s = 0.0
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        return (time.monotonic() if self._stopped_at is None else self._stopped_at) + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds

    def stop(self) -> None:
        self._stopped_at = time.monotonic()


class Hosts:
    """A host that computes blocks, and a host that reads them."""

    def __init__(
        self,
        directory: Path,
        transports: Sequence[str] = (SHARED_MEMORY, INLINE),
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.address = f"ipc://{directory}/peers"
        self.there = HostTier.open(directory / "there", 1 << 20)
        self.here = HostTier.open(directory / "here", 1 << 20)
        engines = [TransferEngine("127.0.0.1") if MOONCAKE in transports else None for _ in range(2)]
        self.server_clock, self.reader_clock = Clock(), Clock()
        self.server = BlockServer(self.address, self.there, engine=engines[0], clock=self.server_clock)
        self.server.add_cache(IDENTITY)
        self.reader = PeerThread(
            self.here,
            transports=transports,
            engine=engines[1],
            clock=self.reader_clock,
            heartbeat_s=heartbeat_s,
        )
        self.closers: list[Callable[[], None]] = [self.reader.close, self.server.close]

    def compute(self, *numbers: int) -> None:
        for n in numbers:
            assert put(self.there, n)

    def read(self, *numbers: int, hand_over: str = "one", identity: CacheIdentity = IDENTITY) -> PeerRead:
        source = BlockSource(self.address, hand_over, 5.0)
        return self.reader.read(source, identity, [name(n) for n in numbers], SIZE)

    def take(self, read: PeerRead) -> int:
        """Wait for the end of a read, check its blocks, and return their number."""
        until(lambda: read.is_done)
        slots = read.take()
        asked = dict(zip(read.hashes, range(len(read.hashes)), strict=True))
        for slot in slots:
            assert crc32(slot.memory) == slot.checksum, f"block {asked[slot.block_hash]}"
        self.here.unpin(slots)
        return len(slots)

    def close_server(self) -> None:
        self.closers.remove(self.server.close)
        self.server.close()

    def close(self) -> None:
        for close in self.closers:
            close()
        assert self.server.num_leased == 0
        assert self.there.num_pinned == self.here.num_pinned == 0
        self.there.close()
        self.here.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.parametrize("transport", [SHARED_MEMORY, INLINE, pytest.param(MOONCAKE, marks=needs_mooncake)])
def test_blocks_come_as_they_are_computed(tmp_path: Path, transport: str) -> None:
    hosts = Hosts(tmp_path, [transport])
    hosts.server.begin("one")
    hosts.compute(0, 1)
    read = hosts.read(*range(6))
    until(lambda: len(hosts.here) == 2)
    assert not read.is_done
    hosts.compute(2, 3, 4)
    until(lambda: len(hosts.here) == 5)
    hosts.server.end("one")
    hosts.compute(5)  # stored shortly after the sequence has ended
    assert hosts.take(read) == 6
    assert read.num_read == 6
    for n in range(6):
        slot = hosts.here.pin(name(n), is_hit=False)
        assert slot is not None
        assert bytes(slot.memory) == content(n)
        hosts.here.unpin([slot])
    until(lambda: hosts.server.num_leased == 0)
    assert hosts.server.num_expired == 0, "copied blocks are released at once"
    assert hosts.server.rate.bytes_per_s > 0
    assert (hosts.reader.num_lost, hosts.reader.num_open) == (0, 0)
    hosts.close()


class LostWay:
    """A transfer engine whose peer cannot be reached."""

    session = "elsewhere"
    num_tries = 0

    def address_of(self, slot: HostSlot) -> int:
        return slot.index

    def read(self, session: str, addresses: Sequence[int], into: Sequence[HostSlot]) -> None:
        self.num_tries += 1
        raise TransportLostError("its machine is cut off")


@pytest.mark.long
def test_a_way_that_is_lost_ends_its_reads_and_the_next_ones_go_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LostWay] = []
    monkeypatch.setitem(globals(), "TransferEngine", lambda host: made.append(LostWay()) or made[-1])
    hosts = Hosts(tmp_path, [MOONCAKE, INLINE])
    hosts.server.begin("one")
    hosts.compute(0, 1, 2)
    assert hosts.take(hosts.read(0, 1, 2)) == 0
    assert hosts.take(hosts.read(0, 1, 2)) == 3
    assert [engine.num_tries for engine in made] == [0, 1]
    hosts.reader_clock.skip(100.0)
    until(lambda: not hosts.reader.peers)
    hosts.here.forget([name(n) for n in range(3)])
    assert hosts.take(hosts.read(0, 1, 2)) == 0, "it may be tried again only after a while"
    hosts.server_clock.skip(LEASE_S)
    until(lambda: hosts.server.num_leased == 0)
    hosts.close()


def test_what_is_here_already_is_not_read_again(hosts: Hosts) -> None:
    put(hosts.here, 1)
    hosts.server.begin("one")
    hosts.compute(0, 1, 2)
    read = hosts.read(0, 1, 2)
    assert hosts.take(read) == 3
    assert read.num_read == 2


def test_a_sequence_that_ends_early_ends_the_read_with_what_came(hosts: Hosts) -> None:
    hosts.server.begin("one")
    hosts.compute(0, 1, 3)
    read = hosts.read(*range(5))
    until(lambda: len(hosts.here) == 2)
    hosts.server.end("one")
    hosts.server_clock.skip(1.0)
    assert hosts.take(read) == 2
    assert hosts.reader.num_lost == 1


def test_a_block_damaged_in_place_is_never_offered(hosts: Hosts) -> None:
    hosts.compute(0, 1, 2)
    slot = hosts.there.pin(name(1), is_hit=False)
    assert slot is not None
    slot.memory[3] ^= 0xFF
    slot.is_verified = False  # like a slot of an earlier process
    hosts.there.unpin([slot])
    read = hosts.read(0, 1, 2)
    until(lambda: len(hosts.here) == 1)
    hosts.server_clock.skip(1.0)
    assert hosts.take(read) == 1
    assert hosts.there.num_corrupt == 1


def test_an_unknown_sequence_ends_the_read(hosts: Hosts) -> None:
    hosts.compute(0)
    read = hosts.read(0, 1, hand_over="unheard of")
    until(lambda: len(hosts.here) == 1)
    hosts.server_clock.skip(1.0)
    assert hosts.take(read) == 1


@pytest.mark.parametrize("field", CacheIdentity._fields)
def test_another_cache_is_refused_by_what_differs(hosts: Hosts, field: str, caplog: pytest.LogCaptureFixture) -> None:
    hosts.server.begin("one")
    hosts.compute(0)
    other = 32 if field == "block_size" else b"other" if field == "weights" else "other"
    assert hosts.take(hosts.read(0, identity=IDENTITY._replace(**{field: other}))) == 0
    assert ("does not have 'other'" if field == "model" else f"differs from the reader's in {field}") in caplog.text


def test_two_reads_of_one_chain_both_end(hosts: Hosts) -> None:
    hosts.server.begin("one")
    first, second = hosts.read(*range(4)), hosts.read(*range(4))
    hosts.compute(*range(4))
    assert hosts.take(first) == hosts.take(second) == 4
    assert first.num_read + second.num_read == 4


def test_a_read_begins_while_another_waits_in_silence(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, heartbeat_s=600.0)
    hosts.server_clock.stop()
    hosts.server.begin("one")
    waiting = hosts.read(7)
    until(lambda: hosts.reader.num_heard == 1)  # the greeting; no heartbeat follows
    hosts.compute(0)
    assert hosts.take(hosts.read(0)) == 1
    hosts.compute(7)
    assert hosts.take(waiting) == 1
    hosts.close()


def test_a_cancelled_read_leaves_nothing_pinned(hosts: Hosts) -> None:
    hosts.server.begin("one")
    hosts.compute(0, 1)
    read = hosts.read(*range(4))
    until(lambda: len(hosts.here) == 2)
    read.cancel()
    until(lambda: hosts.reader.num_open == 0)
    assert read.take() == []
    until(lambda: not hosts.server.grants)


def test_an_invalid_address_ends_its_read_and_does_not_keep_the_host_from_ending(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.address = "nonsense://x"
    assert hosts.take(hosts.read(0)) == 0
    assert "cannot be read from nonsense://x" in caplog.text
    hosts.closers.remove(hosts.reader.close)
    closing = threading.Thread(target=hosts.reader.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_a_host_that_goes_away_ends_its_reads_at_once(hosts: Hosts) -> None:
    hosts.server.begin("one")
    hosts.compute(0, 1)
    read = hosts.read(*range(4))
    until(lambda: len(hosts.here) == 2)
    hosts.close_server()
    began = time.monotonic()
    assert hosts.take(read) == 2
    assert time.monotonic() - began < 0.75 * SILENCE_S, "a closed socket is noticed before the limit of silence"


def test_a_host_that_stands_still_is_given_up(hosts: Hosts) -> None:
    hosts.address += "2"
    with Impostor(hosts.address, zmq.ROUTER) as peer:
        read = hosts.read(0, 1)
        peer.answer([BlocksReady(0, (GOOD,))], [content(0)])
        until(lambda: len(hosts.here) == 1)
        hosts.reader_clock.skip(SILENCE_S)
        assert hosts.take(read) == 1


def test_a_lease_expires_with_its_reader(hosts: Hosts) -> None:
    hosts.server.begin("one")
    hosts.compute(0, 1)
    with Impostor(hosts.address, zmq.DEALER) as reader:
        reader.send(PeerHello(PEER_VERSION, (SHARED_MEMORY,)))
        reader.send(ReadBlocks(0, "one", IDENTITY, SIZE, (name(0), name(1), name(2))))
        until(lambda: hosts.server.num_leased == 2)
        assert hosts.there.num_pinned == 2
        hosts.server_clock.skip(LEASE_S)
        until(lambda: hosts.server.num_expired == 1)
    assert hosts.server.num_leased == 0


def test_a_lease_expires_though_other_readers_are_heard_of(hosts: Hosts) -> None:
    hosts.server.begin("one")
    hosts.compute(0)
    with Impostor(hosts.address, zmq.DEALER) as gone, Impostor(hosts.address, zmq.DEALER) as alive:
        gone.send(PeerHello(PEER_VERSION, (SHARED_MEMORY,)))
        gone.send(ReadBlocks(0, "one", IDENTITY, SIZE, (name(0), name(1))))
        until(lambda: hosts.server.num_leased == 1)

        def is_expired() -> bool:
            alive.send(PeerHello(PEER_VERSION, (SHARED_MEMORY,)))
            hosts.server_clock.skip(LEASE_S / 50)
            return hosts.server.num_expired == 1

        until(is_expired, within_s=5.0)


def test_a_reader_that_never_greeted_or_speaks_another_version_is_refused(hosts: Hosts) -> None:
    for said in (
        ReadBlocks(0, "one", IDENTITY, SIZE, (name(0),)),
        PeerHello(PEER_VERSION + 1, (INLINE,)),
        PeerHello(PEER_VERSION, ("carrier pigeon",)),
    ):
        with Impostor(hosts.address, zmq.DEALER) as reader:
            reader.send(said)
            assert isinstance(decode_from_server(reader.socket.recv()), PeerRefused)
    with Impostor(hosts.address, zmq.DEALER) as reader:
        reader.socket.send(b"\xc1 no message")
        assert isinstance(decode_from_server(reader.socket.recv()), PeerRefused)
    hosts.server.begin("one")
    hosts.compute(0)
    assert hosts.take(hosts.read(0)) == 1, "the next read works"


@pytest.mark.parametrize("size", [0, -SIZE])
def test_a_reader_of_blocks_without_bytes_is_refused_and_holds_up_no_other(hosts: Hosts, size: int) -> None:
    hosts.server.begin("one")
    hosts.compute(0)
    with Impostor(hosts.address, zmq.DEALER) as reader:
        reader.send(PeerHello(PEER_VERSION, (SHARED_MEMORY,)))
        assert isinstance(decode_from_server(reader.socket.recv()), PeerReady)
        reader.send(ReadBlocks(0, "one", IDENTITY, size, (name(0),)))
        assert isinstance(decode_from_server(reader.socket.recv()), NoMoreBlocks)
        assert hosts.take(hosts.read(0)) == 1


def test_only_messages_with_the_keys_are_accepted(tmp_path: Path) -> None:
    def own_pair() -> Keys:
        public, secret = zmq.curve_keypair()
        return Keys(secret, public, public)

    keys = own_pair()
    there, here = HostTier.open(tmp_path / "there", 1 << 20), HostTier.open(tmp_path / "here", 1 << 20)
    address = f"ipc://{tmp_path}/peers"
    server = BlockServer(address, there, keys)
    server.add_cache(IDENTITY)
    server.begin("one")
    put(there, 0)
    for reader, num_expected in ((PeerThread(here, own_pair()), 0), (PeerThread(here, keys), 1)):
        read = reader.read(BlockSource(address, "one", 5.0), IDENTITY, [name(0)], SIZE)
        until(lambda read=read: read.is_done)
        assert len(read.slots) == num_expected
        here.unpin(read.take())
        reader.close()
    server.close()
    there.close()
    here.close()


class Impostor:
    """A fake peer: a socket that sends what a test wants."""

    def __init__(self, address: str, kind: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        if kind == zmq.ROUTER:
            self.socket.bind(address)
        else:
            self.socket.connect(address)

    def __enter__(self) -> "Impostor":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def send(self, message: PeerHello | ReadBlocks) -> None:
        self.socket.send(encode(message))

    def answer(self, messages: Sequence[FromServer], frames: Sequence[bytes] = (), greets_as: str = INLINE) -> None:
        """Greet a reader, wait for its request, and send it these messages."""
        while True:
            reader, frame = self.socket.recv_multipart()
            match decode_from_reader(frame):
                case PeerHello():
                    self.socket.send_multipart([reader, encode(PeerReady(PEER_VERSION, greets_as, ""))])
                case ReadBlocks():
                    for message in messages:
                        self.socket.send_multipart([reader, encode(message), *frames])
                    return


GOOD = ReadyBlock(0, crc32(content(0)))
LIES: dict[str, tuple[Sequence[FromServer], Sequence[bytes]]] = {
    "bytes that are others than announced": ([BlocksReady(0, (GOOD,))], [content(1)]),
    "a block that is cut": ([BlocksReady(0, (GOOD,))], [content(0)[:-1]]),
    "a block that is too long": ([BlocksReady(0, (GOOD,))], [content(0) + b"x"]),
    "no bytes at all": ([BlocksReady(0, (GOOD,))], []),
    "more blocks than were asked for": ([BlocksReady(0, (GOOD,) * 3)], [content(0)] * 3),
    "fewer frames than blocks": ([BlocksReady(0, (GOOD, GOOD))], [content(0)]),
    "that no more comes": ([NoMoreBlocks(0, "on purpose")], []),
    "that it refuses": ([PeerRefused("on purpose")], []),
}


@pytest.mark.parametrize("lie", LIES)
def test_nothing_of_a_peer_that_lies_is_kept(tmp_path: Path, lie: str) -> None:
    address = f"ipc://{tmp_path}/peers"
    here = HostTier.open(tmp_path / "here", 1 << 20)
    reader = PeerThread(here)
    with Impostor(address, zmq.ROUTER) as peer:
        read = reader.read(BlockSource(address, "one", 5.0), IDENTITY, [name(0), name(1)], SIZE)
        messages, frames = LIES[lie]
        peer.answer(messages, frames)
        until(lambda: read.is_done)
        assert read.take() == []
        assert len(here) == 0
        assert here.space.used_bytes == 0
    reader.close()
    here.close()


def test_answers_to_other_questions_and_garbage_change_nothing(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/peers"
    here = HostTier.open(tmp_path / "here", 1 << 20)
    reader = PeerThread(here)
    with Impostor(address, zmq.ROUTER) as peer:
        read = reader.read(BlockSource(address, "one", 5.0), IDENTITY, [name(0)], SIZE)
        peer.answer([BlocksReady(77, (GOOD,)), NoMoreBlocks(78, "another"), BlocksReady(0, (GOOD,))], [content(0)])
        until(lambda: read.is_done)
        slots = read.take()
        assert len(slots) == 1
        here.unpin(slots)
        again = reader.read(BlockSource(address, "one", 5.0), IDENTITY, [name(1)], SIZE)
        readers, _ = peer.socket.recv_multipart()
        peer.socket.send_multipart([readers, b"\xc1 no message"])
        until(lambda: again.is_done)
        assert again.take() == []
    reader.close()
    here.close()


def test_a_block_that_is_overwritten_while_it_is_announced_is_not_taken_for_another(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/peers"
    there, here = HostTier.open(tmp_path / "there", 1 << 20), HostTier.open(tmp_path / "here", 1 << 20)
    put(there, 5)
    (slot,) = there.pin_prefix([name(5)])
    reader = PeerThread(here)
    with Impostor(address, zmq.ROUTER) as peer:
        read = reader.read(BlockSource(address, "one", 5.0), IDENTITY, [name(0)], SIZE)
        sender, frame = peer.socket.recv_multipart()
        assert isinstance(decode_from_reader(frame), PeerHello)
        peer.socket.send_multipart([sender, encode(PeerReady(PEER_VERSION, SHARED_MEMORY, str(there.directory)))])
        sender, frame = peer.socket.recv_multipart()
        told = BlocksReady(0, (ReadyBlock(slot.index, slot.checksum),))  # the slot holds another block by now
        peer.socket.send_multipart([sender, encode(told)])
        until(lambda: read.is_done)
        assert read.take() == []
    reader.close()
    there.unpin([slot])
    there.close()
    here.close()


def test_a_full_tier_takes_what_it_can(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    hosts.here.close()
    hosts.reader.close()
    hosts.here = HostTier.open(tmp_path / "small", 3 * 4096 * -(-SIZE // 4096))
    hosts.reader = PeerThread(hosts.here)
    hosts.closers[0] = hosts.reader.close
    hosts.server.begin("one")
    hosts.compute(*range(6))
    assert hosts.take(hosts.read(*range(6))) == 3
    hosts.close()


def test_messages_survive_their_byte_form() -> None:
    asked = ReadBlocks(3, "one", IDENTITY, SIZE, (name(0), name(1)))
    assert decode_from_reader(encode(asked)) == asked
    told = BlocksReady(3, (GOOD, ReadyBlock(7, 9)))
    assert decode_from_server(encode(told)) == told
    with pytest.raises(PeerError):
        decode_from_server(encode(told)[:-1])
