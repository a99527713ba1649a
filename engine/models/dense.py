"""The plain decoder layer of Llama, Mistral and Qwen: these families differ in biases, head norms and windows alone."""

from dataclasses import dataclass

from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.models.decoder import Decoder, DecoderLayer, load_decoder
from engine.models.decoder_config import DecoderConfig
from engine.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(DecoderConfig):
    intermediate_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head, before they are rotated


def load(config: DenseConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm = config.hidden_size, config.norm

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=Attention.load(
                loader,
                f"{name}.self_attn",
                hidden,
                config.attention(i),
                qkv_bias=config.qkv_bias,
                o_bias=config.o_bias,
                qk_norm=norm if config.qk_norm else None,
            ),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=GatedMLP.load(loader, f"{name}.mlp", hidden, config.intermediate_size, config.mlp_bias),
        )

    return load_decoder(config, loader, context_length, layer)
