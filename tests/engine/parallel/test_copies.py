"""Copies of blocks from all ranks to host memory: concurrent threads get the blocks that they requested."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pilotlight.engine.parallel.channel import RankChannel
from pilotlight.engine.parallel.orders import FetchBlocks, RankReply, StoreBlocks
from pilotlight.engine.parallel.ranks import RankBlocks, RankGroup

BLOCK_BYTES = 1 << 20  # more than the buffer of a socket holds


class OtherRank(threading.Thread):
    """A fake rank that stores and returns blocks as a follower does."""

    def __init__(self, channel: RankChannel) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self.blocks: dict[int, bytes] = {}

    def run(self) -> None:
        while True:
            try:
                order = self._channel.receive()
            except EOFError:
                self._channel.close()
                return
            for block in order.blocks:
                if isinstance(order, StoreBlocks):
                    self._channel.send_bytes(memoryview(self.blocks[block]))
                else:
                    assert isinstance(order, FetchBlocks)
                    content = bytearray(BLOCK_BYTES)
                    self._channel.receive_into(memoryview(content))
                    self.blocks[block] = bytes(content)
            self._channel.send(RankReply(order.model))


def content_of(block: int) -> bytes:
    return bytes([block]) * BLOCK_BYTES


class OneOther(RankGroup):
    """A group of two ranks, of which the other is a thread of this process."""

    def __init__(self) -> None:
        mine, end = RankChannel.pair()
        self.size, self.copies, self.lost = 2, 1, None
        self._channels = [(mine, mine, mine)]
        self._copying = threading.Lock()
        self.other = OtherRank(RankChannel(end))
        self.other.start()

    def end(self) -> None:
        self._channels[0][0].close()
        self.other.join()


@pytest.fixture
def group() -> Iterator[OneOther]:
    group = OneOther()
    yield group
    group.end()


def test_blocks_that_two_threads_store_do_not_mix(group: OneOther) -> None:
    group.other.blocks = {block: content_of(block) for block in range(16)}

    def store(blocks: Sequence[int]) -> list[bytes]:
        places = [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks]
        group.store("tiny", [RankBlocks(blocks, places, places)])
        return [bytes(place) for place in places]

    with ThreadPoolExecutor(2) as threads:
        stored = list(threads.map(store, (range(8), range(8, 16))))
    assert stored == [[content_of(block) for block in blocks] for blocks in (range(8), range(8, 16))]


def test_blocks_that_two_threads_fetch_do_not_mix(group: OneOther) -> None:
    def fetch(blocks: Sequence[int]) -> None:
        places = [memoryview(content_of(block)) for block in blocks]
        group.fetch("tiny", [RankBlocks(blocks, places, places)])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(fetch, (range(8), range(8, 16))))
    assert group.other.blocks == {block: content_of(block) for block in range(16)}
