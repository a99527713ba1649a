"""Gemma 3 (text) as a table of parts: norms on both sides of attention and feed-forward, most layers looking through a
window and turning by a rotary base of their own."""

from pilotlight.engine.description.families.gemma3_config import Gemma3Config
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.encoder_attention import EncoderAttention
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, load_decoder
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.activation import gelu_tanh_and_mul


def load(config: Gemma3Config, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm, bias = config.hidden_size, config.norm, config.attention_bias
    kind = EncoderAttention if config.is_bidirectional else Attention

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=kind.load(
                loader, f"{name}.self_attn", hidden, config.attention(i), qkv_bias=bias, o_bias=bias, qk_norm=norm
            ),
            attention_output_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.pre_feedforward_layernorm", hidden, norm),
            feed_forward=GatedMLP.load(
                loader, f"{name}.mlp", hidden, config.intermediate_size, activation=gelu_tanh_and_mul
            ),
            feed_forward_output_norm=RMSNorm.load(loader, f"{name}.post_feedforward_layernorm", hidden, norm),
        )

    return load_decoder(config, loader, context_length, layer, embedding_scale=hidden**0.5)
