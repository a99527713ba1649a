"""Shapes of layers that mix tokens by a recurrent state: their tensors, and the state of a sequence."""

from typing import NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.tensor_sizes import WeightShape, summed
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
            *summed("attention", f"{name}.out_proj", hidden_size, self.channels, bias=self.is_biased),
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
    is_tiled: bool = (
        False  # value head i shares key head i % key_heads, as in GGUF files, and not its neighbours' key head
    )

    def part_of(self, ranks: int) -> "DeltaShape":
        """Return one rank's part. Raises CheckpointError if ranks cannot share the key heads."""
        if self.key_heads % ranks:
            raise _unshared(f"{self.key_heads} key heads", ranks)
        if self.is_tiled and ranks > 1:
            raise _unshared("value heads in llama.cpp's order", ranks)
        return self._replace(key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

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
            _of_heads(f"{name}.A_log", self.value_heads),
            _of_heads(f"{name}.dt_bias", self.value_heads),
            WeightShape("norms", f"{name}.norm.weight", self.value_dim),
            *summed("attention", f"{name}.out_proj", hidden_size, self.value_size),
        ]


class KimiDeltaShape(NamedTuple):
    """A short convolution, then the gated delta rule with a decay for each row of a state (Kimi Linear)."""

    name: str
    layer: int
    heads: int
    dim: int  # size of a head's query, key and value
    width: int
    eps: float

    def part_of(self, ranks: int) -> "KimiDeltaShape":
        """Return one rank's part. Raises CheckpointError if ranks cannot share the heads."""
        if self.heads % ranks:
            raise _unshared(f"{self.heads} heads", ranks)
        return self._replace(heads=self.heads // ranks)

    @property
    def size(self) -> int:
        return self.heads * self.dim

    @property
    def segments(self) -> tuple[CacheSegment, ...]:
        matrix = CacheSegment("delta", self.heads, self.dim * self.dim, is_wide=True)
        return matrix, conv_segment(3 * self.size, self.width)

    def weights(self, layer_name: str, hidden_size: int) -> list[WeightShape]:
        name, size, dim = f"{layer_name}.{self.name}", self.size, self.dim
        rows = {"q": size, "k": size, "v": size, "b": self.heads}
        found = [WeightShape("attention", f"{name}.{part}_proj", n, hidden_size, "rows") for part, n in rows.items()]
        for part in "fg":
            found.append(WeightShape("attention", f"{name}.{part}_a_proj", dim, hidden_size))
            found.append(WeightShape("attention", f"{name}.{part}_b_proj", size, dim, "rows"))
        for part in "qkv":
            found += _convolution(f"{name}.{part}_conv1d", size, self.width, is_biased=False)
        return [
            *found,
            WeightShape("attention", f"{name}.A_log", self.heads, is_wide=True),
            _of_heads(f"{name}.dt_bias", size),
            WeightShape("norms", f"{name}.o_norm.weight", dim),
            *summed("attention", f"{name}.o_proj", hidden_size, size),
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
    is_norm_shared: bool = False  # ranks share the heads of the only group, and normalise them together
    scales: tuple[float, ...] = ()  # factors of the projected gates, inputs, B, C and steps; empty if all are 1

    def part_of(self, ranks: int) -> "MambaShape":
        """Return one rank's part. Raises CheckpointError if ranks cannot share the heads and their groups."""
        one, is_shared = self.groups == 1, self.has_norm and self.groups < ranks
        if (
            self.heads % ranks
            or (self.groups % ranks and ranks % self.groups)
            or (is_shared and not (one and self.gates_first))
        ):
            raise _unshared(f"{self.heads} heads in {self.groups} groups", ranks)
        return self._replace(heads=self.heads // ranks, groups=max(1, self.groups // ranks), is_norm_shared=is_shared)

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
        of_heads = [_of_heads(f"{name}.{one}", self.heads) for one in ("A_log", "dt_bias", "D")]
        return [
            *_projection(f"{name}.in_proj", self.projected, hidden_size, self.is_biased),
            *_convolution(f"{name}.conv1d", self.channels, self.width, self.has_conv_bias),
            *of_heads,
            *([WeightShape("norms", f"{name}.norm.weight", self.inner, 0, "rows")] if self.has_norm else []),
            *summed("attention", f"{name}.out_proj", hidden_size, self.inner, bias=self.is_biased),
        ]


RecurrentShape = ShortConvShape | DeltaShape | KimiDeltaShape | MambaShape


def _unshared(has: str, ranks: int) -> CheckpointError:
    return CheckpointError(f"layers with a state have {has}, which {ranks} ranks cannot share: use fewer ranks")


def conv_segment(channels: int, width: int) -> CacheSegment:
    """Return the cache segment of a convolution: its inputs for the last width - 1 tokens."""
    return CacheSegment("conv", 1, (width - 1) * channels)


def _of_heads(name: str, heads: int) -> WeightShape:
    return WeightShape("attention", name, heads, 0, "rows", is_wide=True)


def _projection(name: str, rows: int, columns: int, is_biased: bool = False) -> list[WeightShape]:
    found = [WeightShape("attention", name, rows, columns, "rows")]
    return [*found, WeightShape("attention", f"{name}.bias", rows, 0, "rows")] if is_biased else found


def _convolution(name: str, channels: int, width: int, is_biased: bool) -> list[WeightShape]:
    found = [WeightShape("attention", f"{name}.weight", channels * width, 0, "rows", width)]
    return [*found, WeightShape("attention", f"{name}.bias", channels, 0, "rows")] if is_biased else found
