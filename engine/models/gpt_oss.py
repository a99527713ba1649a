"""gpt-oss: attention with sinks, a window in every second layer, experts with biases and clamps.

Weights of experts are plain or in MXFP4, with those of all experts in one tensor; in GGUF files (engine/gguf) each expert has its own matrices.
"""

from functools import partial

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.families.gpt_oss_config import GptOssConfig
from pilotlight.engine.description.tensor_sizes import GATED_PARTS
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.moe import Experts, SparseMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.routing import SoftmaxRouter
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, load_decoder
from pilotlight.engine.weights.formats.format import FLOATS
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.stored_tensor import ExpectedTensor
from pilotlight.kernels.elementwise.activation import clamped_swiglu


def load(config: GptOssConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm, bias = config.hidden_size, config.norm, config.attention_bias

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=Attention.load(
                loader, f"{name}.self_attn", hidden, config.attention(i), qkv_bias=bias, o_bias=bias
            ),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=SparseMLP(
                SoftmaxRouter.load(
                    loader,
                    f"{name}.mlp.router",
                    config.experts.num_experts,
                    hidden,
                    config.top_k,
                    renormalise=True,
                    bias=True,
                ),
                _load_experts(config, loader, f"{name}.mlp.experts"),
            ),
        )

    return load_decoder(config, loader, context_length, layer)


def _load_experts(config: GptOssConfig, loader: WeightLoader, name: str) -> Experts:
    experts, hidden, intermediate = config.experts
    activation = partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    if f"{name}.gate_proj_bias" in loader:  # a GGUF file
        if loader.shard.experts is not None:
            raise CheckpointError(
                f"{name} has biases of all experts in one tensor, which ranks can only share in parts: unset expert_parallel"
            )
        each = Experts.load_each(loader, name, config.experts, GATED_PARTS)
        gate_up, down = each.gate_up, each.down
    else:  # rows of gate and up alternate
        gate_up = loader.stack(f"{name}.gate_up_proj", experts, 2 * intermediate, hidden, split="rows", are_pairs=True)
        down = loader.stack(f"{name}.down_proj", experts, hidden, intermediate, split="columns")
    return Experts(gate_up, down, activation, *_load_biases(config, loader, name))


def _load_biases(config: GptOssConfig, loader: WeightLoader, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Load the biases of gate and up, and of down."""
    experts, hidden, intermediate = config.experts
    rows = loader.shard.span(2 * intermediate, 2, name)
    gate_up = loader.empty(f"{name}.gate_up_proj_bias", experts, rows.size)
    of_both = torch.unflatten(gate_up, 1, (2, -1))
    parts = [f"{name}.{part}_proj_bias" for part in ("gate", "up")]
    if parts[0] in loader:
        stored = [ExpectedTensor.of(part, (experts, rows.over(2)), FLOATS) for part in parts]
        loader.fill(of_both, stored, lambda into, *both: into.copy_(torch.stack(both, 1)))
    else:
        loader.fill(
            of_both.transpose(1, 2),
            [ExpectedTensor.of(f"{name}.gate_up_proj_bias", (experts, rows), FLOATS)],
            lambda part, stored: part.copy_(torch.unflatten(stored, 1, part.shape[1:])),
        )
    if loader.shard.rank:
        loader.skip_tensors(
            [f"{name}.down_proj_bias"]
        )  # the ranks' products are summed, so only the first rank adds the bias
        return gate_up, None
    return gate_up, loader.tensor(f"{name}.down_proj_bias", experts, hidden)
