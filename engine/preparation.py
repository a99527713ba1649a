"""What an engine host does before it knows a model: imports, the kernels' library, the device's context.

A standby also runs each kind of work once, because the first of a process is the slow one, and does all of it in a thread of lower priority:
it is not waited for, and the cores belong to those who are waited for. Refuses to know checkpoints and sockets; imports no torch until it is called.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from engine.fallbacks import fallbacks
from engine.protocol import VERSION, HostConfig, HostReady

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

# torch's idle threads would look for work for milliseconds, on the cores that the CPU library's threads compute on.
SPIN_COUNT = "1000"
# Steps of Linux's "nice": a thread of one above has three times this one's share of a core they both want. More steps, and a standby of a
# machine that is never idle would not be ready within a minute.
_STEPS_BACK = 5


def configure_process() -> None:
    """Set what libraries read when they are imported, before anything else in a process that is an engine host's alone. Numpy gets no threads of
    its own: nothing there computes with it."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def import_libraries() -> None:
    """Import what every host imports, whatever its configuration says. What modules are made of is never garbage: looking for some meanwhile takes an
    eighth of the time, and a look at all of it later is a pause of 50 ms between two steps."""
    gc.disable()
    try:
        import engine.loading  # noqa: F401
        import kernels.cpu.library  # noqa: F401

        gc.freeze()
    finally:
        gc.enable()


def prepare(config: HostConfig, is_standby: bool) -> HostReady:
    """Make the process ready to load a model. Raises whatever an import or a device raises."""
    return at_low_priority(lambda: _prepare(config, is_standby)) if is_standby else _prepare(config, is_standby)


def at_low_priority(work: Callable[[], T]) -> T:
    """Call `work` in a thread of lower priority that ends with it: those that serve later keep the process's priority. Raises what it raises."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        # there a thread has a priority of its own, which only a privileged one may raise again
        if sys.platform == "linux":
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + _STEPS_BACK))
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="preparation", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _prepare(config: HostConfig, is_standby: bool) -> HostReady:
    clock = _StageClock()
    import_libraries()
    import torch

    from engine.kv_memory import choose_device
    from kernels.cpu import library
    from kernels.dispatch import takes_triton

    clock.note("import")
    device = choose_device(config.device)
    weights_bytes = None
    if device.type == "cuda":
        torch.zeros(1, device=device)
        from engine.planning.memory import weights_limit

        # Of all that there is: a host that follows another one is prepared while that still holds its memory.
        _, total = torch.cuda.mem_get_info(device)
        weights_bytes = weights_limit(config, total)
    else:
        library.start()
    slower = fallbacks(config, device, has_triton=takes_triton())
    for sentence in slower:
        log.warning("%s", sentence)
    clock.note("device")
    if is_standby:
        _warm_up(device)
        clock.note("warm_up")
    return HostReady(VERSION, tuple(clock.phases), weights_bytes, tuple(slower))


def _warm_up(device: "torch.device") -> None:
    """Run one small instance of what a load and a first step use: libraries behind them (oneDNN, cuBLAS) start at their first use."""
    import safetensors  # noqa: F401
    import torch

    with torch.inference_mode():
        ids = torch.arange(8, device=device)
        torch.outer(ids.float(), ids.float()).sin().cos().max(-1)  # as positions are turned, and logits looked at
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.nn.functional.embedding(ids, torch.ones(8, 64, dtype=dtype, device=device))
            product = torch.nn.functional.linear(rows, torch.ones(64, 64, dtype=dtype, device=device)).float()
            torch.softmax(product, -1).topk(4).indices.sort()
            torch.cat([product, product.cumsum(-1)])[torch.tensor([0, 1], device=device)].argmax(-1).tolist()


class _StageClock:
    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []
        self._last = time.perf_counter()

    def note(self, name: str) -> None:
        now = time.perf_counter()
        self.phases.append((name, now - self._last))
        self._last = now
