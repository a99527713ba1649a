"""From `architectures` in config.json to the code that runs it."""

from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.engine.description.config_registry import PARSERS, find_architecture
from pilotlight.engine.models import bert, deepseek_v3, dense, gemma3, glm4_moe, gpt_oss, llama4, mixtral, qwen3_moe
from pilotlight.engine.models.model import Family, Model
from pilotlight.engine.weights.loader import WeightLoader

_LOADERS: dict[str, Callable[[Any, WeightLoader, int], Model]] = {
    "BertModel": bert.load,
    "DeepseekV3ForCausalLM": deepseek_v3.load,
    "Gemma3ForCausalLM": gemma3.load,
    "Glm4MoeForCausalLM": glm4_moe.load,
    "GptOssForCausalLM": gpt_oss.load,
    "KimiK25ForConditionalGeneration": deepseek_v3.load,
    "Llama4ForCausalLM": llama4.load,
    "Llama4ForConditionalGeneration": llama4.load,
    "LlamaForCausalLM": dense.load,
    "MistralForCausalLM": dense.load,
    "MixtralForCausalLM": mixtral.load,
    "Qwen2ForCausalLM": dense.load,
    "Qwen3ForCausalLM": dense.load,
    "Qwen3MoeForCausalLM": qwen3_moe.load,
    "RobertaModel": bert.load,
    "XLMRobertaModel": bert.load,
}
FAMILIES = {name: Family(PARSERS[name], load) for name, load in _LOADERS.items()}


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises CheckpointError."""
    return FAMILIES[find_architecture(config, FAMILIES)]
