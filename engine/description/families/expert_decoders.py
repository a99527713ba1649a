"""The families of decoders with experts.

Each function parses the config.json of one family, with the defaults of transformers. Attention is that of dense decoders. A family is a function
here, and a row of config_registry.py. Families differ in the fields of SparseConfig.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import (
    every_nth,
    mixed_layers,
    read_top_k,
    rules_by_type,
    sliding_window,
    text_keys,
    uniform_layers,
)
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.dense_decoders import (
    exaone_layers,
    glm4,
    granite_scales,
    granite_windows,
    qwen_layers,
)
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.description.shapes import (
    ExpertNames,
    ExpertsShape,
    GateShape,
    NormNames,
    Routing,
    SparseShape,
)
from pilotlight.engine.description.sparse_config import SparseConfig, read_grouped_experts, read_softmax_experts
from pilotlight.engine.weights.config import (
    flag,
    layer_numbers,
    number,
    positive_int,
    positive_number,
    quantization,
    refuse_unless,
    whole_number,
)
from pilotlight.engine.weights.fused import FusedRows

_MIXTRAL = ExpertNames("block_sparse_moe", "gate", "e_score_correction_bias", "experts", ("w1", "w3", "w2"))
GRANITE_EXPERTS = ExpertNames("block_sparse_moe", "router.layer")
QWEN2_EXPERTS = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")
_ERNIE = ExpertNames(bias="moe_statics.e_score_correction_bias")


def mixtral(config: Mapping[str, Any]) -> SparseConfig:
    """Mixtral: Mistral's attention, and experts in every layer."""
    return SparseConfig.read(
        config,
        layers=uniform_layers(config, sliding_window(config, None)),
        rotary=(read_rotary_rule(config, 1_000_000.0),),
        default_eps=1e-5,
        intermediate_size=positive_int(config, "intermediate_size"),
        sparse=read_softmax_experts(
            config, "num_local_experts", default_experts=8, default_top_k=2, renormalise=True, names=_MIXTRAL
        ),
        sparse_layers=_all_layers(config),
    )


def qwen2_moe(config: Mapping[str, Any]) -> SparseConfig:
    """Qwen 1.5 and 2 MoE: Qwen 2's attention, experts, and a shared expert weighted by a sigmoid."""
    return SparseConfig.read(
        config,
        layers=qwen_layers(config),
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=flag(config, "qkv_bias", True),
        sparse=read_softmax_experts(
            config,
            "num_experts",
            size_key="moe_intermediate_size",
            default_experts=60,
            default_top_k=4,
            renormalise=flag(config, "norm_topk_prob", False),
            names=QWEN2_EXPERTS,
            shared_size=positive_int(config, "shared_expert_intermediate_size", 5632),
        ),
        sparse_layers=every_step(config),
    )


def qwen3_moe(config: Mapping[str, Any]) -> SparseConfig:
    """Qwen 3 MoE, and the text part of 3-VL MoE: Qwen 3's attention, and experts in most or all layers."""
    text = text_keys(config)
    bias = flag(text, "attention_bias", False)
    window = sliding_window(text, 4096) if flag(text, "use_sliding_window", False) else None
    return SparseConfig.read(
        text,
        layers=uniform_layers(text, window),
        intermediate_size=positive_int(text, "intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sparse=read_softmax_experts(
            text,
            "num_experts",
            size_key="moe_intermediate_size",
            default_experts=text.get("num_local_experts", 128),
            renormalise=flag(text, "norm_topk_prob", False),
        ),
        sparse_layers=every_step(text),
    )


def qwen3_omni(config: Mapping[str, Any]) -> SparseConfig:
    """Qwen3-Omni (text): the decoder of its thinker is that of Qwen 3 MoE."""
    thinker = config.get("thinker_config")
    if not isinstance(thinker, dict) or not isinstance(thinker.get("text_config"), dict):
        raise CheckpointError(f"config.json has thinker_config = {thinker!r}; it must be an object with text_config")
    text = {"norm_topk_prob": True, "rope_theta": 1_000_000.0, **thinker["text_config"]}
    whole = {"architectures": config.get("architectures"), "quantization_config": quantization(config)}
    read = qwen3_moe({**thinker, "text_config": text, **whole})
    return replace(read, beside=r"(thinker\.)?(visual|audio_tower|talker|code2wav)\..*")


