"""A host's preparation before it knows a model: imports, the kernels' library, the device's context.

A standby also runs each kind of work once, because the first run in a process is slow. It does all of this in a thread of lower priority, to leave
the cores to processes that serve. This module is independent of checkpoints and sockets, and imports torch only when it is called.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import VERSION, HostConfig, HostReady
from pilotlight.engine.core.phases import Phases
from pilotlight.engine.device.fallbacks import fallbacks
from pilotlight.engine.host.process import at_low_priority

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def prepare(
    config: HostConfig, is_standby: bool, import_libraries: Callable[[], None], root: Path = Path("/")
) -> HostReady:
    """Prepare the process to load a model. Raises any error of an import or a device.

    `root`: the folder with the machine's device files, `dev`.
    """
    if is_standby:
        return at_low_priority(lambda: _prepare(config, is_standby, import_libraries, root))
    return _prepare(config, is_standby, import_libraries, root)


def _prepare(config: HostConfig, is_standby: bool, import_libraries: Callable[[], None], root: Path) -> HostReady:
    phases = Phases()
    import_libraries()
    import torch

    from pilotlight.engine.device.device import choose_device
    from pilotlight.kernels.cpu import library
    from pilotlight.kernels.dispatch import takes_triton

    phases.end("import")
    device = choose_device(config.device)
    weights_bytes = None
    if device.type == "cuda":
        torch.zeros(1, device=device)
        from pilotlight.engine.planning.memory_plan import weights_limit

        # The total memory, not the free one: the host that this one replaces may still hold its memory.
        _, total = torch.cuda.mem_get_info(device)
        weights_bytes = weights_limit(config, total)
    else:
        library.start()
    slower = fallbacks(config, device, has_triton=takes_triton(), root=root)
    for sentence in slower:
        log.warning("%s", sentence)
    phases.end("device")
    if is_standby:
        _warm_up(device)
        phases.end("warm_up")
    return HostReady(VERSION, phases.spent, weights_bytes, tuple(slower))


def _warm_up(device: "torch.device") -> None:
    """Run one small instance of what a load and a first step use, to start oneDNN, cuBLAS and others."""
    import safetensors  # noqa: F401
    import torch

    with torch.inference_mode():
        ids = torch.arange(8, device=device)
        torch.outer(ids.float(), ids.float()).sin().cos().max(-1)  # as in a rotary table and a choice from logits
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.nn.functional.embedding(ids, torch.ones(8, 64, dtype=dtype, device=device))
            product = torch.nn.functional.linear(rows, torch.ones(64, 64, dtype=dtype, device=device)).float()
            torch.softmax(product, -1).topk(4).indices.sort()
            torch.cat([product, product.cumsum(-1)])[torch.tensor([0, 1], device=device)].argmax(-1).tolist()
