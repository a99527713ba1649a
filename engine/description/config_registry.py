"""From `architectures` in config.json to what it describes, of models that the engine runs and of some that can only be planned for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.shapes import ImageBytes
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.config import refusing_types


class ArchitectureConfig(Protocol):
    """A validated config.json."""

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """What each layer keeps of a token; none of an encoder's keeps anything."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int:
        """Heads whose keys and values are kept; 0: none are, or all heads read the same, so that no rank has fewer."""

    @property
    def attended_numbers(self) -> int:
        """Products with what is cached of one token, in one layer."""

    @property
    def rotary_numbers(self) -> int:
        """Numbers of the rotary tables for each position, in fp32."""

    def attention_bytes(self, tokens: int, ranks: int, item_bytes: int) -> int:
        """Return what attention holds at once beside its projections, in a step of so many tokens."""

    def image_bytes(self, item_bytes: int) -> ImageBytes:
        """Return what images hold."""

    @property
    def outer_weights(self) -> list[WeightShape]:
        """The tensors before and behind the layers."""

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        """Return the tensors of a layer whose names begin with `name`."""


Parse = Callable[[Mapping[str, Any]], ArchitectureConfig]

# The module here that reads each; imported for a model that is there, as all of them together are a tenth of what a site imports.
_MODULES = {
    "BertForSequenceClassification": "bert",
    "BertModel": "bert",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3TextModel": "gemma3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "ModernBertForSequenceClassification": "modernbert",
    "ModernBertModel": "modernbert",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "RobertaForSequenceClassification": "roberta",
    "RobertaModel": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
    "XLMRobertaModel": "roberta",
}


def _parser(module: str) -> Parse:
    def parse_config(config: Mapping[str, Any]) -> ArchitectureConfig:
        parse: Parse = import_module(f"pilotlight.engine.description.families.{module}_config").parse_config
        with refusing_types():
            return parse(config)

    return parse_config


PARSERS = {name: _parser(module) for name, module in _MODULES.items()}


def find_architecture(config: Mapping[str, Any], known: Mapping[str, Any] = PARSERS) -> str:
    """Return which of the `known` architectures a config.json names. Raises CheckpointError."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"config.json has architectures = {names!r}; it must be a list")
    for name in names:
        # a decoder that was saved without its head, or with one that scores classes
        family = str(name).removesuffix("Model").removesuffix("ForSequenceClassification")
        for one in (str(name), f"{family}ForCausalLM"):
            if one in known:
                return one
    raise CheckpointError(
        f"config.json names architecture {', '.join(map(str, names)) or 'none'}; supported are {', '.join(known)}"
    )
