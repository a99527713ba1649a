"""Pack a function's folder as a bundle, an immutable tar named by its SHA-256, and unpack bundles.

The same files make the same bytes on every machine: names are sorted, and there are no times and owners. Packing and unpacking both refuse links,
devices, names outside the folder, and too many or too large files. Only tars that `pack` writes are accepted, and `tarfile` is not used to read them:
before Python 3.11.10 a PAX header of 60 KB costs it eight seconds of CPU in which no other thread runs (CVE-2024-6232). This module is independent of
manifests.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

DIGEST = re.compile(r"^[0-9a-f]{64}\Z")
MAX_BYTES = 64 << 20
MAX_NAME_BYTES = 240
# Files of a developer's machine that do not belong to a function, above all secrets.
LEFT_OUT = frozenset({"__pycache__", "node_modules", ".git", ".venv", ".venv-workers", ".pilotlight", ".wrangler", ".pytest_cache"})  # fmt: skip
LEFT_OUT_PREFIXES = (".dev.vars", ".env")

_BLOCK, _RECORD = 512, 10_240  # a tar consists of blocks, and its length is a multiple of a record
_SIZE = re.compile(rb"[0-7]{11}\0")
# types of a tar's entries: a file, and the name of the next file if it is long or not ASCII
_PLAIN, _EXTENDED = b"0", b"x"


class BundleError(ValueError):
    """The folder or the bytes are not a valid bundle; the message names the file and the change to make."""


class BundleLimits(NamedTuple):
    num_bytes: int = MAX_BYTES
    num_files: int = 10_000


LIMITS = BundleLimits()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(folder: Path, limits: BundleLimits = LIMITS) -> bytes:
    """Pack a folder; return the tar. Raises BundleError."""
    parts: list[bytes] = []
    count = size = 0
    for name, path in sorted(_files(folder, "")):
        count, size = count + 1, size + path.stat().st_size
        _check_size(count, size, limits)
        content = path.read_bytes()
        parts += (_head(name, len(content)), content, bytes(-len(content) % _BLOCK))
    parts.append(_end(sum(map(len, parts))))
    data = b"".join(parts)
    _check_size(count, len(data), limits)
    return data


def check(data: bytes, limits: BundleLimits = LIMITS) -> int:
    """Return the number of files. Raises BundleError for bytes that `pack` would not write."""
    return sum(1 for _ in _entries(data, limits))


def unpack(data: bytes, folder: Path) -> None:
    """Unpack into a new folder.
    If it raises BundleError, some files may be in the folder."""
    folder.mkdir(parents=True)
    for name, content in _entries(data, LIMITS):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name = prefix + entry.name
        if entry.name in LEFT_OUT or entry.name.startswith(LEFT_OUT_PREFIXES):
            continue
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise BundleError(f"{name} is a link; a bundle has plain files only: put the file itself there")
        if stat.S_ISDIR(mode):
            yield from _files(Path(entry.path), name + "/")
        elif stat.S_ISREG(mode):
            _check_name(name)
            yield name, Path(entry.path)
        else:
            raise BundleError(f"{name} is neither a file nor a folder")


def _entries(data: bytes, limits: BundleLimits) -> Iterator[tuple[str, bytes]]:
    if len(data) > limits.num_bytes:
        raise BundleError(f"the bundle has {len(data)} bytes, of at most {limits.num_bytes}")
    seen: set[str] = set()
    at = size = 0
    last = ""
    while data[at : at + 1] not in (b"", b"\0"):
        name, length = _read_head(data, at)
        _check_name(name)
        if name <= last or not seen.isdisjoint(name.rsplit("/", n)[0] for n in range(1, name.count("/") + 1)):
            raise BundleError(f"{name!r} is in the bundle twice, or out of order")
        last = name
        seen.add(name)
        size += length
        _check_size(len(seen), size, limits)
        at += len(head := _head(name, length))
        end = at + length
        if not data.startswith(head, at - len(head)) or any(data[end : end - end % -_BLOCK]):
            _refuse(at)
        if end > len(data):
            raise BundleError(f"the bundle is cut off inside {name!r}")
        yield name, data[at:end]
        at = end - end % -_BLOCK
    if data[at:] != _end(at):
        _refuse(at)
    if not seen:
        raise BundleError("the bundle is empty")


def _read_head(data: bytes, at: int) -> tuple[str, int]:
    """Return a file's name and size. The caller then compares the whole header with `_head`'s result."""
    name = data[at : at + 100].rstrip(b"\0")
    if data[at + 156 : at + 157] == _EXTENDED:  # one block, because names are short; it contains "LENGTH path=NAME\n"
        name = data[at + _BLOCK : at + 2 * _BLOCK].rstrip(b"\0").partition(b" path=")[2][:-1]
        at += 2 * _BLOCK
    size = data[at + 124 : at + 136]
    if not _SIZE.fullmatch(size):
        _refuse(at)
    try:
        return name.decode(), int(size[:-1], 8)
    except UnicodeDecodeError:
        _refuse(at)


def _head(name: str, size: int) -> bytes:
    """Return the header of a file, as `tarfile` writes it in PAX format: the same bytes in every version."""
    encoded = name.encode()
    if name.isascii() and len(name) <= 100:
        return _block(encoded, 0o644, size, _PLAIN)
    length = len(encoded) + len(b" path=\n")
    length += len(str(length + len(str(length))))  # the length includes its own digits
    record = b"%d path=%s\n" % (length, encoded)
    extended = _block(b"././@PaxHeader", 0, len(record), _EXTENDED) + record.ljust(_BLOCK, b"\0")
    return extended + _block(name.encode("ascii", "replace")[:100], 0o644, size, _PLAIN)


def _block(name: bytes, mode: int, size: int, kind: bytes) -> bytes:
    """Return one header block of POSIX ustar: no owner, no time, no link."""
    before = name.ljust(100, b"\0") + b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, 0)
    after = (kind + bytes(100) + b"ustar\x0000").ljust(_BLOCK - 156, b"\0")
    checksum = sum(before) + sum(b" " * 8) + sum(after)
    return before + b"%06o\0 " % checksum + after


def _end(size: int) -> bytes:
    """Return the bytes after the last file: two empty blocks, and padding to a whole record."""
    return bytes(-(size + 2 * _BLOCK) % _RECORD + 2 * _BLOCK)


def _refuse(at: int) -> NoReturn:
    raise BundleError(
        f"byte {at} of the bundle does not begin a file as `pilotlight deploy` packs it; deploy the folder with that command"
    )


def _check_name(name: str) -> None:
    parts = name.split("/")
    try:
        is_fine = len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        is_fine = False
    if not is_fine or any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\\0\n\r"):
        raise BundleError(f"the name {name[:100]!r} cannot be in a bundle")


def _check_size(count: int, size: int, limits: BundleLimits) -> None:
    if count > limits.num_files:
        excess = f"{limits.num_files} files"
    elif size > limits.num_bytes:
        excess = f"{limits.num_bytes >> 20} MiB"
    else:
        return
    raise BundleError(f"the folder has more than {excess}; leave out files that the function does not need")
