"""The steps from a text's hidden states to an embedding or class scores.

They are read from config.json and from the files of sentence-transformers (modules.json, 1_Pooling/config.json, 2_Dense/config.json,
config_sentence_transformers.json, sentence_bert_config.json). Unsupported steps are refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError, TokenizerError
from pilotlight.engine.api.plain_files import read_bytes
from pilotlight.engine.api.protocol import Activation, Pooling
from pilotlight.engine.description.class_labels import CLASSIFIER, class_labels
from pilotlight.engine.tokenizer.tokenizer import read_sentence_config
from pilotlight.engine.weights.checkpoint import read_json
from pilotlight.engine.weights.config import flag, positive_int, read_config, refusing_types

_MODES: dict[str, Pooling] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last", "last": "last",
}  # fmt: skip
_PREFIX = "pooling_mode_"
_SENTENCES = "config_sentence_transformers.json"
_SCORE_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
_DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU")
# Architectures whose names start with these words pool the first token. All others are decoders, whose last token has attended to all tokens.
_POOLED_FIRST = ("Bert", "Roberta", "XLMRoberta")
# Arguments of a tokenizer call that do not change the tokens of a single text.
_HARMLESS_CALL = frozenset({"padding", "padding_side", "truncation", "return_tensors", "pad_to_multiple_of"})


class DenseModule(NamedTuple):
    """A linear layer after the pooling, [outputs, inputs], in a separate folder."""

    directory: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str  # name of a class of torch.nn


class Classes(NamedTuple):
    """The classes that a classifier or reranker scores."""

    labels: tuple[str, ...]
    activation: Activation  # function from logits to the scores for clients
    # For a model that answers by its next token, the ids of the tokens whose logits are compared, (yes, no) or (yes,); else empty.
    tokens: tuple[int, ...] = ()


class PoolingRecipe(NamedTuple):
    """The steps from the hidden states of a text to one vector: an embedding, or the logits of classes."""

    pooling: Pooling
    is_normalized: bool = False  # whether the vector is scaled to length 1
    max_tokens: int | None = None  # most tokens of a text; None if only the number of positions limits it
    prompt: str = ""  # prefix of every text, unless a request names another one
    prompts: tuple[tuple[str, str], ...] = ()  # prefixes that a request may choose, by name
    dense: tuple[DenseModule, ...] = ()
    classes: Classes | None = None  # None for an embedding model

    def vector_size(self, hidden_size: int) -> int:
        """Return the size of a text's vector."""
        if self.classes is not None:
            return len(self.classes.labels)
        return self.dense[-1].outputs if self.dense else hidden_size

    @property
    def keeps_head(self) -> bool:
        """True if the model's own output head is used."""
        return self.classes is not None and bool(self.classes.tokens)


def read_model_config(directory: Path) -> tuple[dict[str, Any], PoolingRecipe | None]:
    """Read a checkpoint's config.json and its recipe. Raises CheckpointError.

    A head that the recipe does not use is tied to the embedding: a separate one would only take memory.
    """
    config = read_config(directory)
    recipe = read_recipe(directory, config)
    if recipe is not None and not recipe.keeps_head:
        config["tie_word_embeddings"] = True
    return config, recipe


def read_recipe(directory: Path, config: Mapping[str, Any]) -> PoolingRecipe | None:
    """Return the recipe of an embedding or scoring model, or None for a model that generates text.

    Raises CheckpointError.
    """
    names = [str(name) for name in config.get("architectures") or []]
    modules_file = directory / "modules.json"
    modules = _modules(modules_file) if modules_file.exists() else []
    kinds = [kind for kind, _ in modules]
    with refusing_types():
        if any(name.endswith(CLASSIFIER) for name in names):
            return _classifier(directory, config, kinds)
        if kinds == ["Transformer", "LogitScore"]:
            return _judge(directory, config, _score_tokens(directory / modules[1][1]))
        if config.get("classifier_from_token") is not None:
            return _judge(directory, config, _tokens_of(directory, config["classifier_from_token"]))
        if modules:
            return _embedder(directory, modules)
    if names and all(_has_no_head(name) for name in names):
        raise CheckpointError(
            f"config.json names architecture {', '.join(names)}, which has no output head, and {directory} does not say "
            "how to make embeddings of it: modules.json and 1_Pooling/config.json, as sentence-transformers writes them, are missing"
        )
    return None


