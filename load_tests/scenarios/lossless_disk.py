"""Bytes that `pilotlight pack --lossless` saves, and the speed of decoding its chunks.

Compared with reading the plain bundle's bytes, and with zstd -19:

    python -m load_tests.scenarios.lossless_disk                 Ember, which is trained, and 50 million random weights
    python -m load_tests.scenarios.lossless_disk --shape 3b      six gigabytes of random ones

All files are in the page cache. Sizes are compared with a bound: the savings of an ideal code for the exponents, by their entropy, with signs and
mantissas unchanged.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import zstandard

from load_tests import random_checkpoint
from load_tests.records import spread, write_record
from pilotlight.engine.tools.packing import Report, pack_directory
from pilotlight.engine.weights.bundles.bundle import Bundle
from pilotlight.engine.weights.bundles.bundle_file import BundleFile
from pilotlight.engine.weights.filling import fill
from pilotlight.engine.weights.storage import BundleMemory, BundleStorage
from pilotlight.engine.weights.tensor_bytes import DTYPES
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.planes import split_planes

SUBJECT = "lossless-disk"
_PIECE_BYTES = 2 << 20  # zstd -19 compresses pieces as large as chunks
_MOST_FOR_ZSTD = 32 << 20  # bytes that zstd compresses at most: it takes a second for each 2 MiB


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES), default="50m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="folder for checkpoints, with space for three times the largest")
    options = parser.parse_args()
    library.start(wait=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        work = Path(name)
        shape = random_checkpoint.SHAPES[options.shape]
        checkpoints = {
            "Ember": random_checkpoint.EMBER,
            f"random, {options.shape}": random_checkpoint.write(work / "random", shape),
        }
        results: dict[str, Any] = {"threads": os.cpu_count(), "checkpoints": {}}
        for number, (label, directory) in enumerate(checkpoints.items()):
            results["checkpoints"][label] = _measured(directory, work / str(number), options.rounds)
    _show(results)
    print(f"Record: {write_record(SUBJECT, results)}")
    return 0


def _measured(directory: Path, work: Path, rounds: int) -> dict[str, Any]:
    with redirect_stdout(sys.stderr):
        plain, coded = (
            pack_directory(directory, work / name, "bfloat16", Report(), is_lossless=name == "coded")
            for name in ("plain", "coded")
        )
    with BundleFile.open(plain) as plain_file, BundleFile.open(coded) as coded_file:
        pieces = _pieces(plain_file)
        packed = [zstandard.ZstdCompressor(level=19).compress(piece) for piece in pieces]
        sample_bytes = sum(map(len, pieces))
        fills = [_filled(plain_file), _filled(coded_file)]

        def unpacked() -> None:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                for _ in threads.map(lambda one: zstandard.ZstdDecompressor().decompress(one), packed):
                    pass

        speeds = _speeds(
            {"read": fills[0], "decoded": fills[1], "zstd_19": unpacked},
            {"zstd_19": sample_bytes},
            plain_file.bundle.data_bytes,
            rounds,
        )
        return {
            "matrices": _sizes(plain_file, coded_file.bundle),
            "wire_bytes": {path.parent.name: _tree_bytes(path.parent) for path in (plain, coded)},
            "zstd_19_saved": 1 - sum(map(len, packed)) / sample_bytes,
            "gb_per_s": speeds,
        }


def _sizes(plain: BundleFile, coded: Bundle) -> dict[str, float]:
    """Return bytes of linear layers and embeddings, plain and in chunks, and the possible savings."""
    memory, bits = BundleMemory(plain.map(), plain.bundle), 0.0
    plain_bytes = 0
    for placed in plain.bundle.tensors:
        if len(placed.spec.shape) > 1:
            values = memory.tensor(placed).view(-1)
            share = torch.bincount(split_planes(values)[: len(values)].long(), minlength=256).double() / len(values)
            share = share[share > 0]
            bits += len(values) * (8 - float((share * share.log2()).sum()))
            plain_bytes += placed.spec.num_bytes
    kept = sum(spec.num_bytes for spec in plain.bundle.specs if len(spec.shape) > 1 and spec.name not in coded.coded)
    chunks = sum(
        placed.spec.num_bytes for placed in coded.tensors if placed.spec.name.rpartition("~")[0] in coded.coded
    )
    vectors = sum(spec.num_bytes for spec in plain.bundle.specs if len(spec.shape) < 2 and spec.name in coded.coded)
    coded_bytes = chunks + kept - vectors
    return {
        "plain_bytes": plain_bytes,
        "coded_bytes": coded_bytes,
        "saved": 1 - coded_bytes / plain_bytes,
        "bound": 1 - bits / 8 / plain_bytes,
    }


def _filled(file: BundleFile) -> Callable[[], None]:
    """Return a function that reads all of a bundle into existing memory, with the threads of a load."""
    specs = file.bundle.specs
    tensors = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, dtype, shape in specs}

    def run() -> None:
        storage = BundleStorage(file.bundle, lambda name, shape, dtype: tensors[name], file.path)
        for name, dtype, shape in specs:
            storage.take(name, shape, DTYPES[dtype])
        fill(storage.jobs)

    return run


def _pieces(file: BundleFile) -> list[bytes]:
    content = file.map()[:_MOST_FOR_ZSTD].numpy()
    return [content[at : at + _PIECE_BYTES].tobytes() for at in range(0, len(content), _PIECE_BYTES)]


def _speeds(
    works: dict[str, Callable[[], None]], other_bytes: dict[str, int], num_bytes: int, rounds: int
) -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in works}
    for name, seconds in _turns(works, rounds):
        taken[name].append(other_bytes.get(name, num_bytes) / seconds / 1e9)
    return {name: spread(found) for name, found in taken.items()}


def _turns(works: dict[str, Callable[[], None]], rounds: int) -> Iterator[tuple[str, float]]:
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            yield name, time.perf_counter() - began


def _tree_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _show(results: dict[str, Any]) -> None:
    print(f"{results['threads']} threads")
    for name, one in results["checkpoints"].items():
        matrices, speeds, wire = one["matrices"], one["gb_per_s"], one["wire_bytes"]
        print(
            f"  {name}: linear layers and embeddings {matrices['plain_bytes'] / 2**20:,.1f} -> {matrices['coded_bytes'] / 2**20:,.1f} MiB, "
            f"{matrices['saved']:.1%} saved of at most {matrices['bound']:.1%}; zstd -19 {one['zstd_19_saved']:.1%}"
        )
        print(f"    on the wire {wire['plain'] / 2**20:,.1f} -> {wire['coded'] / 2**20:,.1f} MiB")
        print("    GB/s: " + ", ".join(f"{key} {found['median']:.2f}" for key, found in speeds.items()))


if __name__ == "__main__":
    sys.exit(main())
