"""The registry of architectures: the name in config.json -> the function that parses the config.

It contains the architectures that the engine runs, and some for which only memory can be planned.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.shapes import ImageNeeds
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.config import refusing_types


class ArchitectureConfig(Protocol):
    """A validated config.json."""

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """The values that each layer caches per token; empty for an encoder."""

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
        """The number of cached KV heads; 0 without a cache, or if all heads of all ranks share one vector."""

    @property
    def rotary_numbers(self) -> int:
        """The number of fp32 values per position in the rotary tables."""

    def attention_products(self, context: int) -> int:
        """Return the number of multiplications of a token's attention to `context` tokens in a layer."""

    def read_share(self, context: int) -> float:
        """Return the bytes that a token reads, as a share of the cached bytes of a context."""

    def step_bytes(self, tokens: int, ranks: int, item_bytes: int) -> int:
        """Return the bytes that a step of `tokens` tokens needs besides hidden states and projections."""

    def image_needs(self, item_bytes: int) -> ImageNeeds:
        """Return what images need."""

    @property
    def outer_weights(self) -> list[WeightShape]:
        """The tensors outside the layers."""

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        """Return the tensors of a layer whose names start with `name`."""


PAGE = "docs/models.md"  # generated from this registry by tests/models_page.py
Parse = Callable[[Mapping[str, Any]], ArchitectureConfig]

