"""Makes a host ready for a model that it may have to load: a standby of a GPU, for those that the host serves whose place it may take.

Measured on an H100, 8B: the first load of a process takes seconds longer than the second one, most of it for kernels and for copying what the device
does not reach by itself.
"""

from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.device.device import choose_device
from pilotlight.engine.kv.arena import Arena
from pilotlight.engine.loading.model_loading import opened_source


def prewarm(spec: ModelSpec, host: HostConfig) -> None:
    """Load a model's kernels onto the host's device, and have the memory in which its weights sleep registered with it. On a CPU nothing is to be
    done, and ranks of a group have no weights that sleep. Raises whatever a load raises."""
    device = choose_device(host.device)
    if device.type != "cuda" or len(host.group) > 1:
        return
    with opened_source(spec, host, Arena(0, device), None) as loading:
        loading.prewarm()
