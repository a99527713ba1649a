"""ModernBERT's config (Warner et al., arXiv 2412.13663): rotary positions, windows in most layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.class_labels import class_labels, is_classifier
from pilotlight.engine.description.decoder_config import LAYER_TYPES, LayerKind, mixed_layers
from pilotlight.engine.description.rotary_scaling import RotaryRule, parse_rotary_rule
from pilotlight.engine.description.shapes import NO_IMAGES, ImageNeeds
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.config import flag, number, positive_int, refuse_unless

_FULL, _SLIDING = 0, 1  # indices of the two rotary rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    context_length: int
    eps: float
    layers: tuple[LayerKind, ...]  # a window counts a token itself and the tokens on one side
    rotary: tuple[RotaryRule, ...]
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    head_bias: bool  # whether the head's first layer has a bias
    num_classes: int = 0  # number of classes of the head; 0 without a head
    cached_layers: tuple[CachedLayer, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        return 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def attention_products(self, context: int) -> int:
        return 2 * self.hidden_size * context

    def read_share(self, context: int) -> float:
        return 0.0

    def step_bytes(self, tokens: int, ranks: int, item_bytes: int) -> int:
        return 0

    def image_needs(self, item_bytes: int) -> ImageNeeds:
        return NO_IMAGES

    @property
    def rotary_numbers(self) -> int:
        return len(self.rotary) * self.head_dim

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        hidden, inner = self.hidden_size, self.intermediate_size
        return [
            *self._linear("attention", f"{name}.attn.Wqkv", 3 * hidden, hidden, self.attention_bias),
            *self._linear("attention", f"{name}.attn.Wo", hidden, hidden, self.attention_bias),
            *self._linear("dense", f"{name}.mlp.Wi", 2 * inner, hidden, self.mlp_bias),
            *self._linear("dense", f"{name}.mlp.Wo", hidden, inner, self.mlp_bias),
            *(self._norm(f"{name}.attn_norm") if layer else []),
            *self._norm(f"{name}.mlp_norm"),
        ]

    @property
    def outer_weights(self) -> list[WeightShape]:
        hidden = self.hidden_size
        found = [
            WeightShape("embedding", "embeddings.tok_embeddings", self.vocab_size, hidden),
            *self._norm("embeddings.norm"),
            *self._norm("final_norm"),
        ]
        if self.num_classes:
            found += self._linear("head", "head.dense", hidden, hidden, self.head_bias)
            found += [*self._norm("head.norm"), *self._linear("head", "classifier", self.num_classes, hidden, True)]
        return found

    def _norm(self, name: str) -> list[WeightShape]:
        parts = ("weight", "bias") if self.norm_bias else ("weight",)
        return [WeightShape("norms", f"{name}.{part}", self.hidden_size) for part in parts]

    @staticmethod
    def _linear(part: Any, name: str, rows: int, columns: int, bias: bool) -> list[WeightShape]:
        found = [WeightShape(part, name, rows, columns)]
        return [*found, WeightShape(part, f"{name}.bias", rows)] if bias else found


def parse_config(config: Mapping[str, Any]) -> ModernBertConfig:
    refuse_unless(config, "hidden_activation", "gelu")
    refuse_unless(config, "classifier_activation", "gelu")
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    if hidden % heads or hidden // heads % 2:
        raise CheckpointError(
            f"config.json has hidden_size {hidden} and {heads} heads: it must be an even multiple of the heads"
        )
    return ModernBertConfig(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_heads=heads,
        context_length=positive_int(config, "max_position_embeddings"),
        eps=number(config, "norm_eps", 1e-5),
        layers=_layers(config),
        rotary=_rotary(config),
        norm_bias=flag(config, "norm_bias", False),
        attention_bias=flag(config, "attention_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
        head_bias=flag(config, "classifier_bias", False),
        num_classes=len(class_labels(config)) if is_classifier(config) else 0,
    )


def _layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    period = positive_int(config, "global_attn_every_n_layers", 3)  # the first layer of each period has full attention
    default = tuple(
        "sliding_attention" if i % period else "full_attention"
        for i in range(positive_int(config, "num_hidden_layers"))
    )
    window = positive_int(config, "local_attention", 128) // 2 + 1
    return mixed_layers(config, window, default, sliding_rotary=_SLIDING)


def _rotary(config: Mapping[str, Any]) -> tuple[RotaryRule, ...]:
    """Return the rotary rules of layers with full attention and of layers with a window.

    Older checkpoints have only the base of each rule.
    """
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not nested.keys() <= set(LAYER_TYPES):
        raise CheckpointError(
            f"config.json has rope_parameters = {nested!r}; for ModernBERT they must be an object per layer type, "
            f"{' and '.join(LAYER_TYPES)}"
        )
    scaling = config.get("rope_scaling") or {}
    bases = (("full_attention", "global_rope_theta", 160_000.0), ("sliding_attention", "local_rope_theta", 10_000.0))
    return tuple(
        [parse_rotary_rule(config, nested.get(kind) or scaling, number(config, key, base)) for kind, key, base in bases]
    )
