"""One allocation for the KV caches of all models of a host, cut into equal slabs.

lease.py decides who owns a slab; this module is independent of blocks and models. A slab is zeroed when it changes owners: attention masks the
positions after a context, but a NaN left there by the previous owner would survive the mask (0 * NaN).
"""

import mmap

import torch

# A slab consists of whole pages, so that a CPU arena can return them to the operating system.
ALIGNMENT = mmap.PAGESIZE
# Limits of the number of slabs and of a slab's bytes. Smaller slabs move more often; larger ones pin more memory for one held block. 32 slabs divide
# evenly enough among a few models, and in the default arena of 256 MiB allow blocks of up to 4 MiB, half a slab (34 layers, 4 heads of 256). A slab
# above 64 MiB would hold whole contexts, so a larger arena has more slabs instead.
MIN_SLABS = 32
MAX_SLAB_BYTES = 64 << 20
MIN_SLAB_BYTES = 64 << 10


class Arena:
    def __init__(self, total_bytes: int, device: torch.device) -> None:
        self.device = device
        self.total_bytes = total_bytes
        self.num_slabs, self.slab_bytes = cut_slabs(total_bytes)
        self._pages = _anonymous_pages(total_bytes) if device.type == "cpu" and total_bytes else None
        if self._pages is not None:
            self._memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
            self._memory = torch.zeros(total_bytes, dtype=torch.uint8, device=device)

    def span(self, first_slab: int, num_bytes: int) -> torch.Tensor:
        """Return the memory from the start of a slab: [num_bytes] uint8."""
        start = first_slab * self.slab_bytes
        assert start + num_bytes <= self.total_bytes
        return self._memory[start : start + num_bytes]

    def clear(self, slab: int) -> None:
        """Zero a slab that no model uses."""
        start = slab * self.slab_bytes
        if self._pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Linux frees the pages of a private map and returns zeros at the next access, so a sleeping model costs no memory.
            self._pages.madvise(mmap.MADV_DONTNEED, start, self.slab_bytes)
        else:
            self._memory[start : start + self.slab_bytes].zero_()


def cut_slabs(total_bytes: int) -> tuple[int, int]:
    """Return the number and size of the slabs; the unused remainder is less than a page per slab."""
    wanted = max(MIN_SLABS, -(-total_bytes // MAX_SLAB_BYTES))
    number = max(1, min(wanted, total_bytes // MIN_SLAB_BYTES))
    size = total_bytes // number // ALIGNMENT * ALIGNMENT
    return (number, size) if size else (0, 0)


def _anonymous_pages(num_bytes: int) -> mmap.mmap:
    """Allocate zeroed memory whose pages become resident only when they are written.

    torch.zeros would write all of it, which makes 256 MiB resident per idle host.
    """
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)