def olmoe(config: Mapping[str, Any]) -> SparseConfig:
    """OLMoE: joint norms of all queries and of all keys of a token; experts in every layer."""
    refuse_unless(config, "clip_qkv", None)
    bias = flag(config, "attention_bias", False)
    return SparseConfig.read(
        config,
        default_eps=1e-5,
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        joint_qk_norm=True,
        sparse=read_softmax_experts(
            config, "num_experts", default_experts=64, renormalise=flag(config, "norm_topk_prob", False)
        ),
        sparse_layers=_all_layers(config),
    )


def dots1(config: Mapping[str, Any]) -> SparseConfig:
    """dots.llm1: Qwen 3's attention and DeepSeek-V3's experts."""
    bias = flag(config, "attention_bias", False)
    refuse_unless(config, "scoring_func", "sigmoid", "noaux_tc", None)  # noaux_tc is sigmoids with a balancing bias
    return SparseConfig.read(
        config,
        layers=qwen_layers({"max_window_layers": 62, **config, "use_sliding_window": True}),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        **read_grouped_experts({"norm_topk_prob": False, **config, "scoring_func": "sigmoid"}),
    )


def exaone_moe(config: Mapping[str, Any]) -> SparseConfig:
    """K-EXAONE: EXAONE 4's attention, norms before each block, and DeepSeek-V3's experts."""
    renamed = {
        "n_routed_experts": positive_int(config, "num_experts", 64),
        "n_shared_experts": config.get("num_shared_experts", 1),
        "num_nextn_predict_layers": 0,  # stored under other names
    }
    fields = read_grouped_experts({**_EXAONE_MOE, **config, **renamed}, scale=2.5)
    return SparseConfig.read(
        config,
        default_eps=1e-5,
        layers=exaone_layers(config),
        qk_norm=True,
        **fields | {"sparse": fields["sparse"]._replace(names=_EXAONE_NAMES)},
    )


_EXAONE_MOE = {"first_k_dense_replace": 1, "moe_intermediate_size": 1024}
_EXAONE_NAMES = ExpertNames(bias="e_score_correction_bias")


def solar_open(config: Mapping[str, Any]) -> SparseConfig:
    """Solar Open: Llama's attention, and GLM-4.5's experts in every layer."""
    kinds = ["sparse"] * positive_int(config, "num_hidden_layers")
    inner = positive_int(config, "moe_intermediate_size", 1280)
    text = {"n_routed_experts": 128, "n_shared_experts": 1, **config, "mlp_layer_types": kinds}
    return SparseConfig.read(
        config,
        default_head_dim=128,
        default_eps=1e-5,
        rotary=(read_rotary_rule(config, 1_000_000.0),),
        qkv_bias=flag(config, "attention_bias", False),
        **read_grouped_experts({**text, "moe_intermediate_size": inner, "intermediate_size": inner}),
    )


def afmoe(config: Mapping[str, Any]) -> SparseConfig:
    """Arcee Trinity: windows in most layers, which alone rotate; gates on the output of attention.

    Sigmoids with a balancing bias choose experts.
    """
    refuse_unless(config, "score_func", "sigmoid", None)
    refuse_unless(config, "route_norm", True, None)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        refuse_unless(config, key, 1, None)
    num_layers, hidden = positive_int(config, "num_hidden_layers"), positive_int(config, "hidden_size")
    num_experts, inner = positive_int(config, "num_experts", 64), positive_int(config, "moe_intermediate_size", 1408)
    routing = Routing(
        read_top_k(config, num_experts, 6),
        True,
        positive_number(config, "route_scale", 1.0),
        "sigmoid",
        is_biased=True,
        is_wide=True,
    )
    period, bias = positive_int(config, "global_attn_every_n_layers", 4), flag(config, "attention_bias", False)
    shared = whole_number({"num_shared_experts": 2, **config}, "num_shared_experts", num_experts)
    dense = whole_number({"num_dense_layers": 1, **config}, "num_dense_layers", num_layers)
    return SparseConfig.read(
        config,
        default_head_dim=128,
        default_eps=1e-5,
        layers=mixed_layers(config, sliding_window(config, 1024), every_nth(config, period), full_rotary=None),
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        gate=GateShape("gate_proj", positive_int(config, "head_dim", 128)),
        norms=_AROUND_IN_TRINITY,
        embedding_scale=hidden**0.5 if flag(config, "mup_enabled", False) else 1.0,
        sparse=SparseShape(ExpertsShape(num_experts, hidden, inner), routing, shared * inner, _TRINITY),
        sparse_layers=frozenset(range(dense, num_layers)),
    )


