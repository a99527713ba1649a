"""Mixtral as a table of parts: Mistral's attention, and experts in every layer."""

from pilotlight.engine.description.families.mixtral_config import EXPERT_PARTS, MixtralConfig
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.moe import Experts, SparseMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.routing import SoftmaxRouter
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, load_decoder
from pilotlight.engine.weights.loader import WeightLoader


def load(config: MixtralConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm = config.hidden_size, config.norm

    def layer(i: int, name: str) -> DecoderLayer:
        sparse = f"{name}.block_sparse_moe"
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=Attention.load(loader, f"{name}.self_attn", hidden, config.attention(i)),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=SparseMLP(
                SoftmaxRouter.load(
                    loader, f"{sparse}.gate", config.experts.num_experts, hidden, config.top_k, renormalise=True
                ),
                Experts.load_each(loader, f"{sparse}.experts", config.experts, EXPERT_PARTS),
            ),
        )

    return load_decoder(config, loader, context_length, layer)
