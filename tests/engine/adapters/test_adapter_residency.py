"""Adapters in the slots of a device and in host memory: no request waits for ever, and no adapter in use is evicted."""

import threading
import time
from concurrent.futures import Future
from random import Random
from typing import Any

import pytest

from pilotlight.engine.adapters.adapter_residency import READ_S, AdapterResidency, AwaitedAdapter
from pilotlight.engine.adapters.peft import AdapterError
from pilotlight.engine.api.protocol import AdapterSource, ModelInfo, SamplingParams
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.requirements import Requirements
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.grammar.constraints import COMPILE_S
from pilotlight.engine.grammar.token_masks import AwaitedGrammar
from pilotlight.engine.scheduling.awaited import AwaitedTogether
from pilotlight.engine.scheduling.waiting import WaitingSequences


class FakeStore:
    """A store whose slots hold only the adapters' digests. Reading the adapter `slow` takes until `go` is set."""

    def __init__(self, num_slots: int, host_bytes: int = 1000) -> None:
        self.num_slots, self.host_bytes = num_slots, host_bytes
        self.slots: dict[int, str] = {}
        self.reads: list[str] = []
        self.go = threading.Event()
        self.full = False

    def announce(self, source: AdapterSource) -> None: ...

    def read(self, source: AdapterSource) -> str:
        self.reads.append(source.digest)
        if source.digest == "slow":
            assert self.go.wait(60)
        if source.digest == "bad":
            raise AdapterError("it is of another model")
        if source.digest == "broken":
            raise OSError("input/output error")
        return source.digest

    def num_bytes(self, content: str) -> int:
        return 100

    def place(self, slot: int, source: AdapterSource, content: str) -> None:
        if self.full:
            raise AdapterError("there is no memory")
        assert content == source.digest
        self.slots[slot] = content


def sequence(digest: str) -> Sequence:
    adapter = AdapterSource(digest, "", digest)
    return Sequence(digest, [1, 2], SamplingParams(1), b"", adapter=adapter)


def asked(residency: AdapterResidency, digest: str) -> tuple[Sequence, AwaitedAdapter | None]:
    one = sequence(digest)
    return one, residency.awaited(one, lambda: 0.0)


def got(awaited: AwaitedAdapter | None, within_s: float = 5.0) -> Sequence:
    """Wait until the adapter is loaded, as the scheduler does; return its sequence."""
    assert awaited is not None
    until = time.monotonic() + within_s
    while not awaited.is_done:
        assert time.monotonic() < until
        time.sleep(0.001)
    awaited.take()
    return awaited.sequence


def read(awaited: AwaitedAdapter | None) -> AwaitedAdapter:
    assert awaited is not None
    until = time.monotonic() + 5
    while not awaited.is_read:
        assert time.monotonic() < until
        time.sleep(0.001)
    return awaited


def test_an_adapter_in_a_slot_is_not_waited_for() -> None:
    store = FakeStore(2)
    residency = AdapterResidency("m", store)
    first = got(asked(residency, "a")[1])
    second, awaited = asked(residency, "a")
    assert awaited is None
    assert second.adapter_slot == first.adapter_slot
    assert store.slots[first.adapter_slot] == "a"
    assert residency.num_loads == 1


def test_a_plain_sequence_waits_for_nothing() -> None:
    residency = AdapterResidency("m", FakeStore(1))
    assert residency.awaited(Sequence("s", [1], SamplingParams(1), b""), lambda: 0.0) is None


def test_the_slot_unused_for_longest_is_taken() -> None:
    store = FakeStore(2)
    residency = AdapterResidency("m", store)
    a, b = got(asked(residency, "a")[1]), got(asked(residency, "b")[1])
    slot = b.adapter_slot
    residency.release(a)
    residency.release(b)
    residency.release(asked(residency, "a")[0])
    c = got(asked(residency, "c")[1])
    assert c.adapter_slot == slot, "adapter a was used more recently than b"
    assert asked(residency, "a")[1] is None


