"""Recording a step as a CUDA graph, with a fake torch.cuda that knows only streams and captures: beside threads that load, and with captures that
fail.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pilotlight.engine.execution.decode_graphs import CudaRecorder


class FakeCuda:
    """A fake of torch.cuda.

    `fails` is the part that raises in the next capture, "forward" or "end". Functions that disturb other threads or wait for the device are missing,
    so that their use fails.
    """

    def __init__(self) -> None:
        self.serving = SimpleNamespace(name="serving", waits_for=[])
        self.serving.wait_stream = self.serving.waits_for.append
        self.current: Any = self.serving
        self.streams: list[Any] = []
        self.modes: list[str] = []
        self.is_capturing = False
        self.fails: str | None = None

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    def Stream(self) -> Any:
        made = SimpleNamespace(name=f"side {len(self.streams)}", waits_for=[])
        made.wait_stream = made.waits_for.append
        self.streams.append(made)
        return made

    def current_stream(self) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(capture_begin=self._begin, capture_end=self._end, replay=lambda: None)

    def _begin(self, pool: Any, capture_error_mode: str = "global") -> None:
        assert self.current is not self.serving, "the legacy stream cannot be captured"
        self.modes.append(capture_error_mode)
        self.is_capturing = True

    def _end(self) -> None:
        self.is_capturing = False
        if self.fails == "end":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def forward(self) -> tuple[torch.Tensor]:
        if self.is_capturing and self.fails == "forward":
            raise RuntimeError("CUDA out of memory")
        return (torch.ones(2),)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def test_a_recording_forbids_other_threads_nothing_and_waits_for_no_device(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(cuda)
    assert recorder.record(cuda.forward).output[0].tolist() == [1, 1]
    recorder.record(cuda.forward)
    assert cuda.modes == ["thread_local", "thread_local"]
    assert len(cuda.streams) == 1, "each stream keeps separate workspaces"
    (side,) = cuda.streams
    assert cuda.serving in side.waits_for, "the first run must wait for earlier work"
    assert side in cuda.serving.waits_for
    assert cuda.current is cuda.serving


@pytest.mark.parametrize("fails", ["forward", "end"])
def test_after_a_capture_that_failed_the_engine_is_on_its_own_stream_and_the_next_one_works(
    cuda: FakeCuda, fails: str
) -> None:
    recorder = CudaRecorder(cuda)
    cuda.fails = fails
    with pytest.raises(RuntimeError):
        recorder.record(cuda.forward)
    assert cuda.current is cuda.serving
    assert not cuda.is_capturing
    assert cuda.streams[0] in cuda.serving.waits_for
    cuda.fails = None
    recorder.record(cuda.forward)
