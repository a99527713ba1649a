"""Shapes of layers that mix tokens by a recurrent state: their tensors, and the state of a sequence."""

from typing import NamedTuple

from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.kv.pool.layout import CacheSegment


class ShortConvShape(NamedTuple):
    """A gated convolution over the last tokens (LFM2, arXiv 2511.23404, section 2)."""

    name: str  # name of the mixer in the names of its tensors, after the layer's name
    layer: int  # index of the layer's cache among the caches of the model
    channels: int
    width: int  # number of tokens on which an output depends
    is_biased: bool = False

    @property
    def segments(self) -> tuple[CacheSegment, ...]:
        return (conv_segment(self.channels, self.width),)

    def weights(self, layer_name: str, hidden_size: int) -> list[WeightShape]:
        name = f"{layer_name}.{self.name}"
        return [
            *_projection(f"{name}.in_proj", 3 * self.channels, hidden_size, self.is_biased),
            *_convolution(f"{name}.conv", self.channels, self.width, self.is_biased),
            *_projection(f"{name}.out_proj", hidden_size, self.channels, self.is_biased),
        ]


class DeltaShape(NamedTuple):
    """A short convolution, then the gated delta rule (Qwen3-Next, Qwen3.5)."""

    name: str
    layer: int
    key_heads: int  # number of query and key heads; each is shared by value_heads / key_heads value heads
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float  # epsilon of the norm after the delta rule
    is_grouped: bool  # rows of projections are ordered by key head in the checkpoint, each with its value heads

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The number of the convolution's channels: a token's queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def projections(self) -> dict[str, int]:
        """The number of rows of each matrix that projects the hidden states, by its name."""
        if self.is_grouped:
            return {"in_proj_qkvz": self.channels + self.value_size, "in_proj_ba": 2 * self.value_heads}
        return {
            "in_proj_qkv": self.channels,
            "in_proj_z": self.value_size,
            "in_proj_b": self.value_heads,
            "in_proj_a": self.value_heads,
        }

    @property
    def segments(self) -> tuple[CacheSegment, ...]:
        matrix = CacheSegment("delta", self.value_heads, self.key_dim * self.value_dim, is_wide=True)
        return matrix, conv_segment(self.channels, self.width)

    def weights(self, layer_name: str, hidden_size: int) -> list[WeightShape]:
        name = f"{layer_name}.{self.name}"
        found = []
        for part, rows in self.projections.items():
            found += _projection(f"{name}.{part}", rows, hidden_size)
        return [
            *found,
            *_convolution(f"{name}.conv1d", self.channels, self.width, is_biased=False),
            WeightShape("attention", f"{name}.A_log", self.value_heads, is_wide=True),
            WeightShape("attention", f"{name}.dt_bias", self.value_heads, is_wide=True),
            WeightShape("norms", f"{name}.norm.weight", self.value_dim),
            *_projection(f"{name}.out_proj", hidden_size, self.value_size),
        ]


class KimiDeltaShape(NamedTuple):
    """A short convolution, then the gated delta rule with a decay for each row of a state (Kimi Linear)."""

    name: str
    layer: int
    heads: int
    dim: int  # size of a head's query, key and value
    width: int
    eps: float

    @property
    def size(self) -> int:
        return self.heads * self.dim

    @property
    def segments(self) -> tuple[CacheSegment, ...]:
        matrix = CacheSegment("delta", self.heads, self.dim * self.dim, is_wide=True)
        return matrix, conv_segment(3 * self.size, self.width)

    def weights(self, layer_name: str, hidden_size: int) -> list[WeightShape]:
        name, size, dim = f"{layer_name}.{self.name}", self.size, self.dim
        rows = {"q": size, "k": size, "v": size, "b": self.heads, "f_a": dim, "g_a": dim}
        found = [WeightShape("attention", f"{name}.{part}_proj", n, hidden_size) for part, n in rows.items()]
        found += [WeightShape("attention", f"{name}.{part}_b_proj", size, dim) for part in "fg"]
        for part in "qkv":
            found += _convolution(f"{name}.{part}_conv1d", size, self.width, is_biased=False)
        return [
            *found,
            WeightShape("attention", f"{name}.A_log", self.heads, is_wide=True),
            WeightShape("attention", f"{name}.dt_bias", size, is_wide=True),
            WeightShape("norms", f"{name}.o_norm.weight", dim),
            WeightShape("attention", f"{name}.o_proj", hidden_size, size),
        ]


class MambaShape(NamedTuple):
    """A Mamba-2 layer (arXiv 2405.21060)."""

    name: str
    layer: int
    heads: int
    head_dim: int
    state: int  # size of the state: [state, head_dim] numbers per head
    groups: int  # number of groups; heads of a group share B and C, and are normalised together
    width: int
    eps: float
    has_conv_bias: bool
    is_biased: bool
    has_norm: bool = True  # False if the output has a gate, but no norm
    gates_first: bool = True  # the gate comes before the norm
    scales: tuple[float, ...] = ()  # factors of the projected gates, inputs, B, C and steps; empty if all are 1

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The number of the convolution's channels: the inputs of all heads, and B and C of each group."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        return self.inner + self.channels + self.heads

    @property
    def segments(self) -> tuple[CacheSegment, ...]:
        matrix = CacheSegment("mamba", self.heads, self.state * self.head_dim, is_wide=True)
        return matrix, conv_segment(self.channels, self.width)

    def weights(self, layer_name: str, hidden_size: int) -> list[WeightShape]:
        name = f"{layer_name}.{self.name}"
        of_heads = [
            WeightShape("attention", f"{name}.{one}", self.heads, is_wide=True) for one in ("A_log", "dt_bias", "D")
        ]
        return [
            *_projection(f"{name}.in_proj", self.projected, hidden_size, self.is_biased),
            *_convolution(f"{name}.conv1d", self.channels, self.width, self.has_conv_bias),
            *of_heads,
            *([WeightShape("norms", f"{name}.norm.weight", self.inner)] if self.has_norm else []),
            *_projection(f"{name}.out_proj", hidden_size, self.inner, self.is_biased),
        ]


RecurrentShape = ShortConvShape | DeltaShape | KimiDeltaShape | MambaShape


def conv_segment(channels: int, width: int) -> CacheSegment:
    """Return the cache segment of a convolution: its inputs for the last width - 1 tokens."""
    return CacheSegment("conv", 1, (width - 1) * channels)


def _projection(name: str, rows: int, columns: int, is_biased: bool = False) -> list[WeightShape]:
    found = [WeightShape("attention", name, rows, columns)]
    return [*found, WeightShape("attention", f"{name}.bias", rows)] if is_biased else found


def _convolution(name: str, channels: int, width: int, is_biased: bool) -> list[WeightShape]:
    found = [WeightShape("attention", f"{name}.weight", channels * width)]
    return [*found, WeightShape("attention", f"{name}.bias", channels)] if is_biased else found
