"""GGUF files that llama.cpp's own converter and quantizer write of the embedded model, answered by this engine: the same tokens?

    python -m load_tests.scenarios.gguf_files --peers .peers       one minute

Each file's greedy answers to prompts of random tokens are compared with those of a checkpoint: the one that was converted, or one of the numbers that
llama.cpp's `gguf` package makes of the file's codes. Codes are computed with twice, unpacked and as they are.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from load_tests.peers import convert
from load_tests.records import write_record
from load_tests.scenarios.engines import ROOT
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams, Submit
from pilotlight.engine.embedded import ember
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.kernels.cpu import library

EMBER = Path(ember.__file__).parent
_CONVERTED, _QUANTIZED = ("f32", "f16", "bf16", "q8_0"), ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K")
_PROMPTS, _PROMPT_TOKENS, _ANSWER_TOKENS = 16, 48, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where make peers has put llama.cpp")
    options = parser.parse_args()
    tree = next(iter(options.peers.glob("llama/*/vendor/llama.cpp")), None)
    if tree is None or not (tree / "build/bin/llama-quantize").exists():
        print("llama.cpp is not set up; run: make peers", file=sys.stderr)
        return 3
    library.start(wait=True)
    console, rows = Console(), []
    with TemporaryDirectory() as name:
        folder = Path(name)
        original = _answers(EMBER)
        for kind, file in _files(tree, folder):
            row = _compared(kind, file, original, folder)
            rows.append(row)
            console.print(", ".join(f"{key} {value}" for key, value in row.items()), highlight=False)
    console.print(f"Record: {write_record('gguf-files', {'model': EMBER.name, 'files': rows})}")
    return 0 if all(row["same_as_numbers"] == row["prompts"] for row in rows) else 1


def _files(tree: Path, folder: Path) -> list[tuple[str, Path]]:
    found = []
    for kind in _CONVERTED:
        file = folder / f"{kind}.gguf"
        arguments = [convert.__file__, tree, EMBER, "--outfile", file, "--outtype", kind]
        subprocess.run([sys.executable, *map(str, arguments)], check=True, capture_output=True)
        found.append((kind, file))
    for kind in _QUANTIZED:
        file = folder / f"{kind}.gguf"
        subprocess.run(
            [tree / "build/bin/llama-quantize", folder / "f32.gguf", file, kind], check=True, capture_output=True
        )
        found.append((kind.lower(), file))
    return found


def _compared(kind: str, file: Path, original: list[list[int]], folder: Path) -> dict[str, Any]:
    directory = directory_of(file, folder / "store")
    with patch.object(library, "takes_codes", lambda: False):
        unpacked = _answers(directory)
    numbers = _answers(_checkpoint_of(file, directory, folder / kind))
    row = {"type": kind, "bytes": file.stat().st_size, "prompts": _PROMPTS, "same_as_numbers": _same(unpacked, numbers)}
    row["same_as_original"] = _same(unpacked, original)
    return row | {"same_with_codes": _same(_answers(directory), numbers)}


def _same(found: list[list[int]], expected: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(found, expected, strict=True))


def _checkpoint_of(file: Path, directory: Path, out: Path) -> Path:
    """Write a checkpoint of the numbers that llama.cpp's package reads from the file, under the names of the one that it was converted from."""
    import gguf

    out.mkdir()
    shutil.copy(EMBER / "config.json", out)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    config = json.loads((EMBER / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    tensors = {}
    for name, plain in load_file(EMBER / "model.safetensors").items():
        one = stored[f"{names.get_name(name, try_suffixes=('.weight',))}"]
        values = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = torch.unflatten(values, 0, (-1, config["head_dim"] // 2, 2)).transpose(1, 2).reshape(plain.shape)
        tensors[name] = values.float().contiguous()
    save_file(tensors, out / "model.safetensors")
    return out


def _answers(directory: Path) -> list[list[int]]:
    """Return greedy answers to the same prompts, all computed beside each other."""
    host = HostConfig(kv_bytes=64 << 20)
    engine = load_model(ModelSpec("m", str(directory), kv_tokens=_PROMPTS * 128), host, make_kv_memory(host)).engine
    heard: dict[str, list[int]] = {str(i): [] for i in range(_PROMPTS)}
    sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    for i, sequence in enumerate(heard):
        prompt = torch.randint(3, 2000, (_PROMPT_TOKENS,), generator=torch.Generator().manual_seed(i)).tolist()
        engine.submit(Submit(sequence, "m", tuple(prompt), sampling))
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            heard[output.sequence_id] += output.token_ids
        engine.on_idle()
    engine.close()
    return list(heard.values())


if __name__ == "__main__":
    sys.exit(main())