_TRINITY = ExpertNames(router="router.gate", bias="expert_bias")
_AROUND_IN_TRINITY = NormNames("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


class GraniteMoeConfig(SparseConfig):
    """A config whose checkpoint stacks all experts: gate and up in one tensor, down in another."""

    __slots__ = ()

    @property
    def fused(self) -> tuple[FusedRows, ...]:
        (num_experts, hidden, inner), mlp = self.sparse.experts, GRANITE_EXPERTS.mlp
        each = f"{mlp}.experts.{{expert}}"
        return (
            FusedRows(f"{mlp}.input_linear", {f"{each}.gate_proj": inner, f"{each}.up_proj": inner}, num_experts),
            FusedRows(f"{mlp}.output_linear", {f"{each}.down_proj": hidden}, num_experts),
            *self.divided,
        )


def granite_moe(config: Mapping[str, Any]) -> SparseConfig:
    """Granite 3 MoE: Granite 3's attention and multipliers, and experts in every layer."""
    bias = flag(config, "attention_bias", False)
    return GraniteMoeConfig.read(
        config,
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        sparse=read_softmax_experts(
            config, "num_local_experts", default_experts=8, default_top_k=2, renormalise=True, names=GRANITE_EXPERTS
        ),
        sparse_layers=_all_layers(config),
        **granite_scales(config),
    )


def granite_moe_swa(config: Mapping[str, Any]) -> SparseConfig:
    """Granite SWA MoE: the attention of Granite SWA, experts in every layer, and maybe a shared one."""
    bias, hidden = flag(config, "attention_bias", False), positive_int(config, "hidden_size")
    names, shared = GRANITE_EXPERTS._replace(router="router", shared="shared_mlp"), 0
    if config.get("shared_intermediate_size"):
        shared = positive_int(config, "shared_intermediate_size")
    return SparseConfig.read(
        config,
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        divided=granite_shared(f"{names.mlp}.shared_mlp", shared, hidden),
        sparse=read_softmax_experts(
            config,
            "num_local_experts",
            default_experts=8,
            default_top_k=2,
            renormalise=True,
            names=names,
            shared_size=shared,
        ),
        sparse_layers=_all_layers(config),
        **granite_windows(config),
        **granite_scales(config),
    )


def granite_shared(mlp: str, inner: int, hidden: int) -> tuple[FusedRows, ...]:
    """Return how the feed-forward of all tokens in Granite's checkpoints is divided.

    `mlp`: its name in the model; `inner`: its inner size.
    """
    return (
        FusedRows("shared_mlp.input_linear", {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}),
        FusedRows("shared_mlp.output_linear", {f"{mlp}.down_proj": hidden}),
    )


def minimax_m2(config: Mapping[str, Any]) -> SparseConfig:
    """MiniMax-M2: joint norms, partly rotated heads, experts chosen by sigmoids with a balancing bias."""
    head_dim = positive_int(config, "head_dim", 128)
    # Published checkpoints have the number of rotated values instead of their share of a head.
    share = positive_int(config, "rotary_dim", head_dim) / head_dim
    num_experts = positive_int(config, "num_local_experts", 256)
    shape = ExpertsShape(
        num_experts, positive_int(config, "hidden_size"), positive_int(config, "intermediate_size", 1536)
    )
    refuse_unless(config, "scoring_func", "sigmoid", None)
    refuse_unless(config, "use_routing_bias", True, None)
    refuse_unless(config, "qk_norm_type", "per_layer", None)
    refuse_unless(config, "shared_intermediate_size", 0, None)
    routing = Routing(read_top_k(config, num_experts), True, scores="sigmoid", is_biased=True, is_wide=True)
    return SparseConfig.read(
        config,
        default_head_dim=128,
        rotary=(read_rotary_rule(config, 5_000_000.0, share),),
        intermediate_size=shape.intermediate_size,
        joint_qk_norm=True,
        sparse=SparseShape(shape, routing, names=_MIXTRAL),
        sparse_layers=_all_layers(config),
    )


def ernie_moe(config: Mapping[str, Any]) -> SparseConfig:
    """Ernie 4.5 MoE: rotation of adjacent pairs, a softmax with a balancing bias, shared experts."""
    refuse_unless(config, "use_bias", False, None)  # with biases the output head would have one, too
    num_layers = positive_int(config, "num_hidden_layers")
    num_experts = positive_int(config, "moe_num_experts", 64)
    intermediate = positive_int(config, "moe_intermediate_size", 1536)
    top_k = read_top_k({"num_experts_per_tok": config.get("moe_k")}, num_experts, 6)
    every = positive_int(config, "moe_layer_interval", 1)
    start = whole_number({"moe_layer_start_index": 1, **config}, "moe_layer_start_index", num_layers)
    end = number(config, "moe_layer_end_index", -1)
    last = num_layers - 1 if end == -1 else int(end)
    return SparseConfig.read(
        config,
        default_eps=1e-5,
        rotary=(read_rotary_rule(config, 500_000.0),),
        is_interleaved=True,
        default_tied=True,
        intermediate_size=positive_int(config, "intermediate_size"),
        sparse=SparseShape(
            ExpertsShape(num_experts, positive_int(config, "hidden_size"), intermediate),
            Routing(top_k, True, is_biased=True, is_wide=True),
            whole_number(config, "moe_num_shared_experts", num_experts) * intermediate,
            _ERNIE,
        ),
        sparse_layers=frozenset(i for i in range(start, min(last, num_layers - 1) + 1) if (i + 1) % every == 0),
    )


def glm4_moe(config: Mapping[str, Any]) -> SparseConfig:
    """GLM-4.5, 4.6 and 4.7: attention in which half of each head is rotated, and DeepSeek-V3's experts."""
    return SparseConfig.read(
        config,
        rotary=(read_rotary_rule(config, default_share=0.5),),
        default_eps=1e-5,
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm=flag(config, "use_qk_norm", False),
        **read_grouped_experts(config),
    )


def mimo_v2(config: Mapping[str, Any]) -> SparseConfig:
    """MiMo-V2-Flash: windows in most layers, which have twice as many key-value heads, and sinks.

    Values are smaller than keys. A third of each head is rotated. Sigmoids with a balancing bias choose experts.
    """
    num_layers, kv_heads = positive_int(config, "num_hidden_layers"), positive_int(config, "num_key_value_heads")
    default = tuple("full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention" for i in range(num_layers))
    window = sliding_window(config, 129)
    if config.get("sliding_window_size") is not None:  # this key does not count the query's own token
        window = positive_int(config, "sliding_window_size") + 1
    layers = mixed_layers(config, window, default, sliding_rotary=1)
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    refuse_unless(config, "n_shared_experts", None, 0)
    thetas = number(config, "rope_theta", 5_000_000.0), number(config, "swa_rope_theta", 10_000.0)
    scale = config.get("attention_value_scale", 0.707)
    return SparseConfig.read(
        config,
        layers=tuple(
            kind if kind.window is None else kind._replace(num_kv_heads=2 * kv_heads, has_sinks=True) for kind in layers
        ),
        rotary=rules_by_type(config, *thetas, default_share=0.334),
        default_head_dim=192,
        default_eps=1e-5,
        value_dim=positive_int(config, "v_head_dim", 128),
        value_scale=1.0 if scale is None else positive_number(config, "attention_value_scale", scale),
        sinks_name="attention_sink_bias",
        qkv_bias=flag(config, "attention_bias", False),
        **read_grouped_experts({**config, "mlp_layer_types": kinds}),
    )


def glm_v(config: Mapping[str, Any]) -> DenseConfig:
    """GLM-4.1V, 4.5V and 4.6V (text): the decoder of GLM-4 or, with experts, of GLM-4.5."""
    text = text_keys(config)
    if text.get("n_routed_experts") is not None:
        return glm4_moe(text)
    return glm4({"rms_norm_eps": 1e-5, "attention_bias": True, "head_dim": _plain_head_dim(text), **text})


def _plain_head_dim(config: Mapping[str, Any]) -> int:
    return positive_int(config, "hidden_size") // positive_int(config, "num_attention_heads")


def _all_layers(config: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(range(positive_int(config, "num_hidden_layers")))


def every_step(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers with experts: every n-th (`decoder_sparse_step`) not in `mlp_only_layers`."""
    num_layers = positive_int(config, "num_hidden_layers")
    step, dense = positive_int(config, "decoder_sparse_step", 1), layer_numbers(config, "mlp_only_layers", num_layers)
    return frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
