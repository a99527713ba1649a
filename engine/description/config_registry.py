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

# The module in families/ that reads each, and its function where that is not `parse_config`. Imported for a model that is there, as all of them
# together are a tenth of what a site imports.
_READERS = {
    "BertModel": "bert_config",
    "DeepseekV2ForCausalLM": "latent:deepseek_v2",
    "DeepseekV3ForCausalLM": "latent:deepseek_v3",
    "Ernie4_5ForCausalLM": "plain:ernie",
    "Ernie4_5_MoeForCausalLM": "experts:ernie_moe",
    "Exaone4ForCausalLM": "plain:exaone4",
    "Gemma2ForCausalLM": "plain:gemma2",
    "Gemma3ForCausalLM": "plain:gemma3",
    "Gemma3ForConditionalGeneration": "plain:gemma3",
    "Glm4ForCausalLM": "plain:glm4",
    "Glm4MoeForCausalLM": "experts:glm4_moe",
    "Glm4MoeLiteForCausalLM": "latent:glm4_moe_lite",
    "Glm46VForConditionalGeneration": "experts:glm4_moe",
    "Glm4vMoeForConditionalGeneration": "experts:glm4_moe",
    "GptOssForCausalLM": "gpt_oss_config",
    "GraniteForCausalLM": "plain:granite",
    "GraniteMoeForCausalLM": "experts:granite_moe",
    "KimiK25ForConditionalGeneration": "latent:deepseek_v3",
    "Llama4ForCausalLM": "llama4_config",
    "Llama4ForConditionalGeneration": "llama4_config",
    "LlamaForCausalLM": "plain:llama",
    "MiniMaxM2ForCausalLM": "experts:minimax_m2",
    "Ministral3ForCausalLM": "plain:mistral",
    "Mistral3ForConditionalGeneration": "latent:mistral3",
    "Mistral4ForCausalLM": "latent:mistral4",
    "MistralForCausalLM": "plain:mistral",
    "MixtralForCausalLM": "experts:mixtral",
    "Olmo2ForCausalLM": "plain:olmo2",
    "Olmo3ForCausalLM": "plain:olmo3",
    "OlmoeForCausalLM": "experts:olmoe",
    "Phi3ForCausalLM": "plain:phi3",
    "Qwen2ForCausalLM": "plain:qwen2",
    "Qwen2MoeForCausalLM": "experts:qwen2_moe",
    "Qwen2_5_VLForConditionalGeneration": "plain:qwen2",
    "Qwen3ForCausalLM": "plain:qwen3",
    "Qwen3MoeForCausalLM": "experts:qwen3_moe",
    "Qwen3VLForConditionalGeneration": "plain:qwen3",
    "Qwen3VLMoeForConditionalGeneration": "experts:qwen3_moe",
    "RobertaModel": "roberta_config",
    "SeedOssForCausalLM": "plain:seed_oss",
    "SmolLM3ForCausalLM": "plain:smollm3",
    "XLMRobertaModel": "roberta_config",
}


def _reader(place: str) -> Parse:
    module, _, function = place.partition(":")

    def parse_config(config: Mapping[str, Any]) -> ArchitectureConfig:
        parse: Parse = getattr(
            import_module(f"pilotlight.engine.description.families.{module}"), function or "parse_config"
        )
        with refusing_types():
            return parse(config)

    return parse_config


PARSERS = {name: _reader(place) for name, place in _READERS.items()}


def find_architecture(config: Mapping[str, Any], known: Mapping[str, Any] = PARSERS) -> str:
    """Return which of the `known` architectures a config.json names. Raises CheckpointError."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"config.json has architectures = {names!r}; it must be a list")
    for name in names:
        for one in (str(name), f"{str(name).removesuffix('Model')}ForCausalLM"):  # a decoder saved without its head
            if one in known:
                return one
    raise CheckpointError(
        f"config.json names architecture {', '.join(map(str, names)) or 'none'}; supported are {', '.join(known)}"
    )
