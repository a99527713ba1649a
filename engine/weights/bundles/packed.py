"""Packs a checkpoint into a bundle on disk, named by its content and with a checksum per tensor.

An interrupted run is resumed: a journal beside the unfinished file has a line with a checksum for every tensor on the disk, and the next run verifies
these tensors first. This module knows files and checksums, and is independent of model families, whose requests it receives.
"""

import fcntl
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.bundles.bundle import (
    CHUNK_VALUES,
    Bundle,
    BundleIdentity,
    PlacedTensor,
    TensorSpec,
    WeightBundleError,
    config_digest,
    content_digest,
    difference,
    encode_header,
    encode_seal,
    lay_out,
)
from pilotlight.engine.weights.bundles.bundle_file import BundleFile, BundleWriter, free_bytes
from pilotlight.engine.weights.checkpoint import PACKED_SUFFIX
from pilotlight.engine.weights.filling import ReadingProgress, fill
from pilotlight.engine.weights.storage import BundleMemory, Job
from pilotlight.engine.weights.tensor_bytes import as_bytes
from pilotlight.kernels.cpu import durable

_GROUP_BYTES = 256 << 20  # bytes written, verified and journalled together; an interruption loses no more than these
_READ_BYTES = 8 << 20
_CODED_TOGETHER = 32  # chunks of at most 2 MiB that are coded in parallel


class CodedTensorLimits(NamedTuple):
    """Limits of the tensors that are stored as coded chunks; others stay as they are."""

    least_bytes: int = 64 << 10
    most_share: float = 0.95  # coded, a tensor takes at most this share of its plain bytes


USUAL_LIMITS = CodedTensorLimits()


def pack(bundle: Bundle, jobs: Sequence[Job], out: Path, on_progress: ReadingProgress) -> Path:
    """Write a packed bundle and return its path. Raises CheckpointError.

    `jobs` fill tensors on the device `meta` that are laid out like `bundle`.
    """
    finished = find_packed(out, bundle.identity)
    if finished is not None:
        on_progress(bundle.data_bytes, bundle.data_bytes)
        return finished
    partial = out / f".{bundle.identity.source[:16]}-{bundle.identity.dtype}.partial"
    with _opened(partial) as fd:
        try:
            whole = _write(fd, _Journal(partial, bundle), bundle, jobs, on_progress)
        except OSError as error:
            free = free_bytes(out) / 2**20
            raise CheckpointError(
                f"{partial} cannot be written: {error.strerror}; {bundle.size / 2**20:.0f} MiB are needed in all and {free:.0f} MiB are left: "
                "make room and run it again, it continues where it was"
            ) from error
        path = out / f"{content_digest(whole)}{PACKED_SUFFIX}"
        durable.replace(partial, path)
        _Journal(partial, bundle).remove()
    return path


def pack_chunks(
    plain: BundleFile, identity: BundleIdentity, out: Path, on_progress: ReadingProgress, limits: CodedTensorLimits
) -> Path:
    """Write a packed bundle of the tensors of `plain`, and return its path. Raises CheckpointError.

    bf16 tensors are stored as coded chunks where that saves enough.
    """
    partial = out / f".{identity.source[:16]}-lossless.partial"
    with _opened(partial) as fd:
        try:
            with TemporaryFile(dir=out) as spool:  # spooled because the lengths of chunks are known only after coding
                specs, coded = _spool(plain, spool, on_progress, limits)
                bundle = lay_out(identity, plain.bundle.facts, specs, with_checksums=True, coded=coded)
                os.ftruncate(fd, bundle.size)
                new = BundleWriter(fd, bundle.size)
                spool.seek(0)
                for placed in bundle.tensors:
                    for at in range(placed.start, placed.end, _READ_BYTES):
                        new.write(at, memoryview(spool.read(min(_READ_BYTES, placed.end - at))))
            os.fdatasync(fd)
            done = {placed.spec.name: checksum for placed, checksum in checksums(fd, bundle.tensors)}
            whole = _sealed(fd, new, bundle, done)
        except OSError as error:
            raise CheckpointError(
                f"{partial} cannot be written: {error.strerror}; make room and run it again"
            ) from error
        path = out / f"{content_digest(whole)}{PACKED_SUFFIX}"
        durable.replace(partial, path)
    return path


