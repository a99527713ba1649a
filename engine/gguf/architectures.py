"""Converts a GGUF file's metadata to a config.json, and its tensors' names to those of a checkpoint.

Refuses unsupported families, unknown tensors, and keys that change what a model computes and are not supported.
"""

import re
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.decoders import GROUPED
from pilotlight.engine.gguf.encoder_families import ENCODERS, bert_variant
from pilotlight.engine.gguf.family import ROPE_FACTORS, GgufFamily, GgufHeader, NamedTensor, config_of
from pilotlight.engine.gguf.file import GgufFile, GgufTensor
from pilotlight.engine.gguf.mla import LATENT, deepseek_variant
from pilotlight.engine.gguf.state_families import RECURRENT

_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TURNED = ("self_attn.q_proj", "self_attn.k_proj")
# Ends of names to which a checkpoint adds no ".weight".
_NAMED_WHOLE = ("_bias", ".sinks", "layer_scalar", "router.scale", "router.per_expert_scale", ".A_log", ".D")
READ = GROUPED | LATENT | RECURRENT | ENCODERS
# Architectures that mean another family if a key of the metadata is not zero.
_VARIANTS = {
    "llama": ("expert_count", "with experts"),
    "granite_swa": ("expert_count", "with experts"),
    "olmo2": ("attention.sliding_window", "with windows"),
}


class Described(NamedTuple):
    config: dict[str, Any]
    tensors: list[NamedTensor]


def describe(file: GgufFile) -> Described:
    """Return the file's config and named tensors. Raises CheckpointError."""
    header = GgufHeader(file)
    family = READ.get(_variant(header))
    if family is None:
        raise CheckpointError(
            f"{file.path.name} is of the architecture {header.architecture!r}; for GGUF files, supported are {', '.join(READ)}"
        )
    if header.integer("split.count", 1) > 1:
        raise CheckpointError(f"{file.path.name} is a part of several; join them first: llama-gguf-split --merge")
    if not header.has("token_embd.weight"):
        raise CheckpointError(f"{file.path.name} lacks the tensor token_embd.weight")
    config = config_of(header, family)
    unused = range(config["num_hidden_layers"], header.integer("{arch}.block_count"))
    return Described(config, list(_named(header, family, unused)))


def _variant(header: GgufHeader) -> str:
    """Return the name in READ of a file's architecture, which may have one name for several families."""
    name = header.architecture
    if name == "deepseek2":
        return deepseek_variant(header)
    if name == "bert":
        return bert_variant(header)
    key, suffix = _VARIANTS.get(name, ("", ""))
    return f"{name} {suffix}" if key and header.integer(f"{name}.{key}", 0) else name


def _named(header: GgufHeader, family: GgufFamily, unused: Container[int]) -> Iterator[NamedTensor]:
    """Name the tensors, except those of the layers `unused`.

    Raises CheckpointError for tensors that the family does not have.
    """
    file = header.file
    for stored in file.tensors.values():
        stem, _, part = stored.name.rpartition(".")
        if stem == ROPE_FACTORS:
            continue
        outer = family.outer.get(stem, _OUTER.get(stem))
        if outer is not None and (part == "weight" or stem in family.outer):
            if outer:
                yield NamedTensor(f"{outer}.{part}", stored)
            continue
        found = _LAYER.fullmatch(stored.name)
        if found is not None and int(found[1]) in unused:
            continue
        name = None if found is None else family.layers.get(found[2])
        part = "weight" if found is None or found[3] is None else found[3]
        if found is None or name is None or (family.is_turned and name in _TURNED and part == "bias"):
            raise CheckpointError(f"{file.path.name} has the tensor {stored.name}, which no {family.architecture} has")
        if ".experts." in name and part == "bias":
            name += "_bias"
        whole = f"{family.prefix}{found[1]}.{name}" + ("" if name.endswith(_NAMED_WHOLE) else f".{part}")
        if name == "mlp.shared_expert_gate":  # files have this row as a vector
            stored = stored._replace(shape=(1, stored.shape[-1]))
        if ".experts." in whole and part == "weight":
            yield from _experts(file, whole, stored)
        else:
            yield from family.convert(header, NamedTensor(whole, stored, family.is_turned and name in _TURNED))


def _experts(file: GgufFile, name: str, stored: GgufTensor) -> Iterator[NamedTensor]:
    """Name the parts of a tensor of all experts.

    Gates and ups in one tensor are divided when they are loaded.
    """
    if len(stored.shape) != 3:
        raise CheckpointError(
            f"tensor {stored.name} in {file.path.name} has shape {list(stored.shape)}; experts' have three"
        )
    if name.endswith(".gate_up_proj.weight"):
        yield NamedTensor(name, stored)
        return
    num_bytes = (stored.end - stored.start) // stored.shape[0]
    for i in range(stored.shape[0]):
        start = stored.start + i * num_bytes
        one = stored._replace(shape=stored.shape[1:], start=start, end=start + num_bytes)
        yield NamedTensor(name.replace(".experts.", f".experts.{i}."), one)