def test_a_slot_that_is_held_is_never_taken() -> None:
    store = FakeStore(1)
    residency = AdapterResidency("m", store)
    a = got(asked(residency, "a")[1])
    awaited = read(asked(residency, "b")[1])
    assert not awaited.is_done
    assert store.slots == {0: "a"}
    residency.release(a)
    assert got(awaited).adapter_slot == 0
    assert store.slots == {0: "b"}


def test_no_request_waits_for_ever_after_newcomers_of_a_popular_adapter() -> None:
    residency = AdapterResidency("m", FakeStore(1))
    held = [got(asked(residency, "a")[1])]
    awaited = read(asked(residency, "b")[1])
    assert not awaited.is_done
    late, late_awaited = asked(residency, "a")
    assert late_awaited is not None, "a later request for `a` must wait although `a` is loaded"
    assert not late_awaited.is_done
    residency.release(held.pop())
    assert awaited.is_done
    b = got(awaited)
    assert not late_awaited.is_done
    residency.release(b)
    assert got(late_awaited) is late


def test_if_the_waiting_requests_have_gone_a_popular_adapter_continues() -> None:
    residency = AdapterResidency("m", FakeStore(1))
    held = got(asked(residency, "a")[1])
    awaited = read(asked(residency, "b")[1])
    assert not awaited.is_done
    awaited.cancel()
    assert got(asked(residency, "a")[1]).adapter_slot == held.adapter_slot


def test_a_load_is_shared_and_kept_in_host_memory() -> None:
    store = FakeStore(1, host_bytes=250)
    residency = AdapterResidency("m", store)
    for digest in ("a", "b", "a", "c", "d", "a"):
        residency.release(got(asked(residency, digest)[1]))
    assert store.reads == ["a", "b", "c", "d", "a"], "host memory keeps two adapters"
    assert residency.num_loads == 6


@pytest.mark.parametrize("digest", ["bad", "broken"])
def test_an_adapter_that_cannot_be_read_says_so_and_is_read_again(digest: str) -> None:
    store = FakeStore(1)
    residency = AdapterResidency("m", store)
    for times in (1, 2):
        failed = got(asked(residency, digest)[1])
        assert failed.adapter_slot == -1
        why = "it is of another model" if digest == "bad" else "OSError: input/output error"
        assert failed.why_unadapted == f"adapter {digest!r} cannot be used: {why}"
        assert store.reads.count(digest) == times
    assert got(asked(residency, "a")[1]).adapter_slot == 0


def test_all_who_wait_for_an_adapter_hear_why_it_cannot_be_read() -> None:
    residency = AdapterResidency("m", FakeStore(1))
    got(asked(residency, "a")[1])  # this sequence holds the only slot
    waiting = [asked(residency, "bad")[1] for _ in range(2)]
    assert [got(one).why_unadapted for one in waiting] == ["adapter 'bad' cannot be used: it is of another model"] * 2


def test_an_adapter_that_failed_without_waiting_requests_is_read_again() -> None:
    store = FakeStore(1)
    residency = AdapterResidency("m", store)
    _, awaited = asked(residency, "bad")
    read(awaited).cancel()
    assert "another model" in got(asked(residency, "bad")[1]).why_unadapted
    assert store.reads == ["bad", "bad"]


def test_a_slot_that_could_not_be_filled_is_free_again() -> None:
    store = FakeStore(1)
    residency = AdapterResidency("m", store)
    store.full = True
    assert "there is no memory" in got(asked(residency, "a")[1]).why_unadapted
    store.full = False
    assert got(asked(residency, "a")[1]).adapter_slot == 0


def test_a_disk_that_does_not_answer_is_waited_for_so_long() -> None:
    store = FakeStore(1)
    residency = AdapterResidency("m", store)
    one, awaited = asked(residency, "slow")
    assert awaited is not None
    assert awaited.deadline == READ_S
    awaited.cancel()
    awaited.take()
    assert one.why_unadapted == f"adapter 'slow' could not be read within {READ_S:g} s"
    assert got(asked(residency, "a")[1]).adapter_slot == 0, "other adapters are unaffected"
    store.go.set()


