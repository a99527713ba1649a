"""The plain decoder layer of Llama, Mistral and Qwen: these families differ in biases, head norms and windows alone."""

from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, load_decoder
from pilotlight.engine.weights.loader import WeightLoader


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
