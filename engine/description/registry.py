"""From `architectures` in config.json to what it describes, of models that the engine runs and of some that can only be planned for."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.description import (
    bert,
    deepseek_v3,
    gemma3,
    glm4_moe,
    gpt_oss,
    llama,
    llama4,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    roberta,
)
from engine.description.shapes import ImageBytes
from engine.description.weights import WeightShape
from engine.errors import CheckpointError
from engine.kv.layout import CachedLayer


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

PARSERS: dict[str, Parse] = {
    "BertModel": bert.parse_config,
    "DeepseekV3ForCausalLM": deepseek_v3.parse_config,
    "Gemma3ForCausalLM": gemma3.parse_config,
    "Glm4MoeForCausalLM": glm4_moe.parse_config,
    "GptOssForCausalLM": gpt_oss.parse_config,
    "KimiK25ForConditionalGeneration": deepseek_v3.parse_config,
    "Llama4ForCausalLM": llama4.parse_config,
    "Llama4ForConditionalGeneration": llama4.parse_config,
    "LlamaForCausalLM": llama.parse_config,
    "MistralForCausalLM": mistral.parse_config,
    "MixtralForCausalLM": mixtral.parse_config,
    "Qwen2ForCausalLM": qwen2.parse_config,
    "Qwen3ForCausalLM": qwen3.parse_config,
    "Qwen3MoeForCausalLM": qwen3_moe.parse_config,
    "RobertaModel": roberta.parse_config,
    "XLMRobertaModel": roberta.parse_config,
}


def find_architecture(config: Mapping[str, Any], known: Mapping[str, Any] = PARSERS) -> str:
    """Return which of the `known` architectures a config.json names. Raises CheckpointError."""
    names = config.get("architectures") or []
    for name in names:
        for one in (str(name), f"{str(name).removesuffix('Model')}ForCausalLM"):  # a decoder saved without its head
            if one in known:
                return one
    raise CheckpointError(
        f"config.json names architecture {', '.join(map(str, names)) or 'none'}; supported are {', '.join(known)}"
    )
