"""Makes a directory that presents a GGUF file as a Hugging Face checkpoint: small files and a link.

All other code reads such directories, so it works for GGUF files as well. A directory is made atomically, once for each size and modification time of
a file.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.architectures import Described, describe
from pilotlight.engine.gguf.encoder_families import recipe_files
from pilotlight.engine.gguf.family import GgufHeader, NamedTensor
from pilotlight.engine.gguf.file import GgufFile
from pilotlight.engine.gguf.metadata import Metadata
from pilotlight.engine.gguf.vocabulary import Vocabulary, read_vocabulary
from pilotlight.engine.weights.checkpoint import GGUF_CONVERTED, GGUF_FILE, GGUF_INDEX

_FORM = 5  # version of the written files; increment it to make directories again
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
# The values of llama.cpp (common/common.h) for what a file does not state: with these its publisher has tried it.
_SAMPLING_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def directory_of(file: Path, root: Path) -> Path:
    """Return the file's directory under `root`; make it if it does not exist.

    Raises CheckpointError if the file is not supported, or OSError.
    """
    file = file.resolve()
    state = file.stat()
    name = sha256(repr((_FORM, str(file), state.st_size, state.st_mtime_ns)).encode()).hexdigest()[:32]
    place = root / name
    if place.is_dir():
        return place
    opened = GgufFile.open(file)
    described, header = describe(opened), GgufHeader(opened)
    written = _written(described, header, read_vocabulary(header))
    for path, made in recipe_files(header).items():
        written[path] = _safetensors([made]) if isinstance(made, NamedTensor) else made
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
    try:
        for path, content in written.items():
            (partial / path).parent.mkdir(exist_ok=True)
            (partial / path).write_bytes(content if isinstance(content, bytes) else content.encode())
        (partial / GGUF_FILE).symlink_to(file)
        os.rename(partial, place)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not place.is_dir():  # otherwise another process has made it
            raise
    return place


def license_of(directory: Path) -> str | None:
    """Return the licence in a GGUF file's metadata. Raises CheckpointError.

    Returns an empty string if the metadata states none, and None if the directory has no GGUF file.
    """
    file = directory / GGUF_FILE
    return str(GgufFile.open(file).metadata.get("general.license", "")) if file.exists() else None


def _written(described: Described, metadata: Metadata, vocabulary: Vocabulary | None) -> dict[str, str | bytes]:
    config = dict(described.config)
    format = _format(described)
    if format is not None:
        config["quantization_config"] = format
    ends = vocabulary.eos_token_ids if vocabulary is not None else []
    generation: dict[str, Any] = {"eos_token_id": ends, **_SAMPLING_DEFAULTS}
    for key, name in _SAMPLING.items():
        if f"general.sampling.{key}" in metadata:
            generation[name] = metadata.number(f"general.sampling.{key}")
    if "general.sampling.top_k" in metadata:
        generation["top_k"] = metadata.integer("general.sampling.top_k")
    templates = list(_templates(metadata))
    tensors = {_stored_name(named): _entry(named) for named in described.tensors if named.content is None}
    written: dict[str, str | bytes] = {
        "config.json": json.dumps(config, indent=1),
        "generation_config.json": json.dumps(generation),
        GGUF_INDEX: json.dumps(tensors),
    }
    converted = [named for named in described.tensors if named.content is not None]
    if converted:
        written[GGUF_CONVERTED] = _safetensors(converted)
    if vocabulary is not None:
        tokenizer = {**vocabulary.special_tokens, **({"chat_template": templates} if templates else {})}
        written |= {"tokenizer.json": vocabulary.tokenizer_json, "tokenizer_config.json": json.dumps(tokenizer)}
    return written


def _safetensors(converted: list[NamedTensor]) -> bytes:
    """Return a safetensors file of tensors whose bytes differ from those in the GGUF file."""
    header, at = dict[str, Any](), 0
    for named in converted:
        end = at + len(named.content or b"")
        header[_stored_name(named)] = {**_entry(named), "data_offsets": [at, end]}
        at = end
    described = json.dumps(header).encode()
    return b"".join([len(described).to_bytes(8, "little"), described, *(named.content or b"" for named in converted)])


def _templates(metadata: Metadata) -> Iterator[dict[str, str]]:
    key = "tokenizer.chat_template"
    if key in metadata:
        yield {"name": "default", "template": metadata.text(key)}
    for other in metadata.keys(f"{key}."):
        yield {"name": other.removeprefix(f"{key}."), "template": metadata.text(other)}


def _format(described: Described) -> dict[str, Any] | None:
    """Return the quantization_config for engine/weights/formats/gguf.py; None if it is not needed."""
    coded = [named.tensor for named in described.tensors if named.tensor.kind.plain is None]
    turned = described.config["head_dim"] if any(named.is_turned for named in described.tensors) else None
    is_split = any(named.name.endswith(".k_b_proj.weight") for named in described.tensors)
    if not coded and turned is None and not is_split:
        return None
    num_bytes, num_values = sum(each.end - each.start for each in coded), sum(prod(each.shape) for each in coded)
    return {
        "quant_method": "gguf",
        "bits": 8 * num_bytes / num_values if coded else None,  # mean bits per value
        "kinds": sorted({each.kind.name.lower() for each in coded}),
        "turned_head_dim": turned,
    }


def _stored_name(named: NamedTensor) -> str:
    """Return a tensor's name in the index; it shows the format if the tensor must be decoded or reordered."""
    stem, _, part = named.name.rpartition(".")
    kind = named.tensor.kind
    if kind.plain is None:
        if part != "weight" or len(named.tensor.shape) < 2:
            raise CheckpointError(f"tensor {named.tensor.name} has type {kind.name}; it must be F32, F16 or BF16")
        return f"{stem}.{kind.name.lower()}"
    return f"{stem}.turned" if named.is_turned else named.name


def _entry(named: NamedTensor) -> dict[str, Any]:
    """Return a tensor's entry in the index, as in a safetensors header. Codes count as rows of bytes."""
    kind, shape, (start, end) = named.tensor.kind, named.tensor.shape, named.tensor[-2:]
    if kind.plain is None:
        shape = (*shape[:-1], shape[-1] // kind.block * kind.block_bytes)
    return {"dtype": kind.plain or "U8", "shape": list(shape), "data_offsets": [start, end]}
