"""Qwen 3's mixture of experts as a table of parts: Qwen 3's attention, and experts in most or all layers."""

from pilotlight.engine.description.families.qwen3_moe_config import Qwen3MoeConfig
from pilotlight.engine.description.tensor_sizes import GATED_PARTS
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.moe import Experts, SparseMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.routing import SoftmaxRouter
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, Part, load_decoder
from pilotlight.engine.weights.loader import WeightLoader


def load(config: Qwen3MoeConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm, bias = config.hidden_size, config.norm, config.attention_bias

    def feed_forward(i: int, name: str) -> Part:
        if i not in config.sparse_layers:
            return GatedMLP.load(loader, name, hidden, config.intermediate_size)
        return SparseMLP(
            SoftmaxRouter.load(
                loader, f"{name}.gate", config.experts.num_experts, hidden, config.top_k, renormalise=config.renormalise
            ),
            Experts.load_each(loader, f"{name}.experts", config.experts, GATED_PARTS),
        )

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=Attention.load(
                loader, f"{name}.self_attn", hidden, config.attention(i), qkv_bias=bias, o_bias=bias, qk_norm=norm
            ),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=feed_forward(i, f"{name}.mlp"),
        )

    return load_decoder(config, loader, context_length, layer)
