"""Runs `pilotlight pack` in a separate process, since it needs torch.

Reports its progress as JSON, one object per line.

python -m pilotlight.engine.tools.packing pack DIRECTORY OUT --dtype auto
python -m pilotlight.engine.tools.packing verify OUT
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.loading.model_loading import choose_dtype
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.weights.bundles.bundle import Bundle, BundleIdentity, WeightBundleError, config_digest, lay_out
from pilotlight.engine.weights.bundles.bundle_file import BundleFile
from pilotlight.engine.weights.bundles.packed import (
    USUAL_LIMITS,
    CodedTensorLimits,
    find_packed,
    pack,
    pack_chunks,
    verify,
)
from pilotlight.engine.weights.checkpoint import packed_file
from pilotlight.engine.weights.config import architecture
from pilotlight.engine.weights.digests import fingerprint
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.pooling_recipe import read_model_config
from pilotlight.engine.weights.source import CHUNKED, open_divided
from pilotlight.engine.weights.storage import META, BundleMemory, BundleStorage, CheckpointStorage, Job, LayoutPlan
from pilotlight.engine.weights.tensor_bytes import DTYPES

_BESIDE = (".json", ".jinja", ".txt", ".model")  # suffixes of files that a model needs beside its weights
_INDEX = "model.safetensors.index.json"
_PROGRESS_INTERVAL_S = 0.1


@torch.inference_mode()
def pack_directory(
    directory: Path,
    out: Path,
    dtype_name: str,
    report: "Report",
    is_lossless: bool = False,
    limits: CodedTensorLimits = USUAL_LIMITS,
) -> Path:
    """Pack the checkpoint in `directory` into `out` and return the bundle's path.

    `is_lossless`: pack in coded chunks. Packing such a bundle again without this option returns the plain bundle. Raises CheckpointError.
    """
    if out.resolve() == directory.resolve():
        raise CheckpointError(f"{out} is the checkpoint's own directory; choose another one")
    if (packed := packed_file(directory)) is not None:
        return _unpack(packed, out, dtype_name, report, is_lossless)
    raw_config, _ = read_model_config(directory)
    family = find_family(raw_config)
    config = family.parse_config(raw_config)
    checkpoint = open_divided(directory, config.fused if isinstance(config, DecoderConfig) else ())
    facts = checkpoint.facts
    dtype = choose_dtype(facts, torch.device("cpu")) if dtype_name == "auto" else getattr(torch, dtype_name)
    source = fingerprint(directory).hex()
    digest = config_digest((directory / "config.json").read_bytes())
    identity = BundleIdentity(architecture(raw_config), str(dtype).removeprefix("torch."), digest, source)
    format = read_format(raw_config)
    if is_lossless and (dtype != torch.bfloat16 or format is not None):
        how, instead = f"is packed as {identity.dtype}", ", or round them with --dtype bfloat16"
        if format is not None:
            how, instead = "is quantized", ""
        raise CheckpointError(f"{directory} {how}: --lossless is for plain weights in bfloat16; leave it out{instead}")
    plan = LayoutPlan(checkpoint)
    loader = WeightLoader(plan, dtype, META, format)
    family.load(config, loader, config.context_length)
    bundle = lay_out(identity, facts, plan.tensors, with_checksums=True)
    memory = BundleMemory(torch.empty(bundle.size, dtype=torch.uint8, device=META), bundle)
    storage = CheckpointStorage(checkpoint, memory.take)
    family.load(config, WeightLoader(storage, dtype, META, format), config.context_length)
    checkpoint.refuse_unrequested()
    _refuse_anothers(directory, out)
    coded = identity._replace(dtype=identity.dtype + CHUNKED)
    # raises if `out` has the bundle of another model, before any file is overwritten
    finished = find_packed(out, coded if is_lossless else identity)
    copy_beside(directory, out)
    if not is_lossless:
        path = pack(bundle, storage.jobs, out, report.progress)
    elif finished is not None:
        path = finished
    else:
        path = _pack_chunks(bundle, storage.jobs, coded, out, report, limits)
    if fingerprint(directory).hex() != source:
        path.unlink()
        raise CheckpointError(f"{directory} was changed while it was read; pack it again")
    return path


def _pack_chunks(
    bundle: Bundle,
    jobs: Sequence[Job],
    identity: BundleIdentity,
    out: Path,
    report: "Report",
    limits: CodedTensorLimits,
) -> Path:
    """Pack in coded chunks, by way of a plain bundle in a subdirectory.

    The plain bundle is resumed if an earlier run was interrupted, and is removed at the end.
    """
    beside = out / ".plain"
    beside.mkdir(exist_ok=True)
    with BundleFile.open(pack(bundle, jobs, beside, report.progress)) as plain:
        path = pack_chunks(plain, identity, out, report.progress, limits)
    shutil.rmtree(beside)
    return path


def _unpack(packed: Path, out: Path, dtype_name: str, report: "Report", is_lossless: bool) -> Path:
    try:
        file = BundleFile.open(packed)
    except WeightBundleError as error:
        raise CheckpointError(f"{packed} cannot be used: {error}") from error
    with file:
        found = file.bundle
        identity = found.identity._replace(dtype=found.identity.dtype.removesuffix(CHUNKED))
        if is_lossless or not found.coded or dtype_name not in ("auto", identity.dtype):
            raise CheckpointError(f"{packed.parent} is packed already, as {found.identity.dtype}")
        bundle = lay_out(identity, found.facts, found.specs, with_checksums=True)
        memory = BundleMemory(torch.empty(bundle.size, dtype=torch.uint8, device=META), bundle)
        storage = BundleStorage(found, memory.take, packed)
        for name, dtype, shape in found.specs:
            storage.take(name, shape, DTYPES[dtype])
        _refuse_anothers(packed.parent, out)
        copy_beside(packed.parent, out)
        return pack(bundle, storage.jobs, out, report.progress)


class Report:
    """Writes progress and results as JSON lines for the parent process."""

    def __init__(self) -> None:
        self._last = 0.0

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last > _PROGRESS_INTERVAL_S:
            self._last = now
            self.say(done=done, total=total)

    def say(self, **values: Any) -> None:
        try:
            print(json.dumps(values), flush=True)
        except BrokenPipeError:
            os._exit(1)  # the parent was killed; the next run resumes from the written bytes


def _refuse_anothers(directory: Path, out: Path) -> None:
    """Raise CheckpointError if `out` has another checkpoint, which may be its only copy."""
    for name in ("model.safetensors", _INDEX):
        if (out / name).exists():
            raise CheckpointError(f"{out} is a checkpoint's directory: it holds {name}; choose another one")
    config = out / "config.json"
    if config.exists() and config.read_bytes() != (directory / "config.json").read_bytes():
        raise CheckpointError(f"{config} belongs to another model; choose another directory, or empty this one")


def copy_beside(directory: Path, out: Path) -> None:
    """Copy the files that a model needs beside its weights, such as its tokenizer. Raises CheckpointError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be made: {error.strerror}; choose another directory") from None
    for file in sorted(directory.rglob("*")):
        relative = file.relative_to(directory)
        hidden = any(part.startswith(".") for part in relative.parts)
        is_module = (
            file.name == "model.safetensors" and file.parent != directory
        )  # weights of a layer that follows the pooling of an embedding model
        if (file.suffix in _BESIDE or is_module) and file.name != _INDEX and not hidden and file.is_file():
            target = out / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = target.with_name(f".{target.name}.partial")
            shutil.copyfile(file, copy)
            copy.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pilotlight.engine.tools.packing")
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    packing.add_argument("directory", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    packing.add_argument("--lossless", action="store_true")
    verifying = verbs.add_parser("verify")
    verifying.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    report = Report()
    try:
        if arguments.verb == "pack":
            path = pack_directory(arguments.directory, arguments.out, arguments.dtype, report, arguments.lossless)
        else:
            found = packed_file(arguments.directory)
            if found is None:
                raise CheckpointError(f"{arguments.directory} holds no bundle; `pilotlight pack` makes one")
            path = found
            verify(path, report.progress)
        report.say(path=str(path), num_bytes=path.stat().st_size)
    except (CheckpointError, OSError) as error:
        report.say(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
