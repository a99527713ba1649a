"""Asynchronous copies between host and device, in the order of this thread's launches.

copy_stream.py has those beside them. On a CPU nothing is copied. On a GPU an ordinary copy makes the host wait (of pageable memory, there is no
other), so sources are pinned first, and results may only be read after a `Mark`.
"""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device."""
    if device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to_device(tensor: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a host tensor to the place of a device tensor."""
    if into.device.type == "cpu":
        into.copy_(tensor)
    else:
        into.copy_(tensor.pin_memory(), non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which has the values after a later `Mark` has been reached."""
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