def _spool(
    plain: BundleFile, spool: IO[bytes], on_progress: ReadingProgress, limits: CodedTensorLimits
) -> tuple[list[TensorSpec], dict[str, tuple[int, ...]]]:
    """Write the tensors in sequence, coded or unchanged.

    Returns the specs of the written tensors and chunks, and the shapes of the coded tensors.
    """
    # Imported here because few models need Zstandard.
    from pilotlight.engine.weights.bundles.coded_chunks import encode_chunk

    memory = BundleMemory(plain.map(), plain.bundle)
    specs: list[TensorSpec] = []
    coded: dict[str, tuple[int, ...]] = {}
    done = 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for placed in plain.bundle.tensors:
            spec, tensor = placed.spec, memory.tensor(placed)
            begin, sizes = spool.tell(), []
            if tensor.dtype == torch.bfloat16 and tensor.nbytes >= limits.least_bytes:
                parts = torch.split(tensor.view(-1), CHUNK_VALUES)
                for i in range(0, len(parts), _CODED_TOGETHER):
                    for chunk in threads.map(encode_chunk, parts[i : i + _CODED_TOGETHER]):
                        sizes.append(spool.write(chunk))
            if sizes and sum(sizes) <= limits.most_share * tensor.nbytes:
                coded[spec.name] = spec.shape
                specs += [TensorSpec(f"{spec.name}~{i}", "U8", (size,)) for i, size in enumerate(sizes)]
            else:
                spool.seek(begin)
                spool.truncate()
                spool.write(as_bytes(tensor))
                specs.append(spec)
            done += spec.num_bytes
            on_progress(done, plain.bundle.data_bytes)
    return specs, coded


def find_packed(out: Path, identity: BundleIdentity) -> Path | None:
    """Return the path of a finished bundle with this identity, or None.

    Raises CheckpointError if the directory contains another bundle, because a directory is the source of only one model.
    """
    for path in sorted(out.glob(f"*{PACKED_SUFFIX}")):
        try:
            with BundleFile.open(path) as file:
                found = file.bundle.identity
        except WeightBundleError as error:
            raise CheckpointError(f"{path} is damaged: {error}; remove it") from error
        if found == identity:
            return path
        raise CheckpointError(f"{path} is another bundle: {difference(found, identity)}; choose another directory")
    return None


