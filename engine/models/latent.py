"""Decoders with latent attention, of the families of families/latent_decoders.py.

Names of tensors: deepseek-ai/DeepSeek-V3's model.safetensors.index.json; K2.5's have the prefix "language_model.", and there is a vision tower beside
them (engine/vision/kimi_tower.py).
"""

from pilotlight.engine.description.families.latent_decoders import LatentConfig
from pilotlight.engine.layers.mla.latent_attention import LatentAttention
from pilotlight.engine.layers.recurrent import load_recurrent
from pilotlight.engine.models.decoder import Decoder, Part
from pilotlight.engine.models.dense import load_layers
from pilotlight.engine.vision.kimi_tower import PatchEncoder
from pilotlight.engine.weights.loader import WeightLoader


def load(config: LatentConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden = config.hidden_size

    def attention(i: int, name: str) -> Part:
        if (mixer := config.mixer(i) if i < config.num_layers else None) is not None:
            return load_recurrent(loader, name, hidden, mixer)
        return LatentAttention.load(loader, f"{name}.self_attn", hidden, config.latent_attention(i))

    decoder = load_layers(config, loader, context_length, attention)
    if config.vision is not None and decoder.embedding is not None and "mm_projector.pre_norm.weight" in loader:
        decoder.take_images(PatchEncoder(config.vision, loader.unshared(), hidden))
    else:
        loader.skip(r"(model\.)?(vision_tower|mm_projector|multi_modal_projector)\..*")
    return decoder
