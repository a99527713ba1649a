"""Families with latent attention, such as DeepSeek's, Kimi's, GLM-4.7-Flash and Mistral Small 4.

Keys and values are one short vector per token and layer; experts come after a few dense layers. A family is a function here and a row of
config_registry.py. Defaults are those of transformers' configuration classes, and for DeepSeek-V3 those of deepseek-ai/DeepSeek-V3's
configuration_deepseek.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import LayerKind, text_keys
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.dense_decoders import growing_queries, mistral
from pilotlight.engine.description.recurrent_shapes import KimiDeltaShape
from pilotlight.engine.description.rotary_scaling import (
    RotaryRule,
    read_rotary_rule,
    rotary_parameters,
    sharpening,
)
from pilotlight.engine.description.shapes import (
    EXPANDED_BYTES,
    NO_IMAGES,
    ExpertNames,
    ImageNeeds,
    IndexShape,
    LatentShape,
    Routing,
)
from pilotlight.engine.description.sparse_config import SparseConfig, read_experts_in_groups, read_grouped_experts
from pilotlight.engine.description.tensor_sizes import WeightShape, norm, projections, summed
from pilotlight.engine.description.vision_config import ENCODED_BYTES, PatchedVision, PixtralVision
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheSegment
from pilotlight.engine.weights.config import flag, number, positive_int, positive_number, refuse_unless, whole_number
from pilotlight.engine.weights.fused import FusedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(SparseConfig):
    """The config of a decoder with latent attention.

    `head_dim` is the rotated part of each head; `num_kv_heads` is 0, because all heads read the same cache, which ranks cannot divide.
    """

    q_rank: int | None  # None if queries are projected directly
    kv_rank: int
    nope_dim: int
    value_dim: int
    vision: PatchedVision | None = None
    index: IndexShape | None = None  # None if a token reads all keys
    shared_indices: frozenset[int] = frozenset()  # layers that read what an earlier layer's index has selected

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        mixers = [self.mixer(i) for i in range(self.num_layers)]
        return tuple(
            [
                self._attended_layer(i) if mixer is None else CachedLayer.of_state(*mixer.segments)
                for i, mixer in enumerate(mixers)
            ]
        )

    @property
    def mtp_cached_layer(self) -> CachedLayer:
        return self._attended_layer(self.num_layers)

    def _attended_layer(self, layer: int) -> CachedLayer:
        latent = CacheSegment("latent", 1, self.kv_rank + self.head_dim)
        if self.index is None or layer in self.shared_indices:
            return CachedLayer((latent,))
        return CachedLayer((latent, CacheSegment("index", 1, self.index.head_dim)))

    def attention_products(self, context: int) -> int:
        return self.num_heads * (2 * self.kv_rank + self.head_dim) * self._num_read(context) + (
            0 if self.index is None else self.index.num_heads * self.index.head_dim * context
        )

    def read_share(self, context: int) -> float:
        latent, index = self.kv_rank + self.head_dim, 0 if self.index is None else self.index.head_dim
        return (latent * self._num_read(context) + index * context) / ((latent + index) * context)

    def _num_read(self, context: int) -> int:
        """Return how many latent vectors of a context a token reads."""
        return context if self.index is None else min(context, self.index.top_k)

    def check_stage(self, layers: range) -> None:
        if layers.start in self.shared_indices:
            raise CheckpointError(
                f"layer {layers.start}, the first of a pipeline stage, reads the keys that the index of an earlier layer selects: "
                "use another number of stages"
            )

    def step_bytes(self, tokens: int, ranks: int, item_bytes: int) -> int:
        """Return the bytes of absorbed queries and results, or of expanded keys and values if larger."""
        absorbed = 2 * tokens * self.num_heads // ranks * self.kv_rank * item_bytes
        width = max(self.nope_dim + self.head_dim, self.value_dim)
        found = max(absorbed, EXPANDED_BYTES + EXPANDED_BYTES * (self.nope_dim + self.value_dim) // (2 * width))
        if self.index is not None:  # its queries, their weights, and the positions of selected keys
            heads, dim, top_k = self.index[:3]
            found += tokens * (heads * (dim * item_bytes + 4) + 8 * top_k)
        return found

    def image_needs(self, item_bytes: int) -> ImageNeeds:
        return ImageNeeds(ENCODED_BYTES, self.vision.encoding_bytes(item_bytes)) if self.vision else NO_IMAGES

    @property
    def outer_weights(self) -> list[WeightShape]:
        return self.text_weights + (self.vision.weights(self.hidden_size) if self.vision else [])

    def latent_attention(self, layer: int) -> LatentShape:
        return LatentShape(
            self.num_heads,
            self.q_rank,
            self.kv_rank,
            self.head_dim,
            self.nope_dim,
            self.value_dim,
            self.attention_scale,
            layer,
            turns=bool(self.rotary),
            key_index=self.index and self.index._replace(is_shared=layer in self.shared_indices),
        )

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        norms = [norm(f"{name}.norm_{i}", self.hidden_size) for i in range(2)]
        mixer = self.mixer(layer) if layer < self.num_layers else None
        mixing = self._attention(f"{name}.self_attn") if mixer is None else mixer.weights(name, self.hidden_size)
        if self.index is not None and layer not in self.shared_indices:
            mixing += self._indexer(self.index, f"{name}.self_attn.indexer")
        return [*mixing, *norms, *self.feed_forward_weights(layer, name)]

    def _attention(self, name: str) -> list[WeightShape]:
        hidden, heads, key_dim = self.hidden_size, self.num_heads, self.nope_dim + self.head_dim
        found = []
        if self.q_rank is None:
            found += projections("attention", [f"{name}.q_proj"], [heads * key_dim], hidden, unit=key_dim)
        else:
            found += [
                WeightShape("attention", f"{name}.q_a_proj", self.q_rank, hidden),
                norm(f"{name}.q_a_layernorm", self.q_rank),
                *projections("attention", [f"{name}.q_b_proj"], [heads * key_dim], self.q_rank, unit=key_dim),
            ]
        both = self.nope_dim + self.value_dim
        return [
            *found,
            WeightShape("attention", f"{name}.kv_a_proj_with_mqa", self.kv_rank + self.head_dim, hidden),
            norm(f"{name}.kv_a_layernorm", self.kv_rank),
            WeightShape("attention", f"{name}.kv_b_proj", heads * both, self.kv_rank, "rows", both, is_unpacked=True),
            *summed("attention", f"{name}.o_proj", hidden, heads * self.value_dim, unit=self.value_dim),
        ]

    def _indexer(self, index: IndexShape, name: str) -> list[WeightShape]:
        assert self.q_rank is not None, "config.json was refused"
        return [
            WeightShape("attention", f"{name}.wq_b", index.num_heads * index.head_dim, self.q_rank),
            WeightShape("attention", f"{name}.wk", index.head_dim, self.hidden_size),
            norm(f"{name}.k_norm", index.head_dim),
            WeightShape("norms", f"{name}.k_norm.bias", index.head_dim),
            WeightShape("attention", f"{name}.weights_proj", index.num_heads, self.hidden_size, is_wide=True),
        ]


def deepseek_v3(config: Mapping[str, Any]) -> LatentConfig:
    """DeepSeek-V3 and R1, Kimi K2: sigmoids with a balancing bias choose experts in groups."""
    text = text_keys(config)
    return _latent(text, read_grouped_experts(text, groups=8, top_groups=4, scale=2.5))


def kimi_k25(config: Mapping[str, Any]) -> LatentConfig:
    """Kimi K2.5: Kimi K2, with a vision tower if config.json describes one."""
    vision = config.get("vision_config")
    return replace(
        deepseek_v3(config),
        beside=r"(vision_tower|mm_projector)\..*",
        vision=PatchedVision.read(vision) if vision else None,
    )


def deepseek_v32(config: Mapping[str, Any]) -> LatentConfig:
    """DeepSeek-V3.2: DeepSeek-V3 with an index in each layer, which selects the keys that a token reads."""
    text = {**_DEEPSEEK_V32, **config}
    return _indexed(text, read_grouped_experts(text, groups=8, top_groups=4, scale=2.5))


def glm_moe_dsa(config: Mapping[str, Any]) -> LatentConfig:
    """GLM-5: DeepSeek-V3.2 with one group of experts.

    Some layers have no index and read the keys that an earlier layer's index has selected.
    """
    text = {**_DEEPSEEK_V32, **_GLM_5, **config}
    kinds, num_layers = config.get("indexer_types"), positive_int(text, "num_hidden_layers")
    pattern, every = config.get("index_topk_pattern"), positive_int(config, "index_topk_freq", 1)
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        offset = whole_number({"index_skip_topk_offset": 2, **config}, "index_skip_topk_offset", num_layers)
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise CheckpointError(
            f"config.json has indexer_types = {kinds!r}; they must be {num_layers}, full or shared, of which the first is full"
        )
    shared = frozenset(i for i, kind in enumerate(kinds) if kind == "shared")
    read = _indexed(text, read_grouped_experts(text, scale=2.5), is_interleaved=True)
    return replace(read, shared_indices=shared)


# Defaults of transformers' configuration classes.
_DEEPSEEK_V32 = {"first_k_dense_replace": 3, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
_GLM_5 = {"index_n_heads": 32, "rms_norm_eps": 1e-5}


def _indexed(config: Mapping[str, Any], fields: Mapping[str, Any], *, is_interleaved: bool = False) -> LatentConfig:
    """Parse a config.json of layers that have an index of keys."""
    refuse_unless(config, "indexer_rope_interleave", is_interleaved, None)
    index = IndexShape(
        positive_int(config, "index_n_heads"),
        positive_int(config, "index_head_dim"),
        positive_int(config, "index_topk"),
        is_interleaved,
    )
    read = _latent(config, {**fields, "index": index})
    if read.q_rank is None or index.head_dim < read.head_dim:
        raise CheckpointError(
            f"config.json has q_lora_rank = {read.q_rank}, index_head_dim = {index.head_dim} and qk_rope_head_dim = {read.head_dim}: an index of "
            "keys needs reduced queries, and heads that are at least as large as their rotated part"
        )
    return read


def kimi_linear(config: Mapping[str, Any]) -> LatentConfig:
    """Kimi Linear: three of four layers use the gated delta rule with a decay for each number of a key.

    The others have latent attention without rotation. Layers with experts are those of DeepSeek-V3.
    """
    refuse_unless(config, "tie_word_embeddings", False, None)
    refuse_unless(config, "mla_use_nope", True, None)
    refuse_unless(config, "moe_router_activation_func", "sigmoid", None)
    named = {ours: config.get(theirs) for ours, theirs in _KIMI_KEYS.items() if config.get(theirs) is not None}
    text = {**_KIMI_SIZES, **config, **named}
    num_layers, hidden = positive_int(text, "num_hidden_layers"), positive_int(text, "hidden_size")
    dense = whole_number(text, "first_k_dense_replace", num_layers)
    text["mlp_layer_types"] = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (num_layers - dense)
    linear = config.get("linear_attn_config") or {}
    full = linear.get("full_attn_layers")
    kinds = config.get("layer_types") or [
        "full_attention" if (i and i % 4 == 0 if full is None else i + 1 in full) else "linear_attention"
        for i in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "linear_attention"}:
        raise CheckpointError(
            f"config.json has layer_types = {kinds!r}; they must be {num_layers}: full_attention or linear_attention"
        )
    delta = KimiDeltaShape(
        "self_attn",
        0,
        positive_int(linear, "num_heads", positive_int(config, "linear_num_heads", 32)),
        positive_int(linear, "head_dim", positive_int(config, "linear_head_dim", 128)),
        positive_int(linear, "short_conv_kernel_size", positive_int(config, "linear_conv_kernel_dim", 4)),
        number(text, "rms_norm_eps"),
    )
    fields = read_grouped_experts(text, scale=2.446)
    inner = fields["intermediate_size"]
    named_rows = {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
    fields |= {
        "sparse": fields["sparse"]._replace(names=_KIMI_EXPERTS),
        "divided": tuple([FusedRows(f"block_sparse_moe.{part}", {f"mlp.{part}": n}) for part, n in named_rows.items()]),
        "recurrent": tuple(
            [delta._replace(layer=i) if kind == "linear_attention" else None for i, kind in enumerate(kinds)]
        ),
    }
    return replace(_latent(text, fields), rotary=())


_KIMI_EXPERTS = ExpertNames(mlp="block_sparse_moe", parts=("w1", "w3", "w2"))
# The checkpoint's names of keys, by DeepSeek's.
_KIMI_KEYS = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
# The defaults of transformers' configuration class.
_KIMI_SIZES = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_attention_heads": 32, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
}  # fmt: skip


def glm4_moe_lite(config: Mapping[str, Any]) -> LatentConfig:
    """GLM-4.7-Flash: like DeepSeek-V3, with one group of experts and a dense first layer."""
    num_layers = positive_int(config, "num_hidden_layers")
    dense = whole_number({"first_k_dense_replace": 1, **config}, "first_k_dense_replace", num_layers)
    kinds = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (num_layers - dense)
    text = {"rms_norm_eps": 1e-5, **config, "mlp_layer_types": kinds}
    return _latent(text, read_grouped_experts(text, scale=1.8))


def deepseek_v2(config: Mapping[str, Any]) -> LatentConfig:
    """DeepSeek-V2 and V2-Lite: a softmax chooses experts; in V2 from the groups with the best experts."""
    refuse_unless(config, "scoring_func", "softmax", None)
    refuse_unless(config, "topk_method", "greedy", "group_limited_greedy", None)
    refuse_unless(config, "norm_topk_prob", False, None)  # with True, published code and transformers differ
    is_grouped = config.get("topk_method") == "group_limited_greedy"
    rule = Routing(
        0,
        scale=positive_number(config, "routed_scaling_factor", 1.0),
        groups=positive_int(config, "n_group", 1) if is_grouped else 1,
        top_groups=positive_int(config, "topk_group", 1) if is_grouped else 1,
        group_best=1,
        is_wide=True,
    )
    return _latent(config, read_experts_in_groups(config, rule))


def mistral4(config: Mapping[str, Any]) -> LatentConfig:
    """Mistral Small 4 (text): DeepSeek's attention; queries grow with position; a softmax chooses experts."""
    text = text_keys(config)
    if not rotary_parameters(text):
        text = {**text, "rope_parameters": _MISTRAL4}
    num_groups = positive_int(text, "n_group", 1)
    rule = Routing(
        0,
        flag(text, "norm_topk_prob", True),
        positive_number(text, "routed_scaling_factor", 1.0),
        groups=num_groups,
        top_groups=positive_int(text, "topk_group", 1),
        is_wide=True,
    )
    fields = read_experts_in_groups({"n_shared_experts": 1, **text}, rule)
    return _latent(text, {**fields, "temperature": growing_queries(text)})


