"""A checkpoint's fingerprint: what tells one set of weights from another without reading them all.

Keys and values may be used again only with the very weights that computed them. The digest covers config.json, and of every safetensors file
its name, size, time of change, header and a sample of its data: tens of milliseconds where a full digest would take as long as loading. The
time of change catches an edit between the samples; files that were merely copied anew cost a cold cache, not a wrong answer.
"""

import os
from hashlib import blake2b
from pathlib import Path

_SAMPLES = 16  # of each file, evenly spread
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 1 << 20  # of a header of a hundred thousand tensors this much is telling enough


def fingerprint(directory: Path) -> bytes:
    """The directory must hold a checkpoint; raises OSError where it cannot be read."""
    digest = blake2b(digest_size=32)
    digest.update(blake2b((directory / "config.json").read_bytes()).digest())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(_of_file(file))
    return digest.digest()


def _of_file(file: Path) -> bytes:
    digest = blake2b(digest_size=32)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state = os.fstat(fd)
        digest.update(repr((file.name, state.st_size, state.st_mtime_ns)).encode())
        header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
        digest.update(os.pread(fd, min(header_bytes, _MAX_HEADER_BYTES), 8))
        for i in range(_SAMPLES):
            digest.update(os.pread(fd, _SAMPLE_BYTES, max(0, state.st_size * (i + 1) // _SAMPLES - _SAMPLE_BYTES)))
    finally:
        os.close(fd)
    return digest.digest()