# For each architecture the module in families/ that parses it, and the function if it is not `parse_config`. Modules are imported on demand, because
# all of them would be a tenth of a site's imports.
READERS = {
    "AfmoeForCausalLM": "expert_decoders:afmoe",
    "ApertusForCausalLM": "dense_decoders:apertus",
    "ArceeForCausalLM": "dense_decoders:arcee",
    "BertForSequenceClassification": "bert_config",
    "BertModel": "bert_config",
    "Cohere2ForCausalLM": "cohere_decoders:cohere2",
    "Cohere2MoeForCausalLM": "cohere_decoders:cohere2_moe",
    "CohereForCausalLM": "cohere_decoders:cohere",
    "DeepseekV2ForCausalLM": "latent_decoders:deepseek_v2",
    "DeepseekV32ForCausalLM": "latent_decoders:deepseek_v32",
    "DeepseekV3ForCausalLM": "latent_decoders:deepseek_v3",
    "Dots1ForCausalLM": "expert_decoders:dots1",
    "Ernie4_5ForCausalLM": "dense_decoders:ernie",
    "Ernie4_5_MoeForCausalLM": "expert_decoders:ernie_moe",
    "Exaone4ForCausalLM": "dense_decoders:exaone4",
    "ExaoneMoeForCausalLM": "expert_decoders:exaone_moe",
    "FalconH1ForCausalLM": "hybrid_decoders:falcon_h1",
    "Gemma2ForCausalLM": "dense_decoders:gemma2",
    "Gemma3ForCausalLM": "dense_decoders:gemma3",
    "Gemma3ForConditionalGeneration": "gemma_vision:gemma3",
    "Gemma3TextModel": "dense_decoders:gemma3",
    "Gemma4ForCausalLM": "gemma4_config",
    "Gemma4ForConditionalGeneration": "gemma_vision:gemma4",
    "GemmaForCausalLM": "dense_decoders:gemma",
    "Glm46VForConditionalGeneration": "grid_vision:glm_v",
    "Glm4ForCausalLM": "dense_decoders:glm4",
    "Glm4MoeForCausalLM": "expert_decoders:glm4_moe",
    "Glm4MoeLiteForCausalLM": "latent_decoders:glm4_moe_lite",
    "Glm4vForConditionalGeneration": "grid_vision:glm_v",
    "Glm4vMoeForConditionalGeneration": "grid_vision:glm_v",
    "GlmForCausalLM": "dense_decoders:glm",
    "GlmMoeDsaForCausalLM": "latent_decoders:glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss_config",
    "GraniteForCausalLM": "dense_decoders:granite",
    "GraniteMoeForCausalLM": "expert_decoders:granite_moe",
    "GraniteMoeHybridForCausalLM": "hybrid_decoders:granite_hybrid",
    "GraniteMoeSWAForCausalLM": "expert_decoders:granite_moe_swa",
    "GraniteSWAForCausalLM": "dense_decoders:granite_swa",
    "HunYuanDenseV1ForCausalLM": "hunyuan_decoders:hunyuan",
    "HunYuanMoEV1ForCausalLM": "hunyuan_decoders:hunyuan_moe",
    "KimiK25ForConditionalGeneration": "latent_decoders:kimi_k25",
    "KimiLinearForCausalLM": "latent_decoders:kimi_linear",
    "Lfm2ForCausalLM": "lfm_decoders:lfm2",
    "Lfm2MoeForCausalLM": "lfm_decoders:lfm2_moe",
    "Lfm3ForCausalLM": "lfm_decoders:lfm3",
    "Llama4ForCausalLM": "llama4_config",
    "Llama4ForConditionalGeneration": "llama4_config",
    "LlamaForCausalLM": "dense_decoders:llama",
    "MiMoV2FlashForCausalLM": "expert_decoders:mimo_v2",
    "MiniMaxM2ForCausalLM": "expert_decoders:minimax_m2",
    "Ministral3ForCausalLM": "dense_decoders:mistral",
    "Mistral3ForConditionalGeneration": "latent_decoders:mistral3",
    "Mistral4ForCausalLM": "latent_decoders:mistral4",
    "MistralForCausalLM": "dense_decoders:mistral",
    "MixtralForCausalLM": "expert_decoders:mixtral",
    "ModernBertForSequenceClassification": "modernbert_config",
    "ModernBertModel": "modernbert_config",
    "NemotronHForCausalLM": "hybrid_decoders:nemotron_h",
    "Olmo2ForCausalLM": "dense_decoders:olmo2",
    "Olmo3ForCausalLM": "dense_decoders:olmo3",
    "OlmoeForCausalLM": "expert_decoders:olmoe",
    "Phi3ForCausalLM": "dense_decoders:phi3",
    "Phi4MMForCausalLM": "dense_decoders:phi4_multimodal",
    "Phi4MultimodalForCausalLM": "dense_decoders:phi4_multimodal",
    "Qwen2ForCausalLM": "dense_decoders:qwen2",
    "Qwen2MoeForCausalLM": "expert_decoders:qwen2_moe",
    "Qwen2_5_VLForConditionalGeneration": "grid_vision:qwen2_5_vl",
    "Qwen3ForCausalLM": "dense_decoders:qwen3",
    "Qwen3MoeForCausalLM": "expert_decoders:qwen3_moe",
    "Qwen3NextForCausalLM": "hybrid_decoders:qwen3_next",
    "Qwen3OmniMoeForConditionalGeneration": "expert_decoders:qwen3_omni",
    "Qwen3VLForConditionalGeneration": "grid_vision:qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "grid_vision:qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "hybrid_decoders:qwen3_5",
    "Qwen3_5ForConditionalGeneration": "grid_vision:qwen3_5_vision",
    "Qwen3_5MoeForCausalLM": "hybrid_decoders:qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "grid_vision:qwen3_5_moe_vision",
    "RobertaForSequenceClassification": "roberta_config",
    "RobertaModel": "roberta_config",
    "SeedOssForCausalLM": "dense_decoders:seed_oss",
    "SmolLM3ForCausalLM": "dense_decoders:smollm3",
    "SolarOpenForCausalLM": "expert_decoders:solar_open",
    "XLMRobertaForSequenceClassification": "roberta_config",
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


PARSERS = {name: _reader(place) for name, place in READERS.items()}


# Reasons why published architectures are not supported.
_STREAMS = "its layers mix several streams of hidden states, and its feed-forwards keep only the largest activations"
_LIGHTNING = "most of its layers have lightning attention, a linear attention whose state decays"
_SELECTED_BLOCKS = "its attention reads blocks of keys that an index selects"
_STEP = "its layers have different numbers of query heads, and limits on the activations of experts"
_LACKING = {
    "DeepseekV4ForCausalLM": "its layers cache keys compressed from several tokens, and mix several streams of hidden states",
    "Gemma3nForCausalLM": _STREAMS,
    "Gemma3nForConditionalGeneration": _STREAMS,
    "LongcatFlashForCausalLM": "each of its layers has two attentions, and some of its experts return their input",
    "MiniMaxForCausalLM": _LIGHTNING,
    "MiniMaxM1ForCausalLM": _LIGHTNING,
    "MiniMaxM3SparseForConditionalGeneration": _SELECTED_BLOCKS,
    "MiniMaxM3VLForConditionalGeneration": _SELECTED_BLOCKS,
    "MiniMaxText01ForCausalLM": _LIGHTNING,
    "MistralLarge3ForCausalLM": "its weights are published in Mistral's own format; a GGUF file of it is read",
    "MistralLarge4ForConditionalGeneration": "its queries grow with the logarithm of their position, and its layers share keys",
    "OlmoHybridForCausalLM": "the steps of its delta rule reach 2, and its norms are at other places in layers with attention",
    "Step3p5ForCausalLM": _STEP,
    "Step3p7ForConditionalGeneration": _STEP,
}


def find_architecture(config: Mapping[str, Any], known: Mapping[str, Any] = PARSERS) -> str:
    """Return the architecture of `known` that a config.json names. Raises CheckpointError."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"config.json has architectures = {names!r}; it must be a list")
    for name in names:
        # If a decoder was saved without its head, or with a classification head, its config names another class of the family.
        family = str(name).removesuffix("Model").removesuffix("ForSequenceClassification")
        for one in (str(name), f"{family}ForCausalLM"):
            if one in known:
                return one
    words = [str(name) for name in names]
    why = "".join(f": {_LACKING[word]}" for word in words if word in _LACKING)
    raise CheckpointError(
        f"config.json names architecture {', '.join(words) or 'none'}, which is not supported here{why}{_nearest(words, known)}; {PAGE} lists those "
        "that are"
    )


def _nearest(names: Iterable[str], known: Iterable[str]) -> str:
    """Return a clause with the supported architecture that is most similar to one of `names`, or ""."""
    from difflib import get_close_matches  # imported here because only an error message needs it

    stems = {_stem(name): name for name in known}
    found = [close for name in names for close in get_close_matches(_stem(name), stems, 1, cutoff=0.6)]
    return f"; the nearest is {stems[found[0]]}" if found else ""


def _stem(name: str) -> str:
    """Return an architecture's name without its suffix, such as ForCausalLM, in lower case."""
    return name.partition("For")[0].removesuffix("Model").lower()