def test_a_grammar_and_an_adapter_are_waited_for_together() -> None:
    class Grammar:
        is_admitted, deadline, num_tokens = False, 10.0, 2
        is_done = taken = False

        def __init__(self, sequence: Sequence) -> None:
            self.sequence = sequence

        def cancel(self) -> None: ...

        def take(self) -> None:
            self.taken = True

    residency = AdapterResidency("m", FakeStore(1))
    one, adapter = asked(residency, "a")
    grammar = Grammar(one)
    assert adapter is not None
    both = AwaitedTogether((grammar, adapter))
    read(adapter)
    assert (both.is_done, both.deadline, both.sequence, both.num_tokens) == (False, 10.0, one, 2)
    grammar.is_done = True
    assert both.is_done
    both.take()
    assert (one.adapter_slot, grammar.taken) == (0, True)
    both.cancel()


def test_a_sequence_whose_grammar_is_compiled_waits_for_a_slot_as_long_as_one_without_a_grammar() -> None:
    residency = AdapterResidency("m", FakeStore(1))
    held = got(asked(residency, "a")[1])
    one, adapter = asked(residency, "b")
    read(adapter)
    assert adapter is not None
    compiled: Future[Any] = Future()
    waiting = WaitingSequences(64)
    waiting.add(one, None, AwaitedTogether((AwaitedGrammar(one, compiled, 0.0), adapter)))
    compiled.set_result(None)
    assert list(waiting.take_admitted(2 * COMPILE_S)) == []
    assert (one in waiting.awaiting, one.why_unadapted) == (True, ""), "another sequence still holds the only slot"
    residency.release(held)
    assert list(waiting.take_admitted(2 * COMPILE_S)) == []
    assert (waiting.ready.peek(), one.adapter_slot) == (one, 0)


def test_a_sequence_awaits_what_it_asks_for_and_no_more() -> None:
    model = ModelInfo("m", 16, 100, (), "float32", 4, total_blocks=8, weights_bytes=0, load_s=0.0)
    open_sequences = OpenSequences(lambda sequence: None)
    needs = Requirements(model, open_sequences, lambda: 0.0, None, FakeStore(1), None)
    assert needs.awaited(Sequence("plain", [1, 2], SamplingParams(1), b"")) is None
    assert isinstance(needs.awaited(sequence("a")), AwaitedAdapter)
    needs.close()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_request_gets_its_adapter(seed: int) -> None:
    draw, store = Random(seed), FakeStore(3, host_bytes=400)
    residency = AdapterResidency("m", store)
    waiting: list[AwaitedAdapter] = []
    running: list[Sequence] = []
    served = 0
    for _ in range(400):
        event = draw.random()
        if event < 0.4 and len(waiting) + len(running) < 20:
            one, awaited = asked(residency, str(int(draw.paretovariate(0.7)) % 40))
            waiting += [read(awaited) if draw.random() < 0.8 else awaited] if awaited is not None else []
            running += [one] if awaited is None else []
        elif event < 0.5 and waiting:
            waiting.pop(draw.randrange(len(waiting))).cancel()
        elif running:
            residency.release(running.pop(draw.randrange(len(running))))
        for awaited in list(waiting):
            if awaited.is_done:
                awaited.take()
                waiting.remove(awaited)
                running.append(awaited.sequence)
                served += 1
        for one in running:
            assert one.adapter is not None
            assert store.slots[one.adapter_slot] == one.adapter.digest
    until = time.monotonic() + 10
    while waiting:
        assert time.monotonic() < until, "a request waits for ever"
        while running:
            residency.release(running.pop())
        for awaited in list(waiting):
            if awaited.is_done:
                awaited.take()
                waiting.remove(awaited)
                running.append(awaited.sequence)
    assert served > 20
    assert residency._waiting == []
