"""Asynchronous copies between host and device, in the order of this thread's launches.

Copies that run beside computation are in copy_stream.py. On a CPU nothing is copied. On a GPU the host would wait for a copy of pageable memory, so
sources are pinned first, and results may only be read after a `Mark`.
"""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device of a host tensor."""
    if device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to_device(tensor: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a host tensor into a device tensor."""
    if into.device.type == "cpu":
        into.copy_(tensor)
    else:
        into.copy_(tensor.pin_memory(), non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host copy of a tensor, whose values are valid once a later `Mark` is reached."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class Mark:
    """A place in the device's queue of work."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has done everything that was queued before the mark."""
        if self._event is not None:
            self._event.synchronize()
