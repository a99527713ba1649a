"""A Hugging Face checkpoint directory (safetensors, single or sharded): where each tensor is stored.

This module knows the file format, checks every byte range against the file before use, and names tensor and file in every error. It is independent of
what a tensor is for, and reads no tensor (filling.py does). The format (8-byte header length, JSON header, raw little-endian data) is parsed here and
not by the safetensors package, because its errors name neither the tensor nor the remedy.
"""

import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.plain_files import MOST_BYTES, open_file, read_bytes
from pilotlight.engine.weights.bundles.bundle import CheckpointFacts
from pilotlight.engine.weights.stored_tensor import ExpectedTensor, StoredTensor

log = logging.getLogger(__name__)

PACKED_SUFFIX = ".bundle.safetensors"
# Names of the GGUF file, of the index of its tensors, and of the file with converted tensors in the directories that engine/gguf makes.
GGUF_FILE, GGUF_INDEX, GGUF_CONVERTED = "model.gguf", "model.gguf.index", "converted.safetensors"
_VALUES_IN_ONE = {"U8": 2, "I32": 8}  # four-bit weights per stored number
_MAX_HEADER_BYTES = 32 << 20  # enough for 250,000 tensors; the format allows 100 MB, which take gigabytes when parsed
_MAX_JSON_BYTES = 32 << 20
_MAX_DIMS = 64
# Bits of one value, by the type's name in safetensors. A tensor that no model requests may have any of these types.
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# Remote file systems, by Linux's names. Any FUSE file system ("fuse", "fuse.sshfs") may be remote.
_REMOTE = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
    "pvfs2", "smb3", "smbfs", "virtiofs",
})  # fmt: skip


class Checkpoint:
    """A directory's tensors by name, and the names that a model has requested."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        self._unrequested = set(tensors)

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        return cls(index_checkpoint(directory))

    @property
    def facts(self) -> CheckpointFacts:
        """The number of parameters and their types.

        A byte of packed weights counts as two parameters and a word as eight, as if all had four bits. Scales count as parameters, too: for weights
        of four bits the number may be 6 % too high.
        """
        stored = self.tensors.values()
        num_parameters = sum(prod(s.shape) * _VALUES_IN_ONE.get(s.dtype, 1) for s in stored)
        return CheckpointFacts(num_parameters, tuple(sorted({s.dtype for s in stored})))

    def find(self, expected: ExpectedTensor) -> StoredTensor:
        """Return a tensor, or the expected part of it, and mark it as requested.

        Raises CheckpointError if the tensor is missing, or has another shape or type.
        """
        name, shape, dtypes, part = expected
        stored = self.tensors.get(name)
        if stored is None:
            files = ", ".join(sorted({s.file.name for s in self.tensors.values()}))
            raise CheckpointError(f"tensor {name} is missing from {files}; config.json asks for it")
        if stored.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {stored.file.name} has shape {list(stored.shape)}, "
                f"but config.json makes it {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} in {stored.file.name} has type {stored.dtype}; supported are {', '.join(dtypes)}"
            )
        self._unrequested.discard(name)
        return stored if part is None else stored.part(part)

    def skip(self, pattern: str) -> None:
        """Mark redundant tensors, whose names match `pattern`, as requested although no model reads them."""
        self._unrequested = {name for name in self._unrequested if not re.fullmatch(pattern, name)}

    def refuse_unrequested(self) -> None:
        """Raise CheckpointError if tensors were not requested: without them the model is not the trained one.

        Layers that only predict further tokens are not needed; the log names them.
        """
        if self._unrequested:
            names = sorted(self._unrequested)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{self.tensors[names[0]].file.name} holds tensors that config.json's architecture does not have: "
                f"{', '.join(names[:3])}{more}"
            )
        if further := [stored.file for name, stored in self.tensors.items() if name.startswith("mtp.")]:
            log.info(
                "%s: the layers that predict further tokens (%d tensors, mtp.*) are not used",
                further[0].parent, len(further),
            )  # fmt: skip


def packed_file(directory: Path) -> Path | None:
    """Return the bundle made by `pilotlight pack`; None without one, or with a checkpoint beside it.

    Raises CheckpointError if there are several bundles.
    """
    if (directory / "model.safetensors").exists() or (directory / "model.safetensors.index.json").exists():
        return None
    found = sorted(directory.glob(f"*{PACKED_SUFFIX}"))
    if len(found) > 1:
        raise CheckpointError(f"{directory} holds {len(found)} bundles; keep the one that config.json belongs to")
    return found[0] if found else None


def weight_files(directory: Path) -> list[Path]:
    """Return the files that contain weights."""
    return sorted([*directory.glob("*.safetensors"), *directory.glob(GGUF_FILE)])


def index_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Return where each tensor of the directory's checkpoint is stored, by name. Raises CheckpointError."""
    index_file = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.exists():
        return read_header(single)
    if (directory / GGUF_INDEX).exists():
        listed, file = read_json(directory, GGUF_INDEX, most_bytes=MOST_BYTES), directory / GGUF_FILE
        as_stored = {name: _stored_tensor(file, name, entry, 0, file.stat().st_size) for name, entry in listed.items()}
        converted = directory / GGUF_CONVERTED
        return as_stored | (read_header(converted) if converted.exists() else {})
    if not index_file.exists():
        raise CheckpointError(f"{directory} holds neither model.safetensors nor model.safetensors.index.json")
    weight_map = _weight_map(index_file)
    stored: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        file = directory / file_name
        if not file.exists():
            raise CheckpointError(f"{file_name} is missing from {directory}, though {index_file.name} lists it")
        header = read_header(file)
        stored |= {name: header[name] for name in header if name not in stored or weight_map.get(name) == file_name}
    for name, file_name in weight_map.items():
        if name not in stored or stored[name].file.name != file_name:
            raise CheckpointError(f"tensor {name} is missing from {file_name}, though {index_file.name} puts it there")
    return stored


