"""Bundles: a function's folder as one immutable tar whose name is the SHA-256 of its bytes, and the folder again.

The same files make the same bytes, on every machine: sorted names, no times, no owners. Links, devices and names that lead out are refused in both
directions, and so is what is too large. Knows bytes and folders; refuses to know manifests.
"""

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

DIGEST = re.compile(r"^[0-9a-f]{64}\Z")
MAX_BYTES = 64 << 20
MAX_FILES = 10_000
MAX_NAME_BYTES = 240
# What belongs to a workplace and not to a function; secrets of a workplace above all.
LEFT_OUT = frozenset({"__pycache__", "node_modules", ".git", ".venv", ".venv-workers", ".pilotlight", ".wrangler", ".pytest_cache"})  # fmt: skip
LEFT_OUT_PREFIXES = (".dev.vars", ".env")


class BundleError(ValueError):
    """The folder or the bytes are no bundle; the message names the file, and what to change."""


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(folder: Path) -> bytes:
    """Pack a folder. Raises BundleError."""
    buffer, count, size = io.BytesIO(), 0, 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in sorted(_files(folder, "")):
            count, size = count + 1, size + path.stat().st_size
            _check_size(count, size)
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    data = buffer.getvalue()
    _check_size(count, len(data))
    return data


def check(data: bytes) -> int:
    """Return the number of files. Raises BundleError for anything that `pack` would not have made."""
    return sum(1 for _ in _entries(data))


def unpack(data: bytes, folder: Path) -> None:
    """Unpack into a folder that is not there yet. Raises BundleError, and then the folder may be there in part."""
    folder.mkdir(parents=True)
    for name, content in _entries(data):
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


def _entries(data: bytes) -> Iterator[tuple[str, bytes]]:
    if len(data) > MAX_BYTES:
        raise BundleError(f"the bundle has {len(data)} bytes, of at most {MAX_BYTES}")
    seen: set[str] = set()
    size = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for entry in tar:
                if entry.type != tarfile.REGTYPE or entry.linkname or entry.issparse():
                    raise BundleError(f"{entry.name!r} is no plain file")
                _check_name(entry.name)
                folders = {entry.name.rsplit("/", n)[0] for n in range(1, entry.name.count("/") + 1)}
                if entry.name in seen or folders & seen:
                    raise BundleError(f"{entry.name!r} is there twice")
                seen.add(entry.name)
                size += entry.size
                _check_size(len(seen), size)
                file = tar.extractfile(entry)
                content = b"" if file is None else file.read()
                if len(content) != entry.size:
                    raise BundleError(f"the bundle is cut off inside {entry.name!r}")
                yield entry.name, content
    except (tarfile.TarError, EOFError, OSError, UnicodeError, ValueError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"the bundle cannot be read: {error}") from None
    if not seen:
        raise BundleError("the bundle is empty")


def _check_name(name: str) -> None:
    parts = name.split("/")
    try:
        is_fine = len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        is_fine = False
    if not is_fine or any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\\0\n\r"):
        raise BundleError(f"the name {name[:100]!r} cannot be in a bundle")


def _check_size(count: int, size: int) -> None:
    if count > MAX_FILES:
        raise BundleError(f"the folder has more than {MAX_FILES} files; leave out what is not the function's")
    if size > MAX_BYTES:
        raise BundleError(f"the folder has more than {MAX_BYTES >> 20} MiB; leave out what is not the function's")
