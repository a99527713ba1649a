"""DeepSeek-V3, Kimi K2 and K2.5's text as a table of parts: latent attention, a few dense layers, then experts with shared ones beside them.

Names of tensors: deepseek-ai/DeepSeek-V3's model.safetensors.index.json; of K2.5 the same behind "language_model.", beside a vision tower
(engine/vision/kimi_tower.py).
"""

from collections.abc import Callable

from pilotlight.engine.description.families.deepseek_v3_config import LatentConfig
from pilotlight.engine.description.grouped_moe import GroupedMoeConfig
from pilotlight.engine.description.tensor_sizes import GATED_PARTS
from pilotlight.engine.layers.latent_attention import LatentAttention
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.moe import Experts, SparseMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.routing import GroupedRouter
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, Part, load_decoder, root_of
from pilotlight.engine.models.mtp import MtpHead
from pilotlight.engine.vision.kimi_tower import PatchEncoder
from pilotlight.engine.weights.loader import WeightLoader


def load(config: LatentConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm = config.hidden_size, config.norm

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=LatentAttention.load(loader, f"{name}.self_attn", hidden, config.latent_attention(i)),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=load_feed_forward(config, loader, i, f"{name}.mlp"),
        )

    decoder = load_with_mtp(config, loader, context_length, layer)
    if config.vision is not None and decoder.embedding is not None and "mm_projector.pre_norm.weight" in loader:
        decoder.take_images(PatchEncoder(config.vision, loader.unshared(), hidden))
    else:
        loader.skip(r"(vision_tower|mm_projector)\..*")
    return decoder


def load_feed_forward(config: GroupedMoeConfig, loader: WeightLoader, layer: int, name: str) -> Part:
    hidden, experts, shared = config.hidden_size, config.experts, config.shared_size
    if layer < config.num_layers and layer not in config.sparse_layers:
        return GatedMLP.load(loader, name, hidden, config.intermediate_size)
    return SparseMLP(
        GroupedRouter.load(loader, f"{name}.gate", experts.num_experts, hidden, config.routing),
        Experts.load_each(loader, f"{name}.experts", experts, GATED_PARTS),
        GatedMLP.load(loader, f"{name}.shared_experts", hidden, shared) if shared else None,
    )


def load_with_mtp(
    config: GroupedMoeConfig, loader: WeightLoader, context_length: int, load_layer: Callable[[int, str], DecoderLayer]
) -> Decoder:
    """Load a decoder, and of the layers behind its last one, which predict further tokens, the one that drafts: the others stay unread."""
    decoder, first = load_decoder(config, loader, context_length, load_layer), config.num_layers
    if config.drafts_by_mtp:
        name = f"{root_of(loader)}layers.{first}"
        decoder.draft_by(MtpHead.load(config, loader, name, load_layer(first, name), decoder))
    for i in range(first + config.drafts_by_mtp, first + config.num_mtp_layers):
        loader.skip(rf"(language_model\.)?model\.layers\.{i}\..*")
    return decoder