def _weight_map(index_file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(read_bytes(index_file, _MAX_JSON_BYTES))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index_file} is not a safetensors index: {error}") from error
    if any(Path(file).name != file for file in files.values()):
        raise CheckpointError(f"{index_file} points outside its directory")
    return files


def read_header(file: Path, most_bytes: int = _MAX_HEADER_BYTES) -> dict[str, StoredTensor]:
    """Return where each tensor of a safetensors file is stored, by name.

    Raises CheckpointError if the file is damaged, or its header has more than `most_bytes`.
    """
    try:
        with open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            header_bytes = int.from_bytes(opened.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, most_bytes):
                raise CheckpointError(
                    f"{file.name} is truncated or not a safetensors file: {size} bytes cannot hold its header, or the header has more than "
                    f"{most_bytes >> 20} MiB"
                )
            header = json.loads(opened.read(header_bytes), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name} has a damaged safetensors header: it is not a table of tensors")
    header.pop("__metadata__", None)
    stored = {name: _stored_tensor(file, name, entry, 8 + header_bytes, size) for name, entry in header.items()}
    _check_filled(file, stored, 8 + header_bytes, size)
    return stored


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{next(name for name in made if counts[name] > 1)} is there twice")
    return made


def _check_filled(file: Path, stored: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """Raise CheckpointError if tensors overlap, or bytes belong to no tensor.

    Other readers refuse such a file, or read it differently.
    """
    end = data_start
    for name, tensor in sorted(stored.items(), key=lambda item: item[1][3:5]):
        if tensor.start != end:
            raise CheckpointError(
                f"tensor {name} in {file.name} begins at byte {tensor.start - data_start} of the data, where the tensors before it end at "
                f"{end - data_start}; write the checkpoint again"
            )
        end = tensor.end
    if end != size:
        raise CheckpointError(
            f"the last {size - end} bytes of {file.name} belong to no tensor; write the checkpoint again"
        )


def _stored_tensor(file: Path, name: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"tensor {name} in {file.name} is described wrongly: {error!r}") from error
    are_whole = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, end))
    if not (isinstance(dtype, str) and are_whole and start <= end and len(shape) <= _MAX_DIMS):
        raise CheckpointError(
            f"tensor {name} in {file.name} is described wrongly: type {dtype!r}, shape {list(shape[:_MAX_DIMS])}, bytes {start} to {end}"
        )
    start, end = data_start + start, data_start + end
    if end > file_size:
        raise CheckpointError(
            f"{file.name} is truncated: tensor {name} ends at byte {end}, the file at {file_size}; "
            "fetch the checkpoint again"
        )
    if dtype not in _BITS:
        raise CheckpointError(f"tensor {name} in {file.name} has the unknown type {dtype}")
    if 8 * (end - start) != prod(shape) * _BITS[dtype]:
        raise CheckpointError(
            f"tensor {name} in {file.name} has {end - start} bytes, which shape {list(shape)} of {dtype} does not"
        )
    return StoredTensor(file, dtype, shape, start, end)


def read_json(
    directory: Path, name: str, wanted: Collection[str] = (), most_bytes: int = _MAX_JSON_BYTES
) -> dict[str, Any]:
    """Read a JSON object beside the weights. Raises CheckpointError, also if a key of `wanted` is missing."""
    file = directory / name
    try:
        content = json.loads(read_bytes(file, most_bytes))
    except FileNotFoundError:
        raise CheckpointError(f"{directory} holds no {name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is no JSON object")
    for key in wanted:
        if key not in content:
            raise CheckpointError(f"{file} lacks the key {key}")
    return content


def is_local(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return True if a file is on a disk of this machine, as far as the system knows.

    A page of a mapped file may be needed at any time: over a network it may arrive late or not at all, and then a step hangs or the process ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        kind = _kind(os.fsencode(os.path.realpath(path)), mounts.read_bytes())
    except OSError:
        return False
    return kind is not None and kind not in _REMOTE and not kind.startswith("fuse.")


def _kind(path: bytes, mounts: bytes) -> str | None:
    """Return the type of the file system that contains `path`; a later mount hides an earlier one."""
    deepest, kind = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if len(fields) < 5 or not after:
            continue
        point = fields[4].decode("unicode_escape").encode("latin-1")  # the kernel escapes spaces as \040
        is_above = path == point or path.startswith(point.rstrip(b"/") + b"/")
        if is_above and len(point) >= deepest:
            deepest, kind = len(point), after.split(b" ")[0].decode()
    return kind
