"""Runs `pilotlight quantize` in a separate process, since it needs torch.

Reports its progress as JSON, one object per line.

python -m pilotlight.engine.tools.quantizing DIRECTORY OUT --to int4 --group 32

Attention, feed-forwards and experts are rounded to the format of compressed-tensors, which vLLM and transformers read too; embeddings, head, routers
and norms stay as they are.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.planning.model_plan import PlannedModel, plan_model
from pilotlight.engine.tools.calibration import observe
from pilotlight.engine.tools.packing import Report, copy_beside
from pilotlight.engine.tools.rounding import choose_scales, compensate, pack_words, round_to_codes
from pilotlight.engine.weights.checkpoint import index_checkpoint, packed_file
from pilotlight.engine.weights.config import quantization_method, read_config
from pilotlight.engine.weights.filling import check_finite
from pilotlight.engine.weights.stored_tensor import StoredTensor
from pilotlight.engine.weights.tensor_bytes import read_stored

BITS = {"int8": 8, "int4": 4}
FILE_BYTES = 2 << 30
_MATRICES = ("attention", "dense", "experts", "shared_experts")


class Rounding(NamedTuple):
    bits: int
    group: int | None  # columns per scale; None for a whole row

    def fits(self, columns: int) -> bool:
        return self.group is None or columns % self.group == 0


@torch.inference_mode()
def quantize_directory(
    directory: Path,
    out: Path,
    rounding: Rounding,
    report: Report,
    text: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write the checkpoint in `directory` to `out`, with its matrices rounded. Raises CheckpointError.

    `text`: text to calibrate with. Each matrix is then rounded so that its products with the text's inputs change least.
    """
    config = read_config(directory)
    if packed_file(directory) is not None:
        raise CheckpointError(f"{directory} is packed; quantize the checkpoint that it was made of")
    if quantization_method(config) is not None:
        raise CheckpointError(f"{directory} is quantized already: its config.json has a quantization_config")
    if out.resolve() == directory.resolve() or any(out.glob("*.safetensors")):
        raise CheckpointError(f"{out} holds a checkpoint already; choose another directory")
    stored = index_checkpoint(directory)
    matrices = _matrices(plan_model(config), stored)
    rounded = {name for name in matrices if rounding.fits(stored[f"{name}.weight"].shape[1])}
    if not rounded:
        raise CheckpointError(
            f"no matrix of {directory} has a multiple of {rounding.group} columns: choose another group"
        )
    sums = {} if text is None else observe(directory, text, rounded, report.progress)
    copy_beside(directory, out)
    left = {name.removesuffix(".weight") for name, tensor in stored.items() if len(tensor.shape) == 2} - rounded
    described = config | {"quantization_config": describe(rounding, sorted(left))}
    # written first, so that an interrupted run leaves no weights without a config
    (out / "config.json").write_text(json.dumps(described, indent=2))
    _write(stored, rounded, rounding, sums, out, report, file_bytes)
    return out


def describe(rounding: Rounding, ignored: list[str]) -> dict[str, Any]:
    """Return the quantization_config for config.json, as compressed-tensors defines it."""
    strategy = "channel" if rounding.group is None else "group"
    weights = {
        "num_bits": rounding.bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": rounding.group, "dynamic": False,
        "actorder": None, "block_structure": None, "observer": "mse", "observer_kwargs": {},
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ignored,
        "config_groups": {"group_0": scheme}, "kv_cache_scheme": None,
    }  # fmt: skip


def _matrices(model: PlannedModel, stored: dict[str, StoredTensor]) -> set[str]:
    """Return the names of the matrices to round, without ".weight".

    Raises CheckpointError if the checkpoint does not keep each projection in a separate tensor.
    """
    wanted = {shape.name for _, shape in model.weights() if shape.columns and shape.part in _MATRICES}
    found = {name.removesuffix(".weight") for name in stored if name.endswith(".weight")}
    names = {name for name in found if re.sub(r"\.experts\.\d+\.", ".experts.0.", name) in wanted}
    missing = sorted(wanted - names)
    if missing:
        raise CheckpointError(
            f"{missing[0]} is not stored as its own tensor in this checkpoint; such models cannot be quantized here"
        )
    return names


def _write(
    stored: dict[str, StoredTensor],
    rounded: set[str],
    rounding: Rounding,
    sums: dict[str, torch.Tensor],
    out: Path,
    report: Report,
    file_bytes: int,
) -> None:
    """Write safetensors files of about `file_bytes`, and the index if there are several."""
    total, done = sum(tensor.end - tensor.start for tensor in stored.values()), 0
    files: list[Path] = []
    places: dict[str, int] = {}
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        files.append(out / f".{len(files) + 1}.partial")
        places.update(dict.fromkeys(pending, len(files)))
        save_file(pending, files[-1], {"format": "pt"})
        pending.clear()

    for name, at in sorted(stored.items(), key=lambda pair: (pair[1].file, pair[1].start)):
        tensor, stem = read_stored(at), name.removesuffix(".weight")
        pending |= (
            _round(name, tensor, rounding, sums.get(stem)) if stem in rounded and name != stem else {name: tensor}
        )
        done += tensor.nbytes
        report.progress(done, total)
        if sum(part.nbytes for part in pending.values()) >= file_bytes:
            flush()
    if pending:
        flush()
    if len(files) == 1:
        files[0].rename(out / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for file, final in zip(files, names, strict=True):
        file.rename(out / final)
    index = {"metadata": {}, "weight_map": {name: names[i - 1] for name, i in places.items()}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def _round(name: str, weight: torch.Tensor, rounding: Rounding, sums: torch.Tensor | None) -> dict[str, torch.Tensor]:
    check_finite(name, bool(weight.isfinite().all()))
    stem, (_, columns) = name.removesuffix(".weight"), weight.shape
    dtype = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    group = rounding.group or columns
    if sums is None:
        scales = choose_scales(weight, rounding.bits, group, dtype)
        codes = round_to_codes(weight, scales, rounding.bits)
    else:
        codes, scales = compensate(weight, sums, rounding.bits, group, dtype)
    return {
        f"{stem}.weight_packed": pack_words(codes, rounding.bits),
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_shape": torch.tensor(weight.shape),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Quantize as the arguments request, those of the process by default."""
    parser = argparse.ArgumentParser(prog="python -m pilotlight.engine.tools.quantizing")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--to", required=True, choices=sorted(BITS))
    parser.add_argument("--group", type=int, default=32, help="columns per scale; 0 for whole rows")
    parser.add_argument("--calibrate", type=Path, help="a file with text like that which the model will process")
    options = parser.parse_args(arguments)
    report = Report()
    try:
        text = None if options.calibrate is None else options.calibrate.read_text(encoding="utf-8")
        rounding = Rounding(BITS[options.to], options.group or None)
        path = quantize_directory(options.directory, options.out, rounding, report, text)
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        report.say(path=str(path), num_bytes=num_bytes)
    except (CheckpointError, OSError, SafetensorError, UnicodeDecodeError) as error:
        report.say(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