def _embedder(directory: Path, modules: list[tuple[str, str]]) -> PoolingRecipe:
    kinds = [kind for kind, _ in modules]
    middle = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(middle) - {"Dense"}:
        raise CheckpointError(
            f"modules.json lists {', '.join(kinds)}; supported are Transformer, Pooling, any number of Dense and, last, Normalize, "
            "or Transformer and LogitScore"
        )
    if modules[0][1]:
        raise CheckpointError(
            f"modules.json has the transformer in {modules[0][1]!r}; it must be in the directory itself"
        )
    pooling = directory / modules[1][1]
    prompt, prompts = _prompts(directory)
    if flag(read_json(pooling, "config.json"), "include_prompt", True) is False:
        if prompt:
            raise CheckpointError(
                f"{pooling / 'config.json'} excludes the prompt {prompt!r} from the pooling (include_prompt), which is not supported; "
                f"remove default_prompt_name from {_SENTENCES}, and send the prompt with the texts to pool it, too"
            )
        prompts = ()
    return PoolingRecipe(
        _pooling(pooling),
        is_normalized=kinds[-1] == "Normalize",
        max_tokens=_max_tokens(directory),
        prompt=prompt,
        prompts=prompts,
        dense=tuple([_dense(directory / path) for kind, path in modules if kind == "Dense"]),
    )


def _classifier(directory: Path, config: Mapping[str, Any], kinds: list[str]) -> PoolingRecipe:
    """Return the recipe of a model with a classification head."""
    architecture = str(config["architectures"][0])
    if kinds not in ([], ["Transformer"]):
        raise CheckpointError(
            f"modules.json lists {', '.join(kinds)} after {architecture}, which scores classes with its own head: "
            "supported is Transformer alone, or no modules.json"
        )
    labels = class_labels(config)
    prompt, prompts = _prompts(directory)
    pooling: Pooling = "cls" if architecture.removesuffix(CLASSIFIER) in _POOLED_FIRST else "last"
    if architecture.startswith("ModernBert"):
        named = config.get("classifier_pooling", "cls")
        if named not in ("cls", "mean"):
            raise CheckpointError(f"config.json has classifier_pooling = {named!r}; supported are cls and mean")
        pooling = named
    activation = _activation(directory, config, len(labels))
    return PoolingRecipe(
        pooling,
        max_tokens=_max_tokens(directory),
        prompt=prompt,
        prompts=prompts,
        classes=Classes(labels, activation),
    )


def _judge(directory: Path, config: Mapping[str, Any], tokens: tuple[int, ...]) -> PoolingRecipe:
    """Return the recipe of a reranker that answers by its next token, such as Qwen3-Reranker."""
    vocab_size = positive_int(config, "vocab_size")
    if any(not 0 <= token < vocab_size for token in tokens):
        raise CheckpointError(f"{directory} scores by the tokens {list(tokens)}, and its vocabulary has {vocab_size}")
    prompt, prompts = _prompts(directory)
    classes = Classes(("LABEL_0",), _activation(directory, config, 1), tokens)
    return PoolingRecipe("last", max_tokens=_max_tokens(directory), prompt=prompt, prompts=prompts, classes=classes)


def _score_tokens(directory: Path) -> tuple[int, ...]:
    """Return the ids of a LogitScore module's tokens, (true, false) or (true,)."""
    config = read_json(directory, "config.json")
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise CheckpointError(
            f"{directory / 'config.json'} has module_input_name = {config['module_input_name']!r}; supported is 'causal_logits'"
        )
    tokens = [config.get("true_token_id"), config.get("false_token_id")]
    if type(tokens[0]) is not int or type(tokens[1]) not in (int, type(None)):
        raise CheckpointError(
            f"{directory / 'config.json'} has true_token_id = {tokens[0]!r} and false_token_id = {tokens[1]!r}; they must be token ids"
        )
    return tuple([token for token in tokens if token is not None])


def _tokens_of(directory: Path, words: Any) -> tuple[int, ...]:
    """Return the ids (yes, no) for vLLM's `classifier_from_token`, a list of the words for no and yes."""
    from pilotlight.engine.tokenizer.tokenizer import Tokenizer

    if not isinstance(words, list) or len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise CheckpointError(
            f'config.json has classifier_from_token = {words!r}; it must be the words for no and yes: ["no", "yes"]'
        )
    try:
        tokenizer = Tokenizer.from_directory(directory)
    except TokenizerError as error:
        raise CheckpointError(f"classifier_from_token of config.json needs the tokenizer: {error}") from None
    found = [tokenizer.encode(word) for word in reversed(words)]
    if any(len(ids) != 1 for ids in found):
        raise CheckpointError(f"config.json has classifier_from_token = {words!r}; each must be one token")
    return tuple([ids[0] for ids in found])


