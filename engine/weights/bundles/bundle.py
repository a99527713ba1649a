"""A bundle: one model's tensors in one file, laid out as in memory so that the engine can map it.

The container is safetensors: a header, then data without holes (padding is a separate tensor), and in the last 32 bytes a seal, which is a checksum
of the header. A tensor of at least 64 KiB starts on a page, a smaller one on a cache line. This module knows the byte format and the identity of
weights, and is independent of torch, and of where the file is.

length of the JSON (8) | JSON, spaces up to a page | tensors and their padding | seal
"""

import json
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

CHUNK_VALUES = 1 << 20  # values per chunk of a coded tensor; the last chunk has the rest
VERSION = 1  # increment this when the format changes, or a model family fuses or orders its tensors differently
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
_FORMAT = "pilotlight.bundle"
_PAGE, _LINE = 4096, 64
_SEAL_BYTES = 32
_PADDING, _SEAL = "~pad", "~seal"
_MAX_HEADER_BYTES = 100 << 20
_CHECKSUM = "0" * 32  # a placeholder with the length of a checksum


class WeightBundleError(Exception):
    """A bundle cannot be used or written here; the message gives the reason."""


class TensorSpec(NamedTuple):
    """The name, type and shape of a tensor that a model requests."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class PlacedTensor(NamedTuple):
    """A tensor and its offset in the file."""

    spec: TensorSpec
    start: int

    @property
    def end(self) -> int:
        return self.start + self.spec.num_bytes


class BundleIdentity(NamedTuple):
    """The model, type and checkpoint of a bundle. Bundles of equal identity contain the same bytes."""

    architecture: str
    dtype: str
    config: str  # digest of config.json
    source: str  # fingerprint of the checkpoint


class CheckpointFacts(NamedTuple):
    """The size and types of a checkpoint, known before its weights are read."""

    num_parameters: int
    dtypes: tuple[str, ...]


class Bundle(NamedTuple):
    """The content of a bundle's header."""

    identity: BundleIdentity
    facts: CheckpointFacts
    tensors: tuple[PlacedTensor, ...]
    size: int  # size of the file in bytes
    checksums: Mapping[str, str]  # checksum by tensor; empty for a bundle in memory, whose writer is trusted
    # The shape of each bf16 tensor that is stored in coded chunks (coded_chunks.py), by name. The chunks are tensors of bytes: NAME~0, NAME~1 ...
    coded: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    @property
    def data_bytes(self) -> int:
        return sum(placed.spec.num_bytes for placed in self.tensors)

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors that a model can request; a coded tensor has its decoded shape and type."""
        found = []
        for placed in self.tensors:
            name, _, number = placed.spec.name.rpartition("~")
            if name not in self.coded:
                found.append(placed.spec)
            elif number == "0":
                found.append(TensorSpec(name, "BF16", self.coded[name]))
        return found


def lay_out(
    identity: BundleIdentity,
    facts: CheckpointFacts,
    specs: Iterable[TensorSpec],
    with_checksums: bool = False,
    coded: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Bundle:
    """Return the layout of a bundle of these tensors, in the given order."""
    specs = tuple(specs)
    checksums = {spec.name: _CHECKSUM for spec in specs} if with_checksums else {}
    tensors, end = _place(specs, 0)
    # Offsets count from the end of the header, which is at a page boundary, so they do not depend on its length.
    start = _whole(8 + len(_json(Bundle(identity, facts, tensors, end + _SEAL_BYTES, checksums, coded), 0)), _PAGE)
    tensors, end = _place(specs, start)
    return Bundle(identity, facts, tensors, end + _SEAL_BYTES, checksums, coded)


def encode_header(bundle: Bundle) -> bytes:
    start = bundle.tensors[0].start if bundle.tensors else bundle.size - _SEAL_BYTES
    text = _json(bundle, start)
    assert len(text) <= start - 8, "the header has outgrown its room"
    return (start - 8).to_bytes(8, "little") + text.ljust(start - 8)


def encode_seal(header: bytes) -> bytes:
    return blake2b(header, digest_size=_SEAL_BYTES).digest()


def read_bundle(fd: int) -> Bundle:
    """Read and check the header and the seal of a bundle.

    Raises WeightBundleError for anything but a whole, sealed bundle of this version.
    """
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 + _SEAL_BYTES or length > min(size - 8 - _SEAL_BYTES, _MAX_HEADER_BYTES):
        raise WeightBundleError(f"it is cut off or not a bundle: {size} bytes cannot hold its header")
    header = os.pread(fd, 8 + length, 0)
    try:
        described = json.loads(header[8:])
        metadata = described.pop("__metadata__")
        version = str(metadata["version"])
        if metadata["format"] != _FORMAT:
            raise WeightBundleError(f"it is a file of the format {metadata['format']!r}, not {_FORMAT!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise WeightBundleError(f"its header is damaged or not a bundle's: {why}") from None
    if version != str(VERSION):
        raise WeightBundleError(f"it has version {version}; this engine reads {VERSION}")
    if os.pread(fd, _SEAL_BYTES, size - _SEAL_BYTES) != encode_seal(header):
        raise WeightBundleError(
            f"it is cut off{_at_cut(described, size - 8 - length)}, or its header was changed: its seal does not match"
        )
    try:
        return _parse(described, metadata, 8 + length, size)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WeightBundleError(f"its header is damaged: {error!r}") from None


def _at_cut(described: dict[str, Any], data_bytes: int) -> str:
    """Return " in NAME" for the first tensor that a truncated file does not contain whole, else ""."""
    try:
        cut = next((name for name, entry in described.items() if int(entry["data_offsets"][1]) > data_bytes), None)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        cut = None
    return "" if cut is None else f" in {cut}"


def content_digest(bundle: Bundle) -> str:
    """Return the digest that names a packed file: equal tensors have equal names."""
    identity = bundle.identity
    content: list[Any] = [VERSION, identity.architecture, identity.dtype, identity.config]
    tensors = [[*placed.spec, bundle.checksums[placed.spec.name]] for placed in bundle.tensors]
    if bundle.coded:
        content.append(dict(bundle.coded))
    return blake2b(json.dumps([content, tensors]).encode(), digest_size=16).hexdigest()


def config_digest(config: bytes) -> str:
    return blake2b(config, digest_size=16).hexdigest()


def difference(found: BundleIdentity, expected: BundleIdentity) -> str | None:
    """Return a description of the first difference between two identities, or None if they are equal."""
    for key, word in (
        ("architecture", "is of architecture"),
        ("dtype", "holds"),
        ("config", "was made with a config.json of digest"),
        ("source", "was made from a checkpoint of fingerprint"),
    ):
        is_so, should_be = getattr(found, key), getattr(expected, key)
        if is_so != should_be:
            return f"it {word} {is_so}, not {should_be}"
    return None


def _place(specs: tuple[TensorSpec, ...], start: int) -> tuple[tuple[PlacedTensor, ...], int]:
    tensors, end = [], start
    for spec in specs:
        at = _whole(end, _PAGE if spec.num_bytes >= 16 * _PAGE else _LINE)
        tensors.append(PlacedTensor(spec, at))
        end = at + spec.num_bytes
    return tuple(tensors), _whole(end, _LINE)


def _json(bundle: Bundle, data_start: int) -> bytes:
    identity, facts = bundle.identity, bundle.facts
    metadata = {
        "format": _FORMAT,
        "version": str(VERSION),
        **identity._asdict(),
        "num_parameters": str(facts.num_parameters),
        "dtypes": ",".join(facts.dtypes),
        "checksums": json.dumps(bundle.checksums),
    }
    if bundle.coded:
        metadata["coded"] = json.dumps(dict(bundle.coded))
    described: dict[str, Any] = {"__metadata__": metadata}
    end = data_start
    for i, placed in enumerate(bundle.tensors):
        if placed.start > end:
            described[f"{_PADDING}.{i}"] = _bytes_at(end, placed.start, data_start)
        spec, offsets = placed.spec, [placed.start - data_start, placed.end - data_start]
        described[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        end = placed.end
    seal = bundle.size - _SEAL_BYTES
    if seal > end:
        described[f"{_PADDING}.end"] = _bytes_at(end, seal, data_start)
    described[_SEAL] = _bytes_at(seal, bundle.size, data_start)
    return json.dumps(described, separators=(",", ":")).encode()


def _bytes_at(start: int, end: int, data_start: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start - data_start, end - data_start]}


def _parse(described: dict[str, Any], metadata: dict[str, str], data_start: int, size: int) -> Bundle:
    tensors = []
    end = data_start
    for name, entry in described.items():
        start, stop = (data_start + int(offset) for offset in entry["data_offsets"])
        spec = TensorSpec(name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
        if start != end or stop - start != spec.num_bytes:
            raise ValueError(f"tensor {name} is at bytes {start} to {stop}")
        end = stop
        if not name.startswith("~"):
            tensors.append(PlacedTensor(spec, start))
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}")
    identity = BundleIdentity(*(str(metadata[key]) for key in BundleIdentity._fields))
    facts = CheckpointFacts(int(metadata["num_parameters"]), tuple(filter(None, metadata["dtypes"].split(","))))
    coded = {name: tuple(int(n) for n in shape) for name, shape in json.loads(metadata.get("coded", "{}")).items()}
    for name, shape in coded.items():
        last = -(-prod(shape) // CHUNK_VALUES) - 1
        if min(shape, default=-1) < 0 or f"{name}~{last}" not in described or f"{name}~{last + 1}" in described:
            raise ValueError(f"tensor {name} does not have the chunks of shape {list(shape)}")
    return Bundle(identity, facts, tuple(tensors), size, dict(json.loads(metadata["checksums"])), coded)


def _whole(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
