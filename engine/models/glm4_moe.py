"""GLM-4.5, 4.6 and 4.7 as a table of parts: attention of whose heads a part turns, and DeepSeek-V3's experts, called alike."""

from pilotlight.engine.description.families.glm4_moe_config import Glm4MoeConfig
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.partial_attention import PartialAttention
from pilotlight.engine.models.decoder import Decoder, DecoderLayer
from pilotlight.engine.models.deepseek_v3 import load_feed_forward, load_with_mtp
from pilotlight.engine.weights.loader import WeightLoader


def load(config: Glm4MoeConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm = config.hidden_size, config.norm

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=PartialAttention.load(
                loader,
                f"{name}.self_attn",
                hidden,
                config.attention(min(i, config.num_layers - 1))._replace(layer=i),
                qkv_bias=config.attention_bias,
                qk_norm=norm if config.qk_norm else None,
            ),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=load_feed_forward(config, loader, i, f"{name}.mlp"),
        )

    return load_with_mtp(config, loader, context_length, layer)
