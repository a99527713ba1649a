"""A decoder loaded as its config describes it: attention, feed-forwards or experts, and norms.

Nothing here is specific to a family: the fields of DenseConfig, SparseConfig and LatentConfig describe each family. Names of tensors of latent
attention: deepseek-ai/DeepSeek-V3's model.safetensors.index.json; K2.5's have the prefix "language_model.".
"""

import re
from collections.abc import Callable
from functools import partial

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.latent_decoders import LatentConfig
from pilotlight.engine.description.sparse_config import SparseConfig
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.encoder_attention import EncoderAttention
from pilotlight.engine.layers.layer_inputs import LayerInputGate, LayerInputs
from pilotlight.engine.layers.mla.latent_attention import LatentAttention
from pilotlight.engine.layers.mlp import GatedMLP, Xielu, scaled_silu_and_mul
from pilotlight.engine.layers.moe import ParallelFeedForward, SparseMLP
from pilotlight.engine.layers.norm import Norm, RMSNorm, load_norm
from pilotlight.engine.layers.recurrent import JoinedMixers, load_recurrent
from pilotlight.engine.layers.temperature import Temperature
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, LogitRule, Part, load_decoder, root_of
from pilotlight.engine.models.mtp import MtpHead
from pilotlight.engine.vision.encoders import load_tower
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.activation import gelu_tanh_and_mul, relu2, silu_and_mul
from pilotlight.kernels.matrices.weight import GatedActivation

_ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "relu2": relu2}

LoadAttention = Callable[[int, str], Part]


def load(config: DenseConfig, loader: WeightLoader, context_length: int) -> Decoder:
    kind = config.norm
    attention_kind = EncoderAttention if config.is_bidirectional else Attention

    def mixer_of(i: int, name: str) -> Part:
        mixer = config.mixer(i) if i < config.num_layers else None
        if mixer is not None and config.joined is None:
            return load_recurrent(loader, name, config.hidden_size, mixer)
        if isinstance(config, LatentConfig):
            return LatentAttention.load(loader, f"{name}.self_attn", config.hidden_size, config.latent_attention(i))
        # The drafting layer follows the model's last layer, and has the same shape.
        is_behind, last = i >= config.num_layers, config.num_layers - 1
        shape = config.attention(last)._replace(layer=i) if is_behind else config.attention(i)
        attention = attention_kind.load(
            loader,
            f"{name}.self_attn",
            config.hidden_size,
            shape,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=kind if config.qk_norm else None,
            joint_norm=kind if config.joint_qk_norm else None,
            sinks=config.sinks_name,
        )
        if mixer is None or config.joined is None:
            return attention
        assert isinstance(attention, Attention), "an encoder has no recurrent mixers"
        return JoinedMixers(attention, load_recurrent(loader, name, config.hidden_size, mixer), config.joined)

    decoder = load_layers(config, loader, context_length, mixer_of)
    tower = load_tower(config.vision, loader.unshared(), config.hidden_size) if decoder.embedding is not None else None
    if tower is not None:
        if len(decoder.layers) < tower.num_deep:
            raise CheckpointError(
                f"the first stage has {len(decoder.layers)} layers, but embeddings of images are added after the first "
                f"{tower.num_deep}: use fewer stages"
            )
        decoder.take_images(tower)
    if tower is not None or config.vision is None or decoder.embedding is None:  # else a tensor of the tower is missing
        loader.skip(config.beside)
    loader.skip(r"mtp\..*")  # layers that predict further tokens, which are not used
    return decoder


def load_layers(
    config: DenseConfig, loader: WeightLoader, context_length: int, load_attention: LoadAttention
) -> Decoder:
    """Load a decoder and, if the config requests it, the layer that drafts.

    After the model's last layer a checkpoint may have layers that predict further tokens. The first of them drafts; others are skipped.
    `load_attention(i, name)` makes the token mixer of the layer whose tensor names start with `name`.
    """

    def norm(name: str, part: str | None) -> Norm | None:
        return None if part is None else load_norm(loader, f"{name}.{part}", config.hidden_size, config.norm)

    def layer(i: int, name: str) -> DecoderLayer:
        names, mixes, feeds = config.norms, config.has(i, "mixer"), config.has(i, "feed_forward")
        return DecoderLayer(
            attention_norm=norm(name, names.before_attention) if mixes else None,
            attention=load_attention(i, name) if mixes else None,
            attention_output_norm=norm(name, names.after_attention),
            feed_forward_norm=norm(name, names.before_feed_forward) if feeds else None,
            feed_forward=_load_feed_forward(config, loader, i, name) if feeds else None,
            feed_forward_output_norm=norm(name, names.after_feed_forward),
            residual_scale=config.residual_scale,
            input_gate=_load_input_gate(config, loader, i, name),
            is_parallel=config.is_parallel,
            scale=loader.tensor(f"{name}.layer_scalar", 1) if config.scales_layers else None,
        )

    temperature = config.temperature and Temperature(*config.temperature)
    logit_rule = LogitRule(config.logit_scale, config.logit_cap)
    decoder = load_decoder(config, loader, context_length, layer, config.embedding_scale, temperature, logit_rule)
    if (inputs := config.layer_inputs) is not None:
        sizes = config.hidden_size, config.num_layers
        decoder.feed_layers(LayerInputs.load(loader, root_of(loader), *sizes, inputs, config.norm))
    if isinstance(config, SparseConfig):
        first = config.num_layers
        if config.drafts_by_mtp:
            name = f"{root_of(loader)}layers.{first}"
            decoder.draft_by(MtpHead.load(config, loader, name, layer(first, name), decoder))
        for i in range(first + config.drafts_by_mtp, first + config.num_mtp_layers):
            loader.skip(rf"{re.escape(root_of(loader))}layers\.{i}\..*")
    return decoder


def _load_feed_forward(config: DenseConfig, loader: WeightLoader, layer: int, name: str) -> Part:
    is_behind = layer >= config.num_layers  # the drafting layer
    activation: GatedActivation = (
        Xielu.load(loader, f"{name}.mlp.act_fn") if config.activation == "xielu" else _ACTIVATIONS[config.activation]
    )
    if config.feed_forward_scales != (1.0, 1.0):
        gate_scale, scale = config.feed_forward_scales
        activation = partial(scaled_silu_and_mul, gate_scale=gate_scale, scale=scale)

    def dense() -> GatedMLP:
        sizes = config.hidden_size, config.inner_size(layer)
        return GatedMLP.load(loader, f"{name}.mlp", *sizes, config.mlp_bias, activation)

    if isinstance(config, SparseConfig) and (is_behind or layer in config.sparse_layers):
        mlp = config.sparse.names.inside(name)
        sparse = SparseMLP.load(loader, mlp, config.hidden_size, config.sparse, activation)
        if (names := config.sparse.parallel) is None:
            return sparse
        norms = [RMSNorm.load(loader, f"{name}.{part}", config.hidden_size, config.norm) for part in names]
        return ParallelFeedForward(dense(), sparse, norms[:2], norms[2:])
    return dense()


def _load_input_gate(config: DenseConfig, loader: WeightLoader, layer: int, name: str) -> LayerInputGate | None:
    if config.layer_inputs is None:
        return None
    activation = _ACTIVATIONS[config.activation]
    sizes = config.hidden_size, layer, config.layer_inputs.size
    return LayerInputGate.load(loader, name, *sizes, config.norm, activation)
