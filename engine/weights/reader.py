"""Reads a Hugging Face checkpoint directory (safetensors, single or sharded) into tensors that the model has already
laid out.

Knows the file format, checks every byte range against the file before trusting it, and names tensor and file in every
complaint. Refuses to know what a tensor is for. The format (8-byte header length, JSON header, raw little-endian data)
is read here rather than by the safetensors package because its errors name neither the tensor nor the remedy, and
because copying from the map into the final place needs no second buffer.
"""

import json
import mmap
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import CheckpointError

ReadingProgress = Callable[[int, int], None]  # (bytes done, bytes in total)
Arrange = Callable[[torch.Tensor], torch.Tensor]  # a view of what is stored, in the order the model wants

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What is read as it is: bytes and words of packed weights, their scales, and numbers about them.
_ALL_DTYPES = _DTYPES | {"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}
_VALUES_IN_ONE = {"U8": 2, "I32": 8}  # four-bit ones
_MAX_HEADER_BYTES = 100 << 20


class StoredTensor(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class CheckpointReader:
    """One reading of one checkpoint: `read` each tensor the model has, then `finish`."""

    def __init__(self, directory: Path, on_progress: ReadingProgress | None = None) -> None:
        self._index = index_checkpoint(directory)
        self._on_progress = on_progress
        self._unread = set(self._index)
        self._maps: dict[Path, mmap.mmap] = {}
        self._sums: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.done_bytes = 0
        self.total_bytes = sum(stored.end - stored.start for stored in self._index.values())

    @property
    def dtypes(self) -> set[str]:
        """The safetensors names of the storage types in use, of all tensors."""
        return {stored.dtype for stored in self._index.values()}

    @property
    def num_parameters(self) -> int:
        """A byte of packed weights counts as the two it holds, a word as eight (and scales with them: 6 % too many)."""
        return sum(
            torch.Size(stored.shape).numel() * _VALUES_IN_ONE.get(stored.dtype, 1) for stored in self._index.values()
        )

    @property
    def is_packed(self) -> bool:
        """Whether some of the weights are stored in four or eight bits."""
        return not {"U8", "I32", "F8_E4M3"}.isdisjoint(self.dtypes)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self._index[name].shape

    def read(
        self, name: str, into: torch.Tensor, stored_shape: tuple[int, ...] | None = None, arrange: Arrange | None = None
    ) -> None:
        """Copy tensor `name` to its final place, converting the type. The shape must agree exactly: with into's, or
        with `stored_shape`, from which `arrange` makes into's."""
        source = self._source(name, stored_shape or tuple(into.shape), _DTYPES)
        into.copy_(source if arrange is None else arrange(source))
        self.expect_finite(name, into)
        self._count(name)
        self._let_go(name)

    def packed(self, name: str, *shape: int, types: Collection[str] = ("U8",)) -> torch.Tensor:
        """Tensor `name` where it lies in the file, in its own type, one of `types`, for a caller who unpacks it."""
        source = self._source(name, shape, {type: _ALL_DTYPES[type] for type in types})
        self._count(name)
        return source

    def expect_finite(self, name: str, values: torch.Tensor) -> None:
        """`finish` will complain of tensor `name` unless the values made from it are numbers."""
        # bf16 has fp32's range, and its sum needs no fp32 copy of the tensor (copies left half of the heap full of holes).
        total = values.sum() if values.dtype == torch.bfloat16 else values.sum(dtype=torch.float32)
        self._sums.append((name, values, total))

    def _source(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, torch.dtype]) -> torch.Tensor:
        stored = self._index.get(name)
        if stored is None:
            files = ", ".join(sorted({s.file.name for s in self._index.values()}))
            raise CheckpointError(f"tensor {name} is missing from {files}; config.json asks for it")
        if stored.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {stored.file.name} has shape {list(stored.shape)}, "
                f"but config.json makes it {list(shape)}"
            )
        dtype = dtypes.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor {name} in {stored.file.name} has type {stored.dtype}; supported are {', '.join(dtypes)}"
            )
        count = torch.Size(shape).numel()
        source = torch.frombuffer(self._map(stored.file), dtype=dtype, count=count, offset=stored.start)
        return source.view(shape)

    def _count(self, name: str) -> None:
        stored = self._index[name]
        self._unread.discard(name)
        self.done_bytes += stored.end - stored.start
        if self._on_progress:
            self._on_progress(self.done_bytes, self.total_bytes)

    def _let_go(self, name: str) -> None:
        """Unmap the pages of a tensor that has been copied: file and copy together would take twice the memory."""
        stored = self._index[name]
        first, end = -(-stored.start // mmap.PAGESIZE) * mmap.PAGESIZE, stored.end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and hasattr(mmap, "MADV_DONTNEED"):
            self._map(stored.file).madvise(mmap.MADV_DONTNEED, first, end - first)

    def skip(self, pattern: str) -> None:
        """Tensors that are known to be redundant: they need not be read."""
        self._unread = {name for name in self._unread if not re.fullmatch(pattern, name)}

    def finish(self) -> None:
        """Complain of tensors nobody asked for and of values that are not numbers; close the files."""
        self.close()
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{self._index[names[0]].file.name} holds tensors that config.json's architecture does not have: "
                f"{', '.join(names[:3])}{more}"
            )
        # One pass that a device runs at memory speed and one wait for all tensors: a sum is finite when every term is,
        # or nearly always.
        if self._sums and not bool(torch.stack([total.float() for _, _, total in self._sums]).isfinite().all()):
            for name, tensor, _ in self._sums:
                if not bool(tensor.isfinite().all()):
                    raise CheckpointError(
                        f"tensor {name} in {self._index[name].file.name} holds NaN or infinity; fetch the checkpoint again"
                    )
        if self._on_progress:
            self._on_progress(self.total_bytes, self.total_bytes)

    def close(self) -> None:
        self._maps.clear()  # a map is unmapped when the last tensor over it is gone

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                # Copy-on-write, though nobody writes: torch warns about a buffer it could not write to.
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def index_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's checkpoint, by name."""
    index_file = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.exists():
        return _read_header(single)
    if not index_file.exists():
        raise CheckpointError(f"{directory} holds neither model.safetensors nor model.safetensors.index.json")
    weight_map = _weight_map(index_file)
    stored: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        file = directory / file_name
        if not file.exists():
            raise CheckpointError(f"{file_name} is missing from {directory}, though {index_file.name} lists it")
        stored |= _read_header(file)
    for name, file_name in weight_map.items():
        if name not in stored:
            raise CheckpointError(f"tensor {name} is missing from {file_name}, though {index_file.name} puts it there")
    return stored