def mistral3(config: Mapping[str, Any]) -> DenseConfig:
    """Mistral Small 3 and 4, Ministral 3 and Devstral: one architecture, with several types of text model."""
    beside = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
    if text_keys(config).get("model_type") == "mistral4":
        return replace(mistral4(config), beside=beside)
    dense = replace(mistral(config), beside=beside)
    return replace(dense, vision=PixtralVision.read(config, dense.norm.eps)) if config.get("vision_config") else dense


# The default rotary parameters of Mistral Small 4.
_MISTRAL4 = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _latent(text: Mapping[str, Any], fields: Mapping[str, Any]) -> LatentConfig:
    """Parse the fields that the families share. `text`: the decoder's keys of config.json."""
    refuse_unless(text, "attention_bias", False)
    refuse_unless(text, "rope_interleave", True, None)
    nope_dim, rope_dim = positive_int(text, "qk_nope_head_dim"), positive_int(text, "qk_rope_head_dim")
    # `head_dim` is the rotated part of a head, so all of it is rotated.
    rule = read_rotary_rule(text)._replace(share=1.0)
    read = LatentConfig.read(
        {**text, "head_dim": rope_dim},
        rotary=(rule,),
        attention_scale=(nope_dim + rope_dim) ** -0.5 * _sharpened(text, rule),
        layers=(LayerKind(),) * positive_int(text, "num_hidden_layers"),
        q_rank=None if text.get("q_lora_rank") is None else positive_int(text, "q_lora_rank"),
        kv_rank=positive_int(text, "kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=positive_int(text, "v_head_dim"),
        **fields,
    )
    return replace(read, num_kv_heads=0)


def _sharpened(config: Mapping[str, Any], rule: RotaryRule) -> float:
    """Return YaRN's factor of scores, in addition to the factor in `rule` that scales queries and keys."""
    weight = number(rotary_parameters(config), "mscale_all_dim", 0.0)
    return sharpening(rule.values["factor"], weight) ** 2 if rule.rope_type == "yarn" and weight else 1.0
