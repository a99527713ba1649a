"""Reads the header of a GGUF file: metadata by key, and every tensor's type, shape and place.

Follows the specification in ggml's docs/gguf.md (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3. No count in a file is
trusted: each is compared with the remaining bytes before anything is read or allocated. This module is independent of the purpose of keys and
tensors.
"""

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.plain_files import open_file
from pilotlight.engine.gguf.kinds import KINDS, UNREAD, TensorKind

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}  # struct codes by GGUF type
_MAX_DIMS = 4
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_ITEMS = 1 << 22  # limit for a list; vocabularies have some 300,000 tokens, and about as many merges
_MOST_NAME_BYTES = 1 << 16  # limit for a key or a tensor's name; string values may be longer
_LONGEST_AXIS = 1 << 40
_MOST_CONTENT = (
    256 << 20
)  # bytes of a tensor that is read to convert it; a projection to steps and decays has some megabytes


class GgufTensor(NamedTuple):
    name: str
    kind: TensorKind
    shape: tuple[int, ...]  # in torch's order: rows before columns
    start: int  # the tensor's bytes are file[start:end]
    end: int


class GgufFile(NamedTuple):
    """The content of a file's header, without the values of tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read a file's header. Raises CheckpointError if it is no GGUF file or damaged, or OSError."""
        with open_file(path) as opened:
            if opened.read(4) != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return cls._read(path, content)

    def floats(self, tensor: GgufTensor) -> tuple[float, ...]:
        """Read a small tensor of fp32. Raises CheckpointError for another type."""
        if tensor.kind.name != "F32":
            raise CheckpointError(
                f"tensor {tensor.name} in {self.path.name} has type {tensor.kind.name}; it must be F32"
            )
        return struct.unpack(f"<{prod(tensor.shape)}f", self.content(tensor))

    def content(self, tensor: GgufTensor) -> bytes:
        """Read the bytes of a tensor that is not large. Raises CheckpointError for a large one."""
        if tensor.end - tensor.start > _MOST_CONTENT:
            raise CheckpointError(
                f"tensor {tensor.name} in {self.path.name} has {tensor.end - tensor.start:,} bytes; it may have {_MOST_CONTENT:,}"
            )
        with open_file(self.path) as opened:
            opened.seek(tensor.start)
            return opened.read(tensor.end - tensor.start)

    @classmethod
    def _read(cls, path: Path, content: mmap.mmap) -> "GgufFile":
        reader = _Reader(path, content)
        reader.require_version()
        num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
        reader.require_count(num_tensors, _MOST_TENSORS, "tensors")
        reader.require_count(num_keys, _MOST_KEYS, "keys of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.name("a key of metadata")
            metadata[key] = reader.value(reader.scalar("I"), key)
        described = [reader.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise CheckpointError(
                f"{path.name} has general.alignment = {alignment!r}; it must be a positive multiple of 8"
            )
        first = -(-reader.at // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset in described:
            start = first + offset
            end = start + prod(shape) // kind.block * kind.block_bytes
            if end > len(content):
                raise CheckpointError(
                    f"{path.name} is truncated: tensor {name} ends at byte {end}, the file at {len(content)}; fetch it again"
                )
            if offset % alignment:
                raise CheckpointError(f"{path.name} is damaged: tensor {name} is not aligned to {alignment} bytes")
            if name in tensors:
                raise CheckpointError(f"{path.name} is damaged: it lists tensor {name} twice")
            tensors[name] = GgufTensor(name, kind, shape, start, end)
        return cls(path, metadata, tensors)


class _Reader:
    """Reads consecutive values of the header, at `at`."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.at = len(MAGIC)
        self._path = path
        self._content = content

    def require_version(self) -> None:
        version = self.scalar("I")
        if version in _VERSIONS:
            return
        if version.to_bytes(4, "little") in [known.to_bytes(4, "big") for known in _VERSIONS]:
            raise CheckpointError(
                f"{self._path.name} is a GGUF file for big-endian machines; convert it again for this one"
            )
        raise CheckpointError(
            f"{self._path.name} is a GGUF file of version {version}; supported are {' and '.join(map(str, _VERSIONS))}"
        )

    def require_count(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise CheckpointError(f"{self._path.name} is damaged: it claims {count} {what}")

    def scalar(self, code: str) -> Any:
        start = self._take(struct.calcsize(f"<{code}"), "a number")
        return struct.unpack_from(f"<{code}", self._content, start)[0]

    def name(self, what: str) -> str:
        num_bytes = self.scalar("Q")
        if num_bytes > _MOST_NAME_BYTES:
            raise CheckpointError(f"{self._path.name} is damaged: {what} claims {num_bytes} bytes")
        return self._text(num_bytes, what)

    def value(self, kind: int, key: str) -> Any:
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._text(self.scalar("Q"), key)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path.name} is damaged: {key} has a value of the unknown type {kind}")
        found = self.scalar(_SCALARS[kind])
        return bool(found) if kind == _BOOL else found

    def tensor(self) -> tuple[str, TensorKind, tuple[int, ...], int]:
        name = self.name("a tensor's name")
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{self._path.name} is damaged: tensor {name} has {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
        number, offset = self.scalar("I"), self.scalar("Q")
        kind = KINDS.get(number)
        if kind is None:
            known = ", ".join(kind.name for kind in KINDS.values())
            raise CheckpointError(
                f"tensor {name} in {self._path.name} has type {UNREAD.get(number, number)}; supported are {known}"
            )
        if not 0 < min(shape) <= max(shape) <= _LONGEST_AXIS or shape[-1] % kind.block:
            raise CheckpointError(
                f"tensor {name} in {self._path.name} has shape {list(shape)}, which {kind.name} with blocks of {kind.block} values cannot have"
            )
        return name, kind, shape, offset

    def _array(self, key: str) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        self.require_count(count, _MOST_ITEMS, f"items of {key}")
        if kind == _STRING:
            self._require_left(count * 8, key)
            return [self._text(self.scalar("Q"), key) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path.name} is damaged: {key} is a list of the unknown type {kind}")
        code = _SCALARS[kind]
        start = self._take(count * struct.calcsize(f"<{code}"), key)
        found = struct.unpack_from(f"<{count}{code}", self._content, start)
        return [bool(one) for one in found] if kind == _BOOL else list(found)

    def _text(self, num_bytes: int, what: str) -> str:
        start = self._take(num_bytes, what)
        try:
            return self._content[start : start + num_bytes].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path.name} is damaged: {what} is not UTF-8: {error}") from None

    def _take(self, num_bytes: int, what: str) -> int:
        self._require_left(num_bytes, what)
        start = self.at
        self.at += num_bytes
        return start

    def _require_left(self, num_bytes: int, what: str) -> None:
        left = len(self._content) - self.at
        if num_bytes > left:
            raise CheckpointError(
                f"{self._path.name} is truncated or damaged: {what} claims {num_bytes} bytes, but {left} are left; fetch it again"
            )
