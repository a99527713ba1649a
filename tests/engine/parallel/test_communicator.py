"""Exchanges between ranks through Gloo, in threads of one process, and the store by which ranks find each other."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from pilotlight.engine.parallel.communicator import Communicator, Exchanged, StagePipe
from pilotlight.engine.parallel.rank_links import LOCALHOST, RankLinks, link, new_store
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.weights.shard import WHOLE, Shard


@pytest.mark.process
def test_the_ranks_store_listens_on_this_machine_alone() -> None:
    store = new_store()
    TCPStore(LOCALHOST, store.port, is_master=False).set("a", "b")
    assert store.get("a") == b"b", "another rank must reach the store"
    # The port must be free on another loopback address: a listener on all addresses would occupy it there too.
    with socket.create_server(("127.0.0.2", store.port)):
        pass


def linked(degrees: Parallelism, work: Callable[[RankLinks], Any]) -> list[Any]:
    """Run `work` on every rank, each in a separate thread; return the results in the order of ranks."""
    store = HashStore()

    def run(rank: int) -> Any:
        return work(link(rank, degrees, store, torch.device("cpu")))

    with ThreadPoolExecutor(degrees.size) as threads:
        return list(threads.map(run, range(degrees.size)))


def test_ranks_that_share_matrices_have_one_sum_and_each_others_columns() -> None:
    def work(links: RankLinks) -> Any:
        ranks, rank = links.serving, links.rank
        assert ranks is not None
        summed = ranks.sum(torch.full((2, 3), rank + 1.0))
        joined = ranks.join(torch.full((2, 2 - rank), rank + 5.0), (2, 1))
        told = ranks.from_rank(1, torch.tensor([rank + 7]))
        assert ranks.exchanged == Exchanged(sums=1, summed_bytes=24, joins=1, joined_bytes=32)
        return summed.tolist(), joined.tolist(), told.tolist(), ranks.copies, ranks.is_first, links.shard

    first, second = linked(Parallelism(tp=2), work)
    assert first[:4] == second[:4] == ([[3.0] * 3] * 2, [[5.0, 5.0, 6.0]] * 2, [8], 1)
    assert (first[4:], second[4:]) == ((True, Shard(0, 2)), (False, Shard(1, 2)))


def test_ranks_with_tokens_of_their_own_send_rows_to_each_other_and_to_the_first() -> None:
    def work(links: RankLinks) -> Any:
        ranks, rank = links.serving, links.rank
        assert ranks is not None
        sent, received = ranks.exchange_counts(torch.tensor([1, 2] if rank == 0 else [2, 0]))
        rows = torch.arange(sum(sent)).unsqueeze(1) + 10 * rank
        arrived = ranks.exchange(rows, sent, received)
        gathered = ranks.to_first(torch.full((rank + 1, 1), rank), (1, 2))
        own = ranks.sum(torch.ones(1)), ranks.join(torch.ones(1, 1), (1,))
        assert [int(x) for x in own] == [1, 1], "sums are local, as each rank has whole matrices"
        return sent, received, arrived.flatten().tolist(), gathered.flatten().tolist(), ranks.copies, ranks.exchanged

    first, second = linked(Parallelism(ep=2), work)
    assert first[:5] == ([1, 2], [1, 2], [0, 10, 11], [0, 1, 1], 2)
    assert second[:5] == ([2, 0], [2, 0], [1, 2], [], 2)
    assert (first[5].exchanges, first[5].exchanged_bytes) == (3, 8 + 16)
    assert (second[5].exchanges, second[5].exchanged_bytes) == (3, 8 + 16 + 16)


def test_copies_of_several_ranks_sum_and_join_their_own_parts_and_send_rows_to_the_first_one() -> None:
    def work(links: RankLinks) -> Any:
        ranks, rank = links.serving, links.rank
        assert ranks is not None
        summed, total = ranks.sum(torch.full((1,), 10.0**rank)), ranks.total(torch.full((1,), 10.0**rank))
        joined = ranks.join(torch.full((1, 1), rank), (1, 1))
        counts = [1, 2]
        gathered = ranks.to_first(torch.full((counts[ranks.copy], 1), rank), counts)
        return (
            links.shard,
            ranks.copy,
            ranks.copies,
            int(summed),
            int(total),
            joined.tolist(),
            gathered.flatten().tolist(),
        )

    assert linked(Parallelism(tp=2, ep=4), work) == [
        (Shard(0, 2), 0, 2, 101, 1111, [[0, 2]], [0, 1, 1]),
        (Shard(0, 2), 1, 2, 1010, 1111, [[1, 3]], []),
        (Shard(1, 2), 0, 2, 101, 1111, [[0, 2]], [2, 3, 3]),
        (Shard(1, 2), 1, 2, 1010, 1111, [[1, 3]], []),
    ]


def test_stages_are_a_ring_in_which_each_sends_to_the_next() -> None:
    def work(links: RankLinks) -> Any:
        assert links.serving is not None
        pipe = links.serving.pipe
        assert pipe is not None
        steps = [pipe.next_step() for _ in range(2)]
        for step in steps:
            pipe.send(torch.full((4,), 10.0 * pipe.stage + step), step)
        heard = [pipe.receive(torch.empty(4), step)[0].item() for step in reversed(steps)]
        return links.stage, heard, pipe.is_first, pipe.is_last, pipe.sent

    assert linked(Parallelism(pp=3), work) == [
        (0, [21.0, 20.0], True, False, 32),
        (1, [1.0, 0.0], False, False, 32),
        (2, [11.0, 10.0], False, True, 32),
    ]


class Meeting:
    """Sends and receives of two ranks, ordered as by NCCL.

    Each rank has a queue, in which an operation waits for earlier ones and for its counterpart in the queue of the other rank.
    """

    def __init__(self, queues: "dict[str, list[list[str]]]", name: str, rank: int) -> None:
        self._queue = queues.setdefault(name, [[], []])[rank]

    def send(self, tensors: list[torch.Tensor], to: int, step: int) -> "Meeting":
        self._queue.append(f"send {step}")
        return self

    def recv(self, tensors: list[torch.Tensor], source: int, step: int) -> "Meeting":
        self._queue.append(f"receive {step}")
        return self

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        pass


def test_two_stages_never_wait_for_each_other_in_a_circle() -> None:
    """The first stage sends further steps before it receives the result of an earlier one from the last stage."""
    queues: dict[str, list[list[str]]] = {}
    first, last = (StagePipe(Meeting(queues, "forth", i), Meeting(queues, "back", i), i, 1, 2) for i in range(2))
    x = torch.empty(1)
    for step in range(3):  # as many steps as are in flight at once
        first.send(x, step)
    for step in range(3):
        last.receive(x, step)
        last.send(x, step)
        first.receive(x, step)
        first.send(x, step + 3)
    for ours, theirs in queues.values():
        for mine, other in zip(ours, theirs, strict=False):
            assert {mine.split()[0], other.split()[0]} == {"send", "receive"}, "each rank would wait for the other"
            assert mine.split()[1] == other.split()[1]


def test_a_lone_router_exchanges_nothing() -> None:
    alone, x = Communicator(None, WHOLE), torch.arange(3).unsqueeze(1)
    assert alone.total(x) is alone.from_rank(0, x) is alone.join(x, (1,)) is x
    assert alone.exchange(x, [3], [3]).tolist() == x.tolist()
    assert alone.exchange_counts(torch.tensor([3])) == ([3], [3])
    assert (alone.is_first, alone.copies, alone.exchanged) == (True, 1, Exchanged())
    assert (RankLinks().stage, RankLinks().rank) == (0, 0)
