"""Whether a file lies on a disk of this machine, as far as the system tells.

A page of a mapped file may be asked for at any time: over a network it may come late or not at all, and then a step hangs or the process ends.
"""

import os
import sys
from pathlib import Path

# Of Linux's names for them. What a program serves ("fuse", "fuse.sshfs") may come from anywhere.
_REMOTE = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
    "pvfs2", "smb3", "smbfs", "virtiofs",
})  # fmt: skip


def is_local(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """False where it cannot be known."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        kind = _kind(os.path.realpath(path), mounts.read_text())
    except OSError:
        return False
    return kind is not None and kind not in _REMOTE and not kind.startswith("fuse.")


def _kind(path: str, mounts: str) -> str | None:
    """Of the file system that is mounted deepest above `path`; of two at one place the later one hides the other."""
    deepest, kind = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = fields[4].encode().decode("unicode_escape").encode("latin-1").decode()  # spaces are written \\040
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= deepest:
            deepest, kind = len(point), after.split(" ")[0]
    return kind
