"""Every family with every composition of ranks: tokens equal those of one rank and log-probabilities are close, or the composition is refused by
name."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
)

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from tests.checkpoints import write_checkpoint
from tests.engine.driver import Heard, drain, drain_preempting, load_engine, random_prompt, submit
from tests.engine.families import DELTA, LATENT, NEMOTRON, YARN, config
from tests.engine.parallel.test_ranks import Ranks, assert_same, group_memory, group_of, several
from tests.engine.quantizers import apart

HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
# Sizes of heads, experts and layers that every composition of up to four ranks can divide.
SHARED: dict[str, Any] = {
    "hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 60
}  # fmt: skip
EACH = "llama 4, experts one by one"
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "gemma3": (
        Gemma3TextConfig,
        {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 11, "query_pre_attn_scalar": 6, "rope_parameters": None},
    ),
    "qwen3-moe": (Qwen3MoeConfig, {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 18}),
    "gpt-oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 15}),
    "deepseek-v3": (
        DeepseekV3Config,
        LATENT
        | {
            "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "moe_intermediate_size": 28,
        },
    ),
    "glm-4.5": (
        Glm4MoeConfig,
        {
            "head_dim": 12,
            "rope_parameters": HALF,
            "moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama 4": (
        Llama4TextConfig,
        {
            "intermediate_size_mlp": 44, "num_local_experts": 4, "num_experts_per_tok": 2, "no_rope_layers": [1, 0, 1, 1],
            "moe_layers": [0, 1, 3], "attention_chunk_size": 16, "floor_scale": 9, "attn_scale": 0.3,
        },
    ),
}  # fmt: skip
_INDEX: dict[str, Any] = {
    "index_topk": 11, "index_n_heads": 9, "index_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 28,
}  # fmt: skip
_SHARED_KEYS: dict[str, Any] = {  # the last two layers read keys and values of the two before them
    "hidden_activation": "gelu_pytorch_tanh", "num_kv_shared_layers": 2, "sliding_window": 11, "global_head_dim": 16,
    "rope_parameters": None, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6,
}  # fmt: skip
# Further families, each with a part that MODELS lack. Only the last one is in the quick tests.
FURTHER: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "phi3": (Phi3Config, {"hidden_size": 48, "head_dim": None, "sliding_window": None}),
    "ministral3": (Ministral3Config, {"sliding_window": None, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "granite": (GraniteConfig, {"hidden_size": 48, "head_dim": None, "residual_multiplier": 0.4, "logits_scaling": 2.5, "attention_bias": True}),
    "gemma2": (Gemma2Config, {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 12, "attn_logit_softcapping": 2.0}),
    "olmo3": (Olmo3Config, {"hidden_size": 48, "head_dim": None, "sliding_window": 11, "rope_parameters": None, "num_key_value_heads": 2}),
    "exaone4": (Exaone4Config, {"sliding_window": 13, "sliding_window_pattern": 2}),
    "smollm3": (SmolLM3Config, {"hidden_size": 48, "head_dim": None}),
    "glm4": (Glm4Config, {"head_dim": 12, "rope_parameters": HALF}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            "hidden_size": 48, "head_dim": None, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 36,
        },
    ),
    "granite-moe": (GraniteMoeConfig, {"hidden_size": 48, "head_dim": None, "num_local_experts": 8, "num_experts_per_tok": 3,
                                       "intermediate_size": 28}),
    "ernie-moe": (Ernie4_5_MoeConfig, {"hidden_size": 48, "head_dim": None, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 28}),
    "deepseek-v2": (
        DeepseekV2Config,
        LATENT
        | {
            "num_key_value_heads": 8, "qk_nope_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "topk_method": "group_limited_greedy", "first_k_dense_replace": 1, "moe_intermediate_size": 28,
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        {"head_dim": 12, "intermediate_size": 28, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": HALF},
    ),
    "mistral4": (
        Mistral4Config,
        LATENT
        | {
            "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "moe_intermediate_size": 28,
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "olmo2": (Olmo2Config, {"hidden_size": 48, "head_dim": None}),
    "olmoe": (OlmoeConfig, {"hidden_size": 48, "head_dim": None, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 28}),
    "seed-oss": (SeedOssConfig, {"attention_out_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ernie": (Ernie4_5Config, {"use_bias": True}),
    "glm-4.7-flash": (
        Glm4MoeLiteConfig,
        LATENT | {"num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28},
    ),
    "deepseek-v3.2": (
        DeepseekV32Config,
        LATENT | _INDEX | {"num_key_value_heads": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "glm-5": (
        GlmMoeDsaConfig,
        LATENT | _INDEX | {"num_key_value_heads": 8, "indexer_types": ["full", "shared"] * 2, "first_k_dense_replace": 2},
    ),
    "mimo-v2": (
        MiMoV2FlashConfig,
        {
            "head_dim": 12, "v_head_dim": 8, "sliding_window": 13, "moe_intermediate_size": 28, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), HALF),
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        {
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "sliding_window": 11, "global_head_dim": 16,
            "num_global_key_value_heads": 2, "attention_k_eq_v": True, "rope_parameters": None,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4, inputs of layers": (
        Gemma4TextConfig,
        _SHARED_KEYS | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 431, "use_double_wide_mlp": True},
    ),
    "gemma4, experts": (  # two stages can be formed, but not more
        Gemma4TextConfig,
        _SHARED_KEYS | {
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 28,
            "layer_types": ["sliding_attention"] + ["full_attention"] * 5,
        },
    ),
    "cohere": (CohereConfig, {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": (Cohere2Config, {"hidden_size": 48, "head_dim": None, "sliding_window": 11}),
    "cohere2-moe": (
        Cohere2MoeConfig,
        {
            "rms_norm_eps": None, "sliding_window": 11, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 28,
            "num_shared_experts": 1, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 60,
        },
    ),
    "arcee": (ArceeConfig, {}),
    "apertus": (ApertusConfig, {}),
    "glm": (GlmConfig, {"head_dim": 12, "rope_parameters": HALF}),
    "gemma": (GemmaConfig, {}),
    "granite-swa": (GraniteSWAConfig, {"hidden_size": 48, "head_dim": None, "sliding_window": 11, "attention_multiplier": 0.3}),
    "granite-moe-swa": (
        GraniteMoeSWAConfig,
        {
            "hidden_size": 48, "head_dim": None, "sliding_window": 11, "num_local_experts": 8, "num_experts_per_tok": 3,
            "intermediate_size": 28, "shared_intermediate_size": 20,
        },
    ),
    "hunyuan": (HunYuanDenseV1Config, {}),
    "hunyuan-moe": (HunYuanMoEV1Config, {"num_experts": 8, "moe_topk": 3, "intermediate_size": 28}),
    "dots1": (
        Dots1Config,
        {
            "moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
            "n_shared_experts": 1, "first_k_dense_replace": 1,
        },
    ),
    "k-exaone": (ExaoneMoeConfig, {"sliding_window": 13, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28}),
    "solar-open": (SolarOpenConfig, {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28}),
    "trinity": (
        AfmoeConfig,
        {"sliding_window": 13, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "num_shared_experts": 1},
    ),
}  # fmt: skip
# Families whose layers keep a state.
_HYBRID: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": None,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_DELTA = DELTA | {
    "head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": _HYBRID["layer_types"],
}
_QWEN_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 20
}  # fmt: skip
_CONVOLUTIONS = _HYBRID | {"layer_types": ["conv", "full_attention"] * 2}
FURTHER |= {
    "lfm2": (Lfm2Config, _CONVOLUTIONS),
    "lfm3": (
        Lfm3Config,
        _HYBRID | {"head_dim": 12, "sliding_window": 13, "rope_parameters": None,
                   "layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    ),
    "lfm2-moe": (
        Lfm2MoeConfig, _CONVOLUTIONS | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "num_dense_layers": 1},
    ),
    "qwen3-next": (Qwen3NextConfig, _DELTA | _QWEN_EXPERTS),
    "qwen3.5": (Qwen3_5TextConfig, _DELTA),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, _DELTA | _QWEN_EXPERTS),
    "granite-4": (
        GraniteMoeHybridConfig,
        _HYBRID | {
            "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_chunk_size": 16, "num_local_experts": 0, "shared_intermediate_size": 28,
        },
    ),
    "nemotron-h": (
        NemotronHConfig,
        NEMOTRON | {
            "mamba_num_heads": 8, "n_groups": 4, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 28, "moe_latent_size": 20, "moe_shared_expert_intermediate_size": 20,
        },
    ),
    "falcon-h1": (FalconH1Config, {"hidden_size": 48, "head_dim": None, "mamba_n_heads": 8, "mamba_d_ssm": 40, "mamba_d_state": 6,
                                   "mamba_chunk_size": 16, "ssm_multipliers": [0.5, 0.8, 1.2, 0.7, 1.1]}),
    "kimi-linear": (
        KimiLinearConfig,
        LATENT | {
            "num_key_value_heads": 8, "q_lora_rank": None, "rope_parameters": None, "layer_types": _HYBRID["layer_types"], "linear_num_heads": 4,
            "linear_head_dim": 7, "num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "moe_intermediate_size": 28,
        },
    ),
}  # fmt: skip
FAMILIES = (*MODELS, EACH, *FURTHER)
QUICK = (*MODELS, EACH, "minimax-m2")
STATES = (
    "lfm2", "lfm2-moe", "lfm3", "qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-4", "nemotron-h", "falcon-h1", "kimi-linear"
)  # fmt: skip
STACKED = ("gpt-oss", "llama 4")  # families with all experts of a layer in one tensor
SPARSE = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3", "glm-4.5", "llama 4", EACH, "qwen2-moe", "granite-moe", "ernie-moe",
          "deepseek-v2", "minimax-m2", "olmoe", "glm-4.7-flash", "mimo-v2", "mistral4", "lfm2-moe", "qwen3-next", "qwen3.5-moe",
          "nemotron-h", "kimi-linear", "deepseek-v3.2", "glm-5", "cohere2-moe", "granite-moe-swa", "hunyuan-moe", "dots1", "k-exaone",
          "solar-open", "trinity", "gemma4, experts")  # fmt: skip


Run = Callable[[Engine, list[Submit]], dict[str, Heard]]
EXPERTS = {"expert_parallel": True}
COMPOSITIONS: dict[str, HostConfig] = {
    "tp 2": group_of(2),
    "pp 2": group_of(2, stages=2),
    "ep 2": group_of(2, **EXPERTS),
    "ep 2, dp 2": group_of(2, **EXPERTS, data_parallel=2),
    "pp 3": group_of(3, stages=3),
    "tp 4": group_of(4),
    "tp 2, pp 2": group_of(4, stages=2),
    "pp 4": group_of(4, stages=4),
    "ep 4": group_of(4, **EXPERTS),
    "ep 4, a copy of one each": group_of(4, **EXPERTS, redundant_experts=4),
    "ep 2, pp 2": group_of(4, **EXPERTS, stages=2),
    "ep 4, dp 2": group_of(4, **EXPERTS, data_parallel=2),
    "ep 4, dp 4": group_of(4, **EXPERTS, data_parallel=4),
    "ep 2, dp 2, pp 2": group_of(4, **EXPERTS, data_parallel=2, stages=2),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if len(host.group) > 2 else [])
        for name, host in COMPOSITIONS.items()
    ],
)
def ranks(process_tier: None, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    host = COMPOSITIONS[request.param]
    with group_memory(host) as memory:
        yield Ranks(host, memory)


def write(directory: Path, family: str, seed: int = 0, **changes: Any) -> None:
    kind, own = (MODELS | FURTHER)["llama 4" if family == EACH else family]
    write_checkpoint(directory, config(kind, **SHARED | own | changes), seed)
    if family == EACH:
        tensors = apart(load_file(directory / "model.safetensors"))
        save_file({name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors")


class SmallestGap(TorchFunctionMode):
    """Records in `value` how far apart the closest two candidates of all choices by `topk` are: experts of a token, and probable tokens."""

    value = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "topk":
            scores, count = args[0].float(), min(args[1] + 1, args[0].shape[-1])
            gaps = -scores.sort(dim=-1, descending=True).values[..., :count].diff(dim=-1)
            self.value = min([self.value, *gaps[gaps.isfinite()].flatten().tolist()])
        return func(*args, **(kwargs or {}))


def write_without_ties(
    directory: Path, family: str, asked: list[Submit], run: Run = drain, budget: int = 2048, **changes: Any
) -> tuple[Path, dict[str, Heard]]:
    """Write a model whose choices of experts and tokens do not depend on the order of sums; return its directory and one rank's answers to `asked`.

    Such orders change scores by about 1e-6. Where two are closer, one rank and several may rightly choose differently, so other weights are drawn.
    """
    for seed in range(20):
        place = directory / str(seed)
        write(place, family, seed, **changes)
        engine = load_engine(place, max_num_batched_tokens=budget)
        with SmallestGap() as gap:
            expected = run(engine, asked)
        if gap.value > 1e-5:
            return place, expected
    raise AssertionError(f"each of 20 models of {family} has a tie")


def refused_with(family: str, host: HostConfig) -> str | None:
    """Return the expected error for a family that `host` cannot divide; None if it can."""
    if family == "glm-5" and host.stages > 2:
        return "the first of a pipeline stage, reads the keys that the index of an earlier layer selects"
    if family == "gemma4, experts" and host.stages > 2:
        return "reads the keys and values of layer 3, which is in another pipeline stage: use fewer stages"
    if family == "gemma4, inputs of layers" and host.stages > 1 and not host.expert_parallel:
        return "depend on embeddings, which only the first pipeline stage has: use one stage"
    if not host.expert_parallel:
        return None
    if family in STATES and family in SPARSE and host.data_parallel > 1:
        return "copies of layers with recurrent states"
    if family not in SPARSE:
        return "has no experts to divide" if host.data_parallel > 1 else "has 0 experts; leave ep at 1"
    return "contains all experts in one tensor" if family in STACKED else None


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_computes_in_every_composition_of_ranks_what_one_rank_does(
    tmp_path: Path, ranks: Ranks, family: str
) -> None:
    if refusal := refused_with(family, ranks.host):
        write(tmp_path, family)
        with pytest.raises(CheckpointError, match=refusal), ranks.loaded(tmp_path):
            pass
        return
    asked = several(prompt_logprobs=True)  # greedy sequences, and below a sampled one
    asked.append(submit("drawn", random_prompt(31, seed=9), max_tokens=12, temperature=0.9, seed=5, num_logprobs=3))
    directory, expected = write_without_ties(tmp_path, family, asked)
    with ranks.loaded(directory) as model:
        assert_same(drain(model.engine, asked), expected)


NUM_DRAWS = 14  # for each composition


def drawn_submits(rng: random.Random) -> list[Submit]:
    """Return requests of random lengths with random sampling options."""
    asked = []
    for i in range(rng.randint(1, 6)):
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 14), "num_logprobs": rng.randint(0, 3)}
        if rng.random() < 0.5:
            sampling |= {"temperature": 0.9, "seed": rng.randrange(99)}
        if rng.random() < 0.3:
            sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
        if rng.random() < 0.3:
            sampling |= {"prompt_logprobs": True}
        asked.append(submit(f"s{i}", random_prompt(rng.randint(1, 70), seed=rng.randrange(999)), **sampling))
    return asked


def drawn_sizes(rng: random.Random, family: str) -> dict[str, Any]:
    heads, layers = rng.choice([4, 8]), rng.randint(4, 6)
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "hidden_size": 2 * heads * rng.randint(16 // heads, 28 // heads),  # 32 to 56; a head has an even size
    }
    sizes["num_key_value_heads"] = (
        heads if "kv_lora_rank" in (MODELS | FURTHER).get(family, ({}, {}))[1] else rng.choice([1, 2, heads])
    )
    for key, given in (MODELS | FURTHER).get(family, ({}, {}))[1].items():
        if key in ("layer_types", "layers_block_type"):
            kinds = sorted(set(given))
            types = [*kinds, *rng.choices(kinds, k=layers - len(kinds))]
            rng.shuffle(types)
            types.remove("full_attention")
            sizes[key] = [*types, "full_attention"]
    if family == "nemotron-h":
        del sizes["num_hidden_layers"]  # the list of types is as long
    if family == "glm-5":
        sizes["num_hidden_layers"] = 4  # as many as its list of indices
    if family.startswith("gemma4, "):  # others have no stages, or layers to read
        del sizes["layer_types"], sizes["num_hidden_layers"]
    if family == "mimo-v2":  # layers with a window have twice as many
        sizes["num_key_value_heads"] = rng.choice([1, 2])
    if family.startswith("llama 4"):
        sizes["no_rope_layers"] = [rng.randint(0, 1) for _ in range(layers)]
        sizes["moe_layers"] = sorted(rng.sample(range(layers), rng.randint(1, layers)))
    if family == "gemma3":
        sizes["sliding_window"] = rng.randint(5, 40)
    return sizes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drawn_models_and_requests_get_the_tokens_of_one_rank(tmp_path: Path, ranks: Ranks) -> None:
    [name] = [name for name, host in COMPOSITIONS.items() if host == ranks.host]
    families = [family for family in FAMILIES if refused_with(family, ranks.host) is None]
    for i in range(NUM_DRAWS):
        rng = random.Random(f"{name} {i}")
        family = rng.choice(families)
        sizes, asked = drawn_sizes(rng, family), drawn_submits(rng)
        budget, run = rng.choice([16, 48, 2048]), rng.choice([drain, drain_preempting])
        directory, expected = write_without_ties(tmp_path / str(i), family, asked, run, budget, **sizes)
        shared = Ranks(replace(ranks.host, max_num_batched_tokens=budget), ranks.memory)
        with shared.loaded(directory) as model:
            if ranks.host.stages == 1:
                model.engine.runner.depth = rng.choice([1, 2])
            try:
                assert_same(run(model.engine, asked), expected)
            except AssertionError as difference:
                difference.add_note(f"{name}, draw {i}: {family}")
                raise
