"""Opens the files of checkpoints and adapters, and refuses anything that is not a regular file.

Opening a pipe would block forever, and a device could do anything: both raise OSError instead.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 256 << 20  # most bytes of a file that is read into memory; the largest are tokenizers of some 35 MB


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes. Raises OSError."""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return fd


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most_bytes`. Raises OSError."""
    with open_file(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    return content


def read_text(path: Path) -> str:
    """Return the text of a file of at most `MOST_BYTES`. Raises OSError, UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8")
