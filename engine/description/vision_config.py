"""Sizes and weights of vision towers: a transformer over patches, and the projections after it.

Every rank of the first pipeline stage has a whole tower.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.weights.config import flag, number, positive_int, positive_number, refuse_unless

# Bytes of memory for cached embeddings. In bf16 they suffice for one of Kimi K2.5's largest images, or for three images of Llama 4 Scout with 16
# tiles.
ENCODED_BYTES = 96 << 20
MOST_SOFT_TOKENS = 1120  # most embeddings of an image, as in Gemma 4's own processor
MOST_PATCHES = 16384  # most patches of an image, all of which are encoded together; the limit of Kimi's processor


class TiledVision(NamedTuple):
    """Llama 4's vision tower."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    side: int  # patches per row and column of a tile
    merge: int  # `merge` x `merge` patches become one embedding
    joined_size: int  # size after the first projection
    output_size: int  # size before the last projection
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode a tile."""
        return _encoding_bytes(self.side**2 + 1, self.hidden_size, self.intermediate_size, item_bytes)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "TiledVision":
        """Read vision_config. Raises CheckpointError."""
        refuse_unless(config, "hidden_act", "gelu")
        refuse_unless(config, "num_channels", 3)
        refuse_unless(config, "vision_feature_select_strategy", "default")
        refuse_unless(config, "multi_modal_projector_bias", False)
        hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
        patch = positive_int(config, "patch_size")
        merge = round(1 / positive_number(config, "pixel_shuffle_ratio", 0.5))
        inner = positive_int(config, "intermediate_size")
        joined, output = positive_int(config, "projector_input_dim"), positive_int(config, "vision_output_dim")
        side = positive_int(config, "image_size") // patch
        if hidden % (4 * heads) or side % merge or inner != hidden * merge**2:
            raise CheckpointError(
                f"config.json has a vision tower of hidden_size {hidden}, {heads} heads, intermediate_size {inner} and {side} patches in a row: "
                f"hidden_size must be a multiple of 4 times the heads, and intermediate_size the size of {merge} x {merge} patches"
            )
        rotary = config.get("rope_parameters") or config
        return cls(
            positive_int(config, "num_hidden_layers"), hidden, inner, heads, patch, side, merge, joined, output,
            positive_number(rotary, "rope_theta", 10_000.0),
        )  # fmt: skip

    def weights(self, decoder_size: int) -> list[WeightShape]:
        hidden, inner = self.hidden_size, self.intermediate_size
        tables = [
            ("class", hidden, 0),
            ("positions", self.side**2 + 1, hidden),
            ("patches", hidden, 3 * self.patch_size**2),
        ]
        projections = [("first", self.joined_size, inner), ("second", self.output_size, self.joined_size)]
        projections.append(("last", decoder_size, self.output_size))
        norms = [*_norm("first_norm", hidden), *_norm("last_norm", hidden)]
        return _shapes([*_layers(self.num_layers, hidden, inner), *tables, *norms, *projections])


class PatchedVision(NamedTuple):
    """Kimi K2.5's vision tower."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    positions: tuple[int, int]  # rows and columns of learned positions
    merge: int  # `merge` x `merge` patches become one embedding
    projection_eps: float
    theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode the largest image."""
        return _encoding_bytes(MOST_PATCHES, self.hidden_size, self.intermediate_size, item_bytes)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "PatchedVision":
        """Read vision_config, with the keys of Moonshot or of transformers. Raises CheckpointError."""
        refuse_unless(config, "mm_projector_type", "patchmerger")
        refuse_unless(config, "pos_emb_type", "divided_fixed")
        own = "vt_hidden_size" in config
        prefix, positions = ("vt_", "init_pos_emb") if own else ("", "pos_emb")
        hidden = positive_int(config, f"{prefix}hidden_size")
        heads = positive_int(config, f"{prefix}num_attention_heads")
        merge = config.get("merge_kernel_size") or (2, 2)
        if hidden % (4 * heads) or len(set(merge)) != 1:
            raise CheckpointError(
                f"config.json has a vision tower of hidden size {hidden}, {heads} heads and merge_kernel_size {merge!r}: "
                "the hidden size must divide by 4 times the heads, and patches are merged in squares"
            )
        return cls(
            positive_int(config, f"{prefix}num_hidden_layers"), hidden, positive_int(config, f"{prefix}intermediate_size"),
            heads, positive_int(config, "patch_size"),
            (positive_int(config, f"{positions}_height"), positive_int(config, f"{positions}_width")),
            int(merge[0]), number(config, "projector_ln_eps", 1e-5),
        )  # fmt: skip

    def weights(self, decoder_size: int) -> list[WeightShape]:
        hidden, inner, joined = self.hidden_size, self.intermediate_size, self.hidden_size * self.merge**2
        height, width = self.positions
        tables = [
            ("patches", hidden, 3 * self.patch_size**2),
            ("patches.bias", hidden, 0),
            ("positions", height * width, hidden),
        ]
        norms = [*_norm("last_norm", hidden), *_norm("projection_norm", hidden)]
        projections = [*_biased("first", joined, joined), *_biased("last", decoder_size, joined)]
        return _shapes([*_layers(self.num_layers, hidden, inner), *tables, *norms, *projections])


class GridVision(NamedTuple):
    """The vision tower of Qwen 2.5-VL, or of Qwen 3-VL and 3.5: patches of any image in rows and columns."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    moments: int  # number of video frames that are encoded together; an image is repeated this often
    merge: int  # `merge` x `merge` patches become one embedding
    is_gated: bool  # Qwen 2.5-VL's tower, with RMS norms, gated feed-forwards, windows and no learned positions
    window: int = 0  # side of a window in embeddings; in most layers, patches see only patches of their window
    full_layers: tuple[int, ...] = ()  # layers in which patches see all patches
    num_positions: int = 0  # learned positions, in a square; 0 for none
    deep_layers: tuple[
        int, ...
    ] = ()  # layers whose outputs are added to the hidden states of the decoder's first layers
    theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode the largest image."""
        inner = self.intermediate_size * (1 + self.is_gated)
        return _encoding_bytes(MOST_PATCHES, self.hidden_size, inner, item_bytes)

    @classmethod
    def read(cls, config: Mapping[str, Any], decoder_size: int, *, is_gated: bool) -> "GridVision":
        """Read vision_config, with the defaults of `transformers`. Raises CheckpointError."""
        refuse_unless(config, "hidden_act", "silu" if is_gated else "gelu_pytorch_tanh")
        refuse_unless(config, "in_channels", 3)
        hidden, heads = (
            positive_int(config, "hidden_size", 3584 if is_gated else 1152),
            positive_int(config, "num_heads", 16),
        )
        layers, merge = (
            positive_int(config, "depth", 32 if is_gated else 27),
            positive_int(config, "spatial_merge_size", 2),
        )
        patch = positive_int(config, "patch_size", 14 if is_gated else 16)
        window = positive_int(config, "window_size", 112) if is_gated else 0
        positions = 0 if is_gated else positive_int(config, "num_position_embeddings", 2304)
        output = positive_int(config, "out_hidden_size", 3584)
        if hidden % (4 * heads) or math.isqrt(positions) ** 2 != positions or output != decoder_size:
            raise CheckpointError(
                f"config.json has a vision tower of hidden size {hidden}, {heads} heads, {positions} positions and out_hidden_size {output}: heads "
                f"must be multiples of 4, positions a square, and the output as wide as the decoder, {decoder_size}"
            )
        full = config.get("fullatt_block_indexes", (7, 15, 23, 31)) if is_gated else ()
        return cls(
            layers, hidden, positive_int(config, "intermediate_size", 3420 if is_gated else 4304), heads, patch,
            positive_int(config, "temporal_patch_size", 2), merge, is_gated, window // merge // patch, tuple(full), positions,
            () if is_gated else tuple(config.get("deepstack_visual_indexes") or ()),
            positive_number(config.get("rope_parameters") or {}, "rope_theta", 10_000.0),
        )  # fmt: skip

    def weights(self, decoder_size: int) -> list[WeightShape]:
        hidden, inner, joined = self.hidden_size, self.intermediate_size, self.hidden_size * self.merge**2
        sizes: list[_Sizes] = [("patches", hidden, 3 * self.patch_size**2)]
        if not self.is_gated:
            sizes += [("patches.bias", hidden, 0), ("positions", self.num_positions, hidden)]
        sizes += _layers(self.num_layers, hidden, inner)
        if self.is_gated:
            sizes += [size for i in range(self.num_layers) for size in _biased(f"gate.{i}", inner, hidden)]
        for i in range(1 + len(self.deep_layers)):
            norm = joined if i else hidden
            sizes += [
                *_norm(f"merged_{i}", norm),
                *_biased(f"first.{i}", joined, joined),
                *_biased(f"last.{i}", decoder_size, joined),
            ]
        if self.is_gated:  # RMS norms have no bias
            sizes = [size for size in sizes if not size[0].endswith(".norm.bias")]
        return _shapes(sizes)


class PixtralVision(NamedTuple):
    """The vision tower of Mistral 3: patches of any image in rows and columns."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    merge: int  # `merge` x `merge` patches become one embedding
    activation: str
    has_bias: bool  # whether the projections after the tower have biases
    eps: float  # epsilon of the norm after the tower
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode the largest image."""
        return _encoding_bytes(MOST_PATCHES, self.hidden_size, 2 * self.intermediate_size, item_bytes)

    @classmethod
    def read(cls, config: Mapping[str, Any], decoder_eps: float) -> "PixtralVision":
        """Read a whole config.json, with the defaults of `transformers`. Raises CheckpointError."""
        vision = config["vision_config"]
        refuse_unless(config, "vision_feature_layer", -1)
        refuse_unless(config, "projector_hidden_act", "gelu")
        hidden, heads = positive_int(vision, "hidden_size", 1024), positive_int(vision, "num_attention_heads", 16)
        activation = vision.get("hidden_act", "gelu")
        if hidden % (4 * heads) or activation not in ("gelu", "silu"):
            raise CheckpointError(
                f"config.json has a vision tower of hidden size {hidden}, {heads} heads and hidden_act {activation!r}: "
                "heads must be multiples of 4, and the activation gelu or silu"
            )
        return cls(
            positive_int(vision, "num_hidden_layers", 24), hidden, positive_int(vision, "intermediate_size", 4096), heads,
            positive_int(vision, "patch_size", 16), positive_int(config, "spatial_merge_size", 2), activation,
            flag(config, "multimodal_projector_bias", False), decoder_eps,
            positive_number(vision.get("rope_parameters") or vision, "rope_theta", 10_000.0),
        )  # fmt: skip

    def weights(self, decoder_size: int) -> list[WeightShape]:
        hidden, inner = self.hidden_size, self.intermediate_size
        sizes: list[_Sizes] = [("patches", hidden, 3 * self.patch_size**2), ("first_norm", hidden, 0)]
        sizes += [size for size in _layers(self.num_layers, hidden, inner) if not size[0].endswith(".bias")]
        sizes += [(f"gate.{i}", inner, hidden) for i in range(self.num_layers)]
        sizes += [("last_norm", hidden, 0), ("joined", hidden, hidden * self.merge**2)]
        for name, columns in (("first", hidden), ("last", decoder_size)):
            sizes += _biased(name, decoder_size, columns) if self.has_bias else [(name, decoder_size, columns)]
        return _shapes(sizes)


class GlmVision(NamedTuple):
    """The vision tower of GLM-4.1V, 4.5V and 4.6V: patches of any image in rows and columns."""

    num_layers: int
    hidden_size: int
    merger_size: int  # inner size of the projection after the tower
    num_heads: int
    patch_size: int
    moments: int  # number of video frames that are encoded together; an image is repeated this often
    merge: int  # `merge` x `merge` patches become one embedding
    output_size: int  # size of embeddings, and inner size of the layers' feed-forwards
    num_positions: int  # learned positions, in a square
    has_bias: bool  # whether queries, keys and values have biases
    eps: float
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode the largest image."""
        return _encoding_bytes(MOST_PATCHES, self.hidden_size, 2 * self.output_size, item_bytes)

    @classmethod
    def read(cls, config: Mapping[str, Any], decoder_size: int) -> "GlmVision":
        """Read vision_config, with the defaults of `transformers`. Raises CheckpointError."""
        refuse_unless(config, "hidden_act", "silu")
        refuse_unless(config, "in_channels", 3)
        hidden, heads = positive_int(config, "hidden_size", 1536), positive_int(config, "num_heads", 12)
        patch, output = positive_int(config, "patch_size", 14), positive_int(config, "out_hidden_size", 4096)
        if hidden % (4 * heads) or output != decoder_size:
            raise CheckpointError(
                f"config.json has a vision tower of hidden size {hidden}, {heads} heads and out_hidden_size {output}: heads must be multiples of 4, "
                f"and the output as wide as the decoder, {decoder_size}"
            )
        return cls(
            positive_int(config, "depth", 24), hidden, positive_int(config, "intermediate_size", 13696), heads, patch,
            positive_int(config, "temporal_patch_size", 2), positive_int(config, "spatial_merge_size", 2), output,
            (positive_int(config, "image_size", 336) // patch) ** 2, flag(config, "attention_bias", False),
            number(config, "rms_norm_eps", 1e-5), positive_number(config.get("rope_parameters") or {}, "rope_theta", 10_000.0),
        )  # fmt: skip

    def weights(self, decoder_size: int) -> list[WeightShape]:
        hidden, output, inner = self.hidden_size, self.output_size, self.merger_size
        sizes = [*_biased("patches", hidden, 3 * self.patch_size**2), ("positions", self.num_positions, hidden)]
        layers = [size for size in _layers(self.num_layers, hidden, output) if not size[0].endswith(".bias")]
        sizes += [*layers, *((f"gate.{i}", output, hidden) for i in range(self.num_layers))]
        if self.has_bias:
            sizes += [(f"qkv.{i}.bias", 3 * hidden, 0) for i in range(self.num_layers)]
        sizes += [
            ("first_norm", hidden, 0),
            ("last_norm", hidden, 0),
            *_biased("joined", output, hidden * self.merge**2),
        ]
        sizes += [("first", output, output), *_norm("projection_norm", output)]
        return _shapes([*sizes, ("gate", inner, output), ("up", inner, output), ("last", output, inner)])


class SiglipVision(NamedTuple):
    """Gemma 3's vision tower, SigLIP: the patches of a square image of one size."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    side: int  # patches per row and column of an image
    merge: int  # the mean of `merge` x `merge` patches becomes one embedding
    eps: float

    @property
    def num_tokens(self) -> int:
        """The number of an image's embeddings."""
        return (self.side // self.merge) ** 2

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode an image."""
        return _encoding_bytes(self.side**2, self.hidden_size, self.intermediate_size, item_bytes)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "SiglipVision":
        """Read a whole config.json, with the defaults of `transformers`. Raises CheckpointError."""
        vision = config["vision_config"]
        refuse_unless(vision, "model_type", "siglip_vision_model")
        refuse_unless(vision, "hidden_act", "gelu_pytorch_tanh")
        refuse_unless(vision, "num_channels", 3)
        hidden, heads = positive_int(vision, "hidden_size", 768), positive_int(vision, "num_attention_heads", 12)
        patch, tokens = positive_int(vision, "patch_size", 16), positive_int(config, "mm_tokens_per_image", 256)
        side, embeddings = positive_int(vision, "image_size", 224) // patch, math.isqrt(tokens)
        if hidden % heads or embeddings**2 != tokens or not side or side % embeddings:
            raise CheckpointError(
                f"config.json has a vision tower of hidden size {hidden}, {heads} heads, {side} patches in a row and mm_tokens_per_image {tokens}: "
                "the heads must divide the hidden size, and the tokens must be a square whose side divides the patches in a row"
            )
        return cls(
            positive_int(vision, "num_hidden_layers", 12), hidden, positive_int(vision, "intermediate_size", 3072), heads, patch, side,
            side // embeddings, number(vision, "layer_norm_eps", 1e-6),
        )  # fmt: skip

    def weights(self, decoder_size: int) -> list[WeightShape]:
        hidden = self.hidden_size
        sizes = [*_biased("patches", hidden, 3 * self.patch_size**2), ("positions", self.side**2, hidden)]
        sizes += [*_layers(self.num_layers, hidden, self.intermediate_size), *_norm("last_norm", hidden)]
        return _shapes([*sizes, ("projection_norm", hidden, 0), ("projection", decoder_size, hidden)])


class Gemma4Vision(NamedTuple):
    """Gemma 4's vision tower: patches of any image in rows and columns."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    patch_size: int
    merge: int  # the mean of `merge` x `merge` patches becomes one embedding
    num_positions: int  # learned positions of rows, and as many of columns
    is_clipped: bool  # inputs and outputs of projections are clipped to bounds from the checkpoint
    is_standardized: bool  # embeddings are shifted and scaled before the projection
    eps: float
    theta: float

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode the largest image."""
        width = max(self.hidden_size, self.num_heads * self.head_dim)
        return _encoding_bytes(MOST_SOFT_TOKENS * self.merge**2, width, 2 * self.intermediate_size, item_bytes)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Gemma4Vision":
        """Read vision_config, with the defaults of `transformers`. Raises CheckpointError."""
        refuse_unless(config, "model_type", "gemma4_vision")
        refuse_unless(config, "hidden_activation", "gelu_pytorch_tanh")
        refuse_unless(config, "attention_bias", False, None)
        heads, head_dim = positive_int(config, "num_attention_heads", 12), positive_int(config, "head_dim", 64)
        refuse_unless({"num_key_value_heads": heads, **config}, "num_key_value_heads", heads)
        if head_dim % 4:
            raise CheckpointError(
                f"config.json has a vision tower with head_dim {head_dim}; it must be a multiple of 4"
            )
        rotary = config.get("rope_parameters") or {}
        refuse_unless(rotary, "rope_type", "axial")
        return cls(
            positive_int(config, "num_hidden_layers", 16), positive_int(config, "hidden_size", 768),
            positive_int(config, "intermediate_size", 3072), heads, head_dim, positive_int(config, "patch_size", 16),
            positive_int(config, "pooling_kernel_size", 3), positive_int(config, "position_embedding_size", 10_240),
            flag(config, "use_clipped_linears", False), flag(config, "standardize", False), number(config, "rms_norm_eps", 1e-6),
            positive_number(rotary, "rope_theta", 100.0),
        )  # fmt: skip

    def weights(self, decoder_size: int) -> list[WeightShape]:
        hidden, inner, width = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        sizes: list[_Sizes] = [
            ("patches", hidden, 3 * self.patch_size**2),
            ("positions", 2 * self.num_positions, hidden),
        ]
        for i in range(self.num_layers):
            sizes += [(f"qkv.{i}", 3 * width, hidden), (f"o.{i}", hidden, width)]
            sizes += [
                (f"gate_up.{i}", 2 * inner, hidden),
                (f"down.{i}", hidden, inner),
                (f"qk_norms.{i}", 2 * self.head_dim, 0),
            ]
            sizes += [(f"norm_{j}.{i}", hidden, 0) for j in range(4)]
            sizes += [(f"bounds_{j}.{i}", 4, 0) for j in range(7 * self.is_clipped)]
        sizes += [(name, hidden, 0) for name in ("bias", "scale") if self.is_standardized]
        return _shapes([*sizes, ("projection", decoder_size, hidden)])


class VisionShape(Protocol):
    """The sizes of a vision tower that a memory plan needs."""

    def encoding_bytes(self, item_bytes: int) -> int:
        """Return the bytes of temporary memory to encode the largest image, or a tile of it."""

    def weights(self, decoder_size: int) -> list[WeightShape]:
        """Return the tensors of the tower and its projections to a decoder of this hidden size."""


def _encoding_bytes(patches: int, hidden: int, inner: int, item_bytes: int) -> int:
    """Return the bytes for hidden states, their sum and norm, and the intermediate values that take most.

    The latter are either queries, keys and values, with copies during rotation, or two tensors of the feed-forward's inner size.
    """
    widest = max(item_bytes * 5 * hidden + 2 * 4 * hidden, item_bytes * 2 * inner)
    return patches * (item_bytes * 3 * hidden + widest)


_Sizes = tuple[str, int, int]


def _layers(num_layers: int, hidden: int, inner: int) -> Iterator[_Sizes]:
    for i in range(num_layers):
        for name, rows, columns in (
            ("qkv", 3 * hidden, hidden),
            ("o", hidden, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            yield from _biased(f"{name}.{i}", rows, columns)
        for name in ("first", "second"):
            yield from _norm(f"{name}.{i}", hidden)


def _biased(name: str, rows: int, columns: int) -> list[_Sizes]:
    return [(name, rows, columns), (f"{name}.bias", rows, 0)]


def _norm(name: str, size: int) -> list[_Sizes]:
    return [(f"{name}.norm", size, 0), (f"{name}.norm.bias", size, 0)]


def _shapes(sizes: Sequence[_Sizes]) -> list[WeightShape]:
    return [WeightShape("vision", f"vision_tower.{name}", rows, columns) for name, rows, columns in sizes]
