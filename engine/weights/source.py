"""The source of a model's weights: a checkpoint, a packed bundle, or an earlier load's bundle.

This module knows what is stored, in which types, and whether it has changed. It is independent of model families, and of where a load puts the
weights (load.py).
"""

import logging
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.plain_files import read_bytes
from pilotlight.engine.weights.bundles.bundle import (
    BundleIdentity,
    CheckpointFacts,
    WeightBundleError,
    config_digest,
    difference,
)
from pilotlight.engine.weights.bundles.bundle_file import BundleFile
from pilotlight.engine.weights.bundles.lossless import CODED
from pilotlight.engine.weights.checkpoint import Checkpoint, index_checkpoint, packed_file
from pilotlight.engine.weights.digests import fingerprint
from pilotlight.engine.weights.formats.format import WeightFormat
from pilotlight.engine.weights.fused import FusedRows, divide

log = logging.getLogger(__name__)

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNKED = ", in coded chunks"  # suffix of `BundleIdentity.dtype` for the output of `pack --lossless`
_AS_STORED = "tensors as the checkpoint has them"  # `BundleIdentity.dtype` of a copy of the checkpoint


class WeightSource:
    """The weights of one directory; to be closed.

    Its `facts` and its fingerprint are available before a load, because types and caches depend on them.
    """

    def __init__(
        self,
        directory: Path,
        architecture: str,
        shared_path: Path | None,
        format: WeightFormat | None = None,
        fused: tuple[FusedRows, ...] = (),
    ) -> None:
        """Open the directory. `shared_path`: path of the bundle in memory, which may not exist yet.

        `fused`: tensors that contain several of the model's matrices. Raises CheckpointError if a packed bundle cannot be used.
        """
        self.directory = directory
        self.format = format
        self.shared_path = shared_path
        self.fused = fused
        self._architecture = architecture
        self._config = config_digest(read_bytes(directory / "config.json"))
        self._open = ExitStack()
        self.packed = self._open_packed()
        self._shared = self._open_shared()  # bundle in memory of this checkpoint, perhaps in another type

    def close(self) -> None:
        self._open.close()

    @cached_property
    def fingerprint(self) -> bytes:
        try:
            return fingerprint(self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read for its fingerprint: {error}") from error

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The directory's checkpoint. Raises CheckpointError, also for a packed directory, which has none."""
        return open_divided(self.directory, self.fused)

    @property
    def packed_dtype(self) -> torch.dtype | None:
        """The type for which the checkpoint was packed, or None if it was not packed."""
        return None if self.packed is None else DTYPE_NAMES[self.packed.bundle.identity.dtype.removesuffix(CHUNKED)]

    @property
    def facts(self) -> CheckpointFacts:
        for file in (self._shared, self.packed):
            if file is not None:
                return file.bundle.facts
        return self.checkpoint.facts

    def stays_packed(self, device: torch.device) -> bool:
        """Return True if weights stay in their stored format, for kernels that decode it."""
        return self.packed is None and self.format is not None and self.format.stays_packed(device)

    def lies_as_stored(self, device: torch.device) -> bool:
        """Return True if weights stay packed and mostly have the stored bytes.

        Other packed weights are rearranged at every load, and their bundle in memory is a copy of the checkpoint.
        """
        return self.stays_packed(device) and self.format is not None and self.format.lies_as_stored()

    def identity(self, dtype: torch.dtype | None, is_coded: bool = False) -> BundleIdentity:
        """Return the identity of a bundle in `dtype`; None is for a copy of the checkpoint.

        `is_coded`: the bundle's matrices are in 12 bits.
        """
        name = _AS_STORED if dtype is None else str(dtype).removeprefix("torch.") + (CODED if is_coded else "")
        return BundleIdentity(self._architecture, name, self._config, self.fingerprint.hex())

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the directory's files have changed."""
        if fingerprint(self.directory) != self.fingerprint:
            raise CheckpointError(f"{self.directory} was changed while it was read; load it again")

    @property
    def shared_file(self) -> BundleFile | None:
        """The bundle in memory of this checkpoint, in any type, or None."""
        return self._shared

    def shared(self, identity: BundleIdentity) -> BundleFile | None:
        """Return the bundle in memory with this identity, or None; remove a bundle of another identity."""
        if self._shared is not None and (wrong := difference(self._shared.bundle.identity, identity)) is not None:
            self.refuse_shared(wrong)
        return self._shared

    def reopen_shared(self) -> BundleFile:
        """Open and return the bundle that has just been written to `shared_path`."""
        assert self.shared_path is not None
        self._shared = self._open.enter_context(BundleFile.open(self.shared_path))
        return self._shared

    def refuse_shared(self, why: str) -> None:
        """Remove the bundle in memory, which frees its memory until a new bundle is written."""
        assert self.shared_path is not None
        log.warning("the bundle %s is not used and will be made again: %s", self.shared_path, why)
        self._shared = None
        with suppress(OSError):
            self.shared_path.unlink()

    def discard_shared(self) -> None:
        """Remove the bundle in memory because the model computes NaN or infinity; no later load may use it."""
        if self.shared_path is not None:
            self.shared_path.unlink(missing_ok=True)

    def _open_shared(self) -> BundleFile | None:
        if self.shared_path is None:
            return None
        try:
            file = self._open.enter_context(BundleFile.open(self.shared_path))
        except FileNotFoundError:
            return None
        except (OSError, WeightBundleError) as error:
            self.refuse_shared(str(error))
            return None
        found = file.bundle.identity
        wrong = difference(found, self.identity(None)._replace(dtype=found.dtype))
        if wrong is None:
            return file
        self.refuse_shared(wrong)
        return None

    def _open_packed(self) -> BundleFile | None:
        path = packed_file(self.directory)
        if path is None:
            return None
        try:
            file = self._open.enter_context(BundleFile.open(path))
        except WeightBundleError as error:
            raise CheckpointError(
                f"{path.name} in {path.parent} cannot be used: {error}; pack the model again"
            ) from error
        if file.bundle.identity.config != self._config:
            raise CheckpointError(f"{path.parent} was packed with another config.json; pack the model again")
        if file.bundle.identity.dtype.removesuffix(CHUNKED) not in DTYPE_NAMES:
            raise CheckpointError(
                f"{path} holds {file.bundle.identity.dtype}, a form that is no longer supported; pack the model again"
            )
        return file


def open_divided(directory: Path, fused: tuple[FusedRows, ...]) -> Checkpoint:
    """Open a directory's checkpoint with its `fused` tensors divided. Raises CheckpointError."""
    return Checkpoint(divide(index_checkpoint(directory), fused))
