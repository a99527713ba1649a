"""Registering host memory with a device, with a fake registrar: the order of calls, refusals, releases, and the end."""

import logging
import mmap
import threading
import time

import pytest
import torch

from pilotlight.engine.device.registered_memory import RegisteredMemory
from tests.engine.fake_registrar import REFUSAL, FakeRegistrar
from tests.waiting import until

PIECE = 4 * mmap.PAGESIZE
CUDA = torch.device("cuda")


def mapping(num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def test_a_mapping_is_registered_piece_by_piece_by_another_thread_and_unregistered_at_its_end() -> None:
    fake, memory = FakeRegistrar(), mapping(2 * PIECE + mmap.PAGESIZE)
    registered = RegisteredMemory(memory, CUDA, PIECE, registrar=fake)
    assert not registered.wait(0), "registration has not started"
    registered.start()
    registered.start()
    assert registered.wait(60)
    start, edges = memory.data_ptr(), (0, PIECE, 2 * PIECE)
    assert fake.registered == dict(zip((start + edge for edge in edges), (PIECE, PIECE, mmap.PAGESIZE), strict=True))
    assert fake.calls == ["register register-memory"] * 3
    assert registered.covers(0, len(memory))
    assert not registered.covers(0, len(memory) + 1)
    assert not registered.covers(-1, 5)
    assert not registered.covers(7, 7)
    assert [registered.covers_at_once(*part) for part in ((PIECE, 2 * PIECE), (2 * PIECE + 1, 2 * PIECE + 2))] == [
        True
    ] * 2
    size = len(memory)
    for start, end, expected in (
        (PIECE, 2 * PIECE, True), (2 * PIECE + 1, size, True), (size - 1, size + 1, False), (PIECE - 1, PIECE + 1, False),
        (-4, 0, False), (3 * PIECE, 3 * PIECE + 1, False),
    ):  # fmt: skip
        assert registered.covers_at_once(start, end) is expected, (start, end)
    assert list(registered.split(PIECE - 5, 2 * PIECE + 1)) == [
        (PIECE - 5, PIECE),
        (PIECE, 2 * PIECE),
        (2 * PIECE, 2 * PIECE + 1),
    ]
    assert list(registered.split(PIECE, 2 * PIECE)) == [(PIECE, 2 * PIECE)]
    registered.close()
    registered.close()
    assert (fake.registered, fake.calls[3:]) == ({}, ["unregister"] * 3)
    assert not registered.covers(0, 1)
    registered.start()
    assert not registered.wait(0.01)
    assert len(fake.calls) == 6


def test_registered_pieces_are_covered_while_the_rest_is_on_its_way_without_waiting() -> None:
    fake = FakeRegistrar()
    registered = RegisteredMemory(mapping(3 * PIECE), CUDA, PIECE, registrar=fake)
    registered.register(PIECE, PIECE + 1)
    until(lambda: registered.covers(PIECE, 2 * PIECE))
    fake.may_go_on.clear()
    registered.start()
    assert not registered.wait(0.01)
    assert registered.covers(PIECE + 3, 2 * PIECE)
    assert not registered.covers(PIECE - 1, PIECE + 1)
    fake.may_go_on.set()
    assert registered.wait(60)
    assert len(fake.calls) == 3, "no piece may be registered twice"
    registered.close()


def test_closing_waits_for_the_piece_under_way_and_begins_no_other() -> None:
    fake = FakeRegistrar()
    registered = RegisteredMemory(mapping(3 * PIECE), CUDA, PIECE, registrar=fake)
    fake.may_go_on.clear()
    registered.start()
    assert fake.started.acquire(timeout=60)
    closing = threading.Thread(target=registered.close)
    closing.start()
    closing.join(0.02)
    assert closing.is_alive()
    fake.may_go_on.set()
    closing.join(10)
    assert fake.calls == ["register register-memory", "unregister"]
    assert fake.registered == {}


def test_a_refusal_is_logged_once_and_earlier_registrations_stay(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeRegistrar(limit=2)
    registered = RegisteredMemory(mapping(256 * PIECE), CUDA, PIECE, registrar=fake)
    registered.start()
    assert not registered.wait(10)
    assert registered.covers(0, 2 * PIECE)
    assert not registered.covers(2 * PIECE, 2 * PIECE + 1)
    registered.register(5 * PIECE, 6 * PIECE)
    assert not registered.wait(0.01)
    assert len(fake.calls) == 3, "nothing is registered after a refusal"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "4.0 MiB" in caplog.text
    assert REFUSAL in caplog.text
    registered.close()
    assert fake.registered == {}


def test_a_cpu_and_a_device_without_its_library_have_nothing_registered(caplog: pytest.LogCaptureFixture) -> None:
    for device, said in (torch.device("cpu"), 0), (torch.device("cuda:0"), 1):
        if device.type == "cuda" and torch.version.cuda:
            continue
        registered = RegisteredMemory(mapping(PIECE), device)
        registered.start()
        assert not registered.wait(10)
        assert not registered.covers(0, 1)
        registered.release(0, PIECE)
        registered.close()
        assert len(caplog.records) == said


def test_a_released_piece_is_covered_no_more_and_unregistered_once_nothing_is_in_use() -> None:
    fake = FakeRegistrar()
    registered = RegisteredMemory(mapping(3 * PIECE), CUDA, PIECE, registrar=fake)
    registered.start()
    assert registered.wait(60)
    with registered.in_use():
        registered.release(PIECE + 1, PIECE + 2)
        assert (registered.covers(0, PIECE), registered.covers(PIECE, PIECE + 1)) == (True, False)
        registered.register(PIECE, PIECE + 1)
        time.sleep(0.02)
        assert len(fake.registered) == 3, "a copy from it may be under way"
    until(lambda: registered.covers(PIECE, PIECE + 1))
    assert fake.calls[3:] == ["unregister", "register register-memory"], (
        "a released piece is registered again, as its pages may have changed"
    )
    registered.release(0, 3 * PIECE)
    until(lambda: not fake.registered)
    registered.close()
    assert fake.calls.count("unregister") == 4


def test_a_piece_that_is_released_while_it_is_registered_is_never_covered() -> None:
    fake = FakeRegistrar()
    registered = RegisteredMemory(mapping(2 * PIECE), CUDA, PIECE, registrar=fake)
    fake.may_go_on.clear()
    registered.start()
    assert fake.started.acquire(timeout=60)
    registered.release(0, 2 * PIECE)  # the second piece is not registered yet, and now never will be
    fake.may_go_on.set()
    until(lambda: len(fake.calls) == 2)
    assert (fake.calls, fake.registered) == (["register register-memory", "unregister"], {})
    assert not registered.wait(10)
    assert not registered.covers(0, 1)
    registered.close()
    assert len(fake.calls) == 2
