"""What makes a checkpoint an embedding model: a recipe, read from the files that sentence-transformers writes (modules.json, 1_Pooling/config.json,
config_sentence_transformers.json).

Every step they describe that the engine does not compute is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError, TokenizerError
from pilotlight.engine.api.plain_files import read_bytes
from pilotlight.engine.api.protocol import Pooling
from pilotlight.engine.text.tokenizer import read_sentence_config
from pilotlight.engine.weights.checkpoint import read_json
from pilotlight.engine.weights.config import positive_int

_MODES: dict[str, Pooling] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last", "last": "last",
}  # fmt: skip
_PREFIX = "pooling_mode_"


class EmbeddingRecipe(NamedTuple):
    """How the hidden states of a text become one vector."""

    pooling: Pooling
    is_normalized: bool  # to length 1
    max_tokens: int | None  # of a text, where the checkpoint says less than its positions allow
    prompt: str = ""  # that every text begins with


def read_recipe(directory: Path, config: Mapping[str, Any]) -> EmbeddingRecipe | None:
    """Return the recipe of an embedding model; None for a model that generates. Raises CheckpointError."""
    modules_file = directory / "modules.json"
    if not modules_file.exists():
        names = config.get("architectures") or []
        if names and all(_has_no_head(str(name)) for name in names):
            raise CheckpointError(
                f"config.json names architecture {', '.join(map(str, names))}, which has no output head, and {directory} does not say "
                "how to make embeddings of it: modules.json and 1_Pooling/config.json, as sentence-transformers writes them, are missing"
            )
        return None
    modules = _modules(modules_file)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"modules.json lists {', '.join(kinds)}; supported are Transformer, Pooling and, last, Normalize"
        )
    if modules[0][1]:
        raise CheckpointError(
            f"modules.json has the transformer in {modules[0][1]!r}; it must lie in the directory itself"
        )
    pooling, prompt = _pooling(directory / modules[1][1]), _prompt(directory)
    if prompt and read_json(directory / modules[1][1], "config.json").get("include_prompt") is False:
        raise CheckpointError(
            f"{directory / modules[1][1] / 'config.json'} leaves the prompt {prompt!r} out of the pooling (include_prompt), which is not computed; "
            "remove default_prompt_name from config_sentence_transformers.json, and send the prompt with the texts if it is to be pooled"
        )
    return EmbeddingRecipe(pooling, is_normalized=len(modules) == 3, max_tokens=_max_tokens(directory), prompt=prompt)


def _has_no_head(architecture: str) -> bool:
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return each module's kind and folder."""
    try:
        listed = json.loads(read_bytes(file))
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} is no list of modules, each with its type and path: {error!r}") from error


def _pooling(directory: Path) -> Pooling:
    """Read the one mode: older files have a flag for every mode, newer ones name it."""
    config = read_json(directory, "config.json")
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or [])
    modes += [key.removeprefix(_PREFIX) for key, value in config.items() if key.startswith(_PREFIX) and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(
            f"{directory / 'config.json'} asks for the pooling {' and '.join(map(str, modes)) or 'none'}; "
            "supported is one of mean, cls and lasttoken"
        )
    return _MODES[modes[0]]


def _prompt(directory: Path) -> str:
    """Return the prompt that `encode` puts before every text where its caller names none."""
    file = "config_sentence_transformers.json"
    config = read_json(directory, file) if (directory / file).exists() else {}
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(prompt := prompts.get(name), str):
        raise CheckpointError(f"{directory / file} has default_prompt_name {name!r}, and no prompt of this name")
    return prompt


def _max_tokens(directory: Path) -> int | None:
    try:
        config = read_sentence_config(directory)
    except TokenizerError as error:
        raise CheckpointError(str(error)) from None
    return None if config.get("max_seq_length") is None else positive_int(config, "max_seq_length")
