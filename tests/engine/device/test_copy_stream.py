"""Copies that run beside the computation: by a GPU's copy engines if there is a GPU, else by a fake stream that copies late."""

from types import SimpleNamespace

import pytest
import torch
from torch.cuda._utils import _get_device_index

from pilotlight.engine.device.copy_stream import CudaCopyStream, copying
from tests.engine.fake_copy_stream import FakeCopyStream

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NUM_BYTES = (32 << 20) if HAS_GPU else 4096
HALF = NUM_BYTES // 2


@pytest.fixture
def stream() -> CudaCopyStream | FakeCopyStream:
    return CudaCopyStream(DEVICE) if HAS_GPU else FakeCopyStream()


def keep_busy() -> None:
    """Give the device work for a tenth of a second."""
    if HAS_GPU:
        torch.cuda._sleep(200_000_000)


def test_what_was_launched_before_the_mark_is_copied_and_is_there_at_the_end(stream: CudaCopyStream) -> None:
    there, here = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=DEVICE), stream.allocate(NUM_BYTES)
    here.fill_(1)
    keep_busy()
    there.fill_(7)
    with copying(stream, stream.mark()):
        stream.begin_copy(here.data_ptr(), there.data_ptr(), NUM_BYTES)
    assert bool((here == 7).all())


def test_what_was_launched_before_the_mark_does_not_overwrite_what_is_copied(stream: CudaCopyStream) -> None:
    there, here = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=DEVICE), stream.allocate(NUM_BYTES)
    here.fill_(9)
    keep_busy()
    there.fill_(7)
    with copying(stream, stream.mark()):
        stream.begin_copy(there.data_ptr() + HALF, here.data_ptr() + HALF, HALF)
    assert bool((there[HALF:] == 9).all())
    assert bool((there[:HALF] == 7).all())


def test_an_error_leaves_no_copy_under_way(stream: CudaCopyStream) -> None:
    there, here = torch.full((NUM_BYTES,), 5, dtype=torch.uint8, device=DEVICE), stream.allocate(NUM_BYTES)
    here.fill_(0)
    keep_busy()

    def copy_and_fail() -> None:
        with copying(stream, stream.mark()):
            stream.begin_copy(here.data_ptr(), there.data_ptr(), NUM_BYTES)
            raise ValueError("no slot")

    with pytest.raises(ValueError, match="no slot"):
        copy_and_fail()
    assert bool((here == 5).all())


def test_started_work_can_be_waited_for_before_the_end(stream: CudaCopyStream) -> None:
    there, here = torch.full((NUM_BYTES,), 5, dtype=torch.uint8, device=DEVICE), stream.allocate(NUM_BYTES)
    here.fill_(0)
    keep_busy()
    with copying(stream, stream.mark()):
        stream.begin_copy(here.data_ptr(), there.data_ptr(), HALF)
        stream.started().synchronize()
        assert bool((here[:HALF] == 5).all())
        stream.begin_copy(here.data_ptr() + HALF, there.data_ptr() + HALF, HALF)
    assert bool((here[HALF:] == 5).all())


class FakeEvent:
    def record(self, stream: SimpleNamespace) -> None:
        stream.events.append(self)


def test_a_device_without_a_number_is_the_one_that_its_stream_is_of() -> None:
    """Torch refuses to select a device without a number for a thread, but "auto" and "cuda" give none."""
    chosen: list[int] = []
    side = SimpleNamespace(device=torch.device("cuda", 0), events=[], waits_for=[])
    side.wait_event = side.waits_for.append
    serving = SimpleNamespace(events=[])
    cuda = SimpleNamespace(
        Stream=lambda device: side,
        Event=FakeEvent,
        current_stream=lambda device: serving,
        set_device=lambda device: chosen.append(_get_device_index(device)),
    )
    made = CudaCopyStream(torch.device("cuda"), cuda, runtime_of=lambda device: None)
    made.wait_for(made.mark())
    assert chosen == [0]
    assert side.waits_for == serving.events