def _activation(directory: Path, config: Mapping[str, Any], num_labels: int) -> Activation:
    """Return the function from logits to scores.

    It is the function that sentence-transformers saved, or by default a sigmoid for one class or for independent labels, and else a softmax.
    """
    own = config.get("sentence_transformers")
    places = (
        (_SENTENCES, _sentences(directory).get("activation_fn")),
        ("config.json", own.get("activation_fn") if isinstance(own, dict) else None),
        ("config.json", config.get("sbert_ce_default_activation_function")),
    )
    for file, named in places:
        if named is not None:
            found = _SCORE_ACTIVATIONS.get(str(named).rpartition(".")[2])
            if found is None:
                supported = ", ".join(_SCORE_ACTIVATIONS)
                raise CheckpointError(f"{file} asks for the activation {named!r}; supported are {supported}")
            # For several classes the library returns logits, and its caller computes the softmax.
            return "softmax" if found == "none" and num_labels > 1 else found
    if num_labels == 1 or config.get("problem_type") == "multi_label_classification":
        return "sigmoid"
    return "softmax"


def _has_no_head(architecture: str) -> bool:
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return each module's kind and folder."""
    try:
        listed = json.loads(read_bytes(file))
        found = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} is not a list of modules, each with its type and path: {error!r}") from error
    if not found:
        raise CheckpointError(f"{file} lists no module")
    return found


def _pooling(directory: Path) -> Pooling:
    """Return the pooling mode: older files have a flag for every mode, newer files name it."""
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


def _dense(directory: Path) -> DenseModule:
    config = read_json(directory, "config.json")
    file = directory / "config.json"
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _DENSE_ACTIVATIONS:
        supported = ", ".join(_DENSE_ACTIVATIONS)
        raise CheckpointError(f"{file} has activation_function = {activation!r}; supported are {supported}")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key, "sentence_embedding") not in ("sentence_embedding", None):
            raise CheckpointError(f"{file} has {key} = {config[key]!r}; supported is 'sentence_embedding'")
    if flag(config, "use_residual", False):
        raise CheckpointError(f"{file} has use_residual = true; supported is false")
    if not (directory / "model.safetensors").is_file():
        raise CheckpointError(f"{directory} has no model.safetensors, which holds the weights of this Dense module")
    inputs, outputs = positive_int(config, "in_features"), positive_int(config, "out_features")
    return DenseModule(directory, inputs, outputs, flag(config, "bias", True), activation)


def _prompts(directory: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the prompt that sentence-transformers puts before texts by default, and all named prompts."""
    config = _sentences(directory)
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        if name is None:
            raise CheckpointError(
                f"{directory / _SENTENCES} has prompts = {prompts!r}; they must be texts by their names"
            )
        prompts = {}
    if name is None:
        return "", tuple(prompts.items())
    if not isinstance(prompt := prompts.get(name), str):
        raise CheckpointError(f"{directory / _SENTENCES} has default_prompt_name {name!r}, but no prompt of this name")
    return prompt, tuple(prompts.items())


def _sentences(directory: Path) -> dict[str, Any]:
    return read_json(directory, _SENTENCES) if (directory / _SENTENCES).exists() else {}


def _max_tokens(directory: Path) -> int | None:
    """Return the most tokens of a text according to sentence_bert_config.json, or None.

    Raises CheckpointError for unsupported settings in that file.
    """
    try:
        config = read_sentence_config(directory)
    except TokenizerError as error:
        raise CheckpointError(str(error)) from None
    limits = [config.get(key) for key in ("max_seq_length", "query_length", "document_length")]
    if any(limits[1:]) or config.get("query_expansion"):
        raise CheckpointError(
            "sentence_bert_config.json has query_length, document_length or query_expansion, which are for models with several vectors per text; "
            "supported is max_seq_length"
        )
    calls = config.get("processing_kwargs") or {}
    for kind, call in calls.items():
        if kind == "chat_template":
            continue
        if further := set(call) - _HARMLESS_CALL:
            raise CheckpointError(
                f"sentence_bert_config.json has processing_kwargs.{kind}.{min(further)}; supported is chat_template, and max_seq_length as a limit"
            )
    return None if limits[0] is None else positive_int(config, "max_seq_length")
