"""Llama 4 (text): some layers attend within chunks, others to everything.

Some have experts, others are dense. Names of tensors: meta-llama/Llama-4-Scout-17B-16E-Instruct's, as `transformers` 5 maps them. They have the
prefix "language_model.", and there is a vision tower beside them (engine/vision/llama4_tower.py). A layer's experts are in one tensor; quantizers
store them one by one.
"""

import torch

from pilotlight.engine.description.families.llama4_config import Llama4Config
from pilotlight.engine.description.tensor_sizes import GATED_PARTS
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.moe import InputScaledExperts, SparseMLP
from pilotlight.engine.layers.norm import HeadNorm, RMSNorm
from pilotlight.engine.layers.routing import SigmoidRouter
from pilotlight.engine.layers.temperature import Temperature
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, Part, load_decoder
from pilotlight.engine.vision.llama4_tower import TileEncoder
from pilotlight.engine.weights.loader import WeightLoader


def load(config: Llama4Config, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm, shape = config.hidden_size, config.norm, config.experts

    def feed_forward(i: int, name: str) -> Part:
        if i not in config.sparse_layers:
            return GatedMLP.load(loader, name, hidden, config.intermediate_size)
        return SparseMLP(
            SigmoidRouter(
                Linear.load(loader, [f"{name}.router"], [shape.num_experts], hidden, bias=False), config.top_k
            ),
            InputScaledExperts.load(loader, f"{name}.experts", shape, GATED_PARTS),
            GatedMLP.load(loader, f"{name}.shared_expert", hidden, shape.intermediate_size),
        )

    def attention(i: int, name: str) -> Attention:
        """Load attention; layers with rotation normalise rotated queries and keys, without weights."""
        made = Attention.load(
            loader, name, hidden, config.attention(i), qkv_bias=config.attention_bias, o_bias=config.attention_bias
        )
        if config.qk_norm and made.shape.rotary is not None:
            heads, kv_heads, head_dim = made.shape[:3]
            ones = torch.ones(heads + kv_heads, head_dim, dtype=loader.dtype, device=loader.device)
            made.qk_norm = HeadNorm(ones, norm.eps)
        return made

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=attention(i, f"{name}.self_attn"),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=feed_forward(i, f"{name}.feed_forward"),
        )

    temperature = config.temperature and Temperature(*config.temperature)
    decoder = load_decoder(config, loader, context_length, layer, temperature=temperature)
    if config.vision is not None and decoder.embedding is not None and "vision_model.class_embedding" in loader:
        decoder.take_images(TileEncoder(config.vision, loader.unshared(), hidden))
    elif config.vision is None or decoder.embedding is None:
        loader.skip(config.beside)
    return decoder
