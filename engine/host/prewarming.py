"""Preparation of a GPU standby for the models of the host that it may replace.

On an H100, the first load of an 8B model in a process takes seconds longer than the second one, mostly for kernels and for copies of memory that the
device cannot access directly.
"""

from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.device.device import choose_device
from pilotlight.engine.kv.arena import Arena
from pilotlight.engine.loading.opened_source import opened_source


def prewarm(spec: ModelSpec, host: HostConfig) -> None:
    """Load a model's kernels onto the device, and register the memory of its sleeping weights with it.

    On a CPU there is nothing to do, and ranks of a group have no sleeping weights. Raises any error of a load.
    """
    device = choose_device(host.device)
    if device.type != "cuda" or len(host.group) > 1:
        return
    with opened_source(spec, host, Arena(0, device), None) as loading:
        loading.prewarm()