def verify(path: Path, on_progress: ReadingProgress) -> None:
    """Check a finished bundle's bytes against its checksums and its name, and the config.json beside it.

    Raises CheckpointError with the names of damaged tensors.
    """
    try:
        file = BundleFile.open(path)
    except (WeightBundleError, OSError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    with file:
        bundle, done = file.bundle, 0
        if not bundle.checksums:
            raise CheckpointError(
                f"{path} has no checksums: an engine host wrote it for itself, and `pilotlight pack` did not"
            )
        config = path.with_name("config.json")
        if not config.exists() or config_digest(config.read_bytes()) != bundle.identity.config:
            raise CheckpointError(f"{config} is not the one that {path.name} was packed with; pack the model again")
        damaged = []
        for placed, checksum in checksums(file.fd, bundle.tensors):
            done += placed.spec.num_bytes
            on_progress(done, bundle.data_bytes)
            if checksum != bundle.checksums.get(placed.spec.name):
                damaged.append(placed.spec.name)
    if damaged:
        names = ", ".join(damaged[:3]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
        raise CheckpointError(f"{path} is damaged in {names}; fetch or pack it again")
    if path.name != f"{content_digest(bundle)}{PACKED_SUFFIX}":
        raise CheckpointError(
            f"{path} is whole, but should be called {content_digest(bundle)}{PACKED_SUFFIX}: it is a copy of another bundle"
        )


def checksums(fd: int, places: Iterable[PlacedTensor]) -> Iterator[tuple[PlacedTensor, str]]:
    """Yield each tensor with the checksum of its data in the file, in order."""
    places = list(places)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        yield from zip(places, threads.map(lambda placed: _checksum(fd, placed), places), strict=True)


def _write(fd: int, journal: "_Journal", bundle: Bundle, jobs: Sequence[Job], on_progress: ReadingProgress) -> Bundle:
    done = journal.read(fd)
    os.ftruncate(fd, bundle.size)
    new = BundleWriter(fd, bundle.size)
    jobs_of = _by_place(jobs, bundle.tensors)
    num_done = sum(placed.spec.num_bytes for placed in bundle.tensors if placed.spec.name in done)
    for group in _groups(placed for placed in bundle.tensors if placed.spec.name not in done):
        fill([job for placed in group for job in jobs_of[placed.start]], write=new.write)
        os.fdatasync(fd)
        added = {placed.spec.name: checksum for placed, checksum in checksums(fd, group)}
        journal.add(added)
        done |= added
        num_done += sum(placed.spec.num_bytes for placed in group)
        on_progress(num_done, bundle.data_bytes)
    return _sealed(fd, new, bundle, done)


def _sealed(fd: int, new: BundleWriter, bundle: Bundle, done: Mapping[str, str]) -> Bundle:
    """Write the header, with the checksums that are now known, and the seal; return the final header."""
    whole = bundle._replace(checksums={placed.spec.name: done[placed.spec.name] for placed in bundle.tensors})
    header = encode_header(whole)
    new.write(0, memoryview(header))
    seal = encode_seal(header)
    new.write(whole.size - len(seal), memoryview(seal))
    os.fsync(fd)
    return whole


class _Journal:
    """A journal: one line that identifies the layout, then a checksum and a name per tensor."""

    def __init__(self, partial: Path, bundle: Bundle) -> None:
        self._path = partial.with_suffix(".journal")
        self._layout = blake2b(encode_header(bundle), digest_size=16).hexdigest()
        self._places = {placed.spec.name: placed for placed in bundle.tensors}

    def read(self, fd: int) -> dict[str, str]:
        """Return the checksums of the journalled tensors whose data on the disk still match."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        if lines[:1] != [self._layout]:
            self._path.write_text(f"{self._layout}\n")
            return {}
        noted = {name: checksum for checksum, _, name in (line.partition(" ") for line in lines[1:])}
        known = [self._places[name] for name in noted if name in self._places]
        return {placed.spec.name: found for placed, found in checksums(fd, known) if found == noted[placed.spec.name]}

    def add(self, added: dict[str, str]) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{checksum} {name}\n" for name, checksum in added.items())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


@contextmanager
def _opened(partial: Path) -> Iterator[int]:
    """Open the file of an earlier run, or a new one, and lock it."""
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is packing into {partial.parent}; wait for it") from None
        yield fd
    finally:
        os.close(fd)


def _groups(places: Iterable[PlacedTensor]) -> Iterator[list[PlacedTensor]]:
    group: list[PlacedTensor] = []
    for placed in places:
        group.append(placed)
        if sum(p.spec.num_bytes for p in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def _by_place(jobs: Sequence[Job], places: Sequence[PlacedTensor]) -> dict[int, list[Job]]:
    """Return the jobs that fill each tensor, by the tensor's start offset."""
    starts = [placed.start for placed in places]
    found: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        at = int(job.into.storage_offset()) * job.into.itemsize
        found[starts[bisect_right(starts, at) - 1]].append(job)
    return found


def _checksum(fd: int, placed: PlacedTensor) -> str:
    digest = blake2b(digest_size=16)
    for start in range(placed.start, placed.end, _READ_BYTES):
        digest.update(os.pread(fd, min(_READ_BYTES, placed.end - start), start))
    return digest.hexdigest()