def _weight_map(index_file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index_file.read_bytes())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_file} is no safetensors index: {error}") from error
    if any(Path(file).name != file for file in files.values()):
        raise CheckpointError(f"{index_file} points outside its directory")
    return files


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file.name} is truncated or no safetensors file: {size} bytes cannot hold its header"
            )
        try:
            header = json.loads(opened.read(header_bytes))
        except ValueError as error:
            raise CheckpointError(f"{file.name} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name} has a damaged safetensors header: it is no table of tensors")
    header.pop("__metadata__", None)
    return {name: _stored_tensor(file, name, entry, 8 + header_bytes, size) for name, entry in header.items()}


def _stored_tensor(file: Path, name: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, end = (data_start + int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"tensor {name} in {file.name} is described wrongly: {error!r}") from error
    if not data_start <= start <= end or min(shape, default=0) < 0:
        raise CheckpointError(f"tensor {name} in {file.name} is described wrongly: bytes {start} to {end}")
    if end > file_size:
        raise CheckpointError(
            f"{file.name} is truncated: tensor {name} ends at byte {end}, the file at {file_size}; "
            "fetch the checkpoint again"
        )
    known = _ALL_DTYPES.get(dtype)
    if known is not None and end - start != torch.Size(shape).numel() * known.itemsize:
        raise CheckpointError(
            f"tensor {name} in {file.name} has {end - start} bytes, which shape {list(shape)} of {dtype} does not"
        )
    return StoredTensor(file, dtype, shape, start, end)


def read_json(directory: Path, name: str, wanted: Collection[str] = ()) -> dict[str, Any]:
    """A JSON object beside the weights, with the keys that must be there."""
    file = directory / name
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} holds no {name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is no JSON object")
    for key in wanted:
        if key not in content:
            raise CheckpointError(f"{file} lacks the key {key}")
    return content
