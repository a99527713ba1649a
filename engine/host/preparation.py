"""What an engine host does before it knows a model: imports, the kernels' library, the device's context.

A standby also runs each kind of work once, because the first of a process is the slow one, and does all of it in a thread of lower priority:
it is not waited for, and the cores belong to those who are waited for. Refuses to know checkpoints and sockets; imports no torch until it is called.
"""

import gc
import logging
import time
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import VERSION, HostConfig, HostReady
from pilotlight.engine.device.fallbacks import fallbacks
from pilotlight.engine.host.process import at_low_priority

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def import_libraries() -> None:
    """Import what every host imports, whatever its configuration says. What modules are made of is never garbage: looking for some meanwhile takes an
    eighth of the time, and a look at all of it later is a pause of 50 ms between two steps."""
    gc.disable()
    try:
        import pilotlight.engine.loading.loading
        import pilotlight.kernels.cpu.library  # noqa: F401

        gc.freeze()
    finally:
        gc.enable()


def prepare(config: HostConfig, is_standby: bool) -> HostReady:
    """Make the process ready to load a model. Raises whatever an import or a device raises."""
    return at_low_priority(lambda: _prepare(config, is_standby)) if is_standby else _prepare(config, is_standby)


def _prepare(config: HostConfig, is_standby: bool) -> HostReady:
    clock = _StageClock()
    import_libraries()
    import torch

    from pilotlight.engine.device.device import choose_device
    from pilotlight.kernels.cpu import library
    from pilotlight.kernels.dispatch import takes_triton

    clock.note("import")
    device = choose_device(config.device)
    weights_bytes = None
    if device.type == "cuda":
        torch.zeros(1, device=device)
        from pilotlight.engine.planning.memory_plan import weights_limit

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
