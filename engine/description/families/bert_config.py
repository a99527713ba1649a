"""BERT's config: a bidirectional encoder without a cache, optionally with a classification head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.class_labels import class_labels, is_classifier
from pilotlight.engine.description.shapes import NO_IMAGES, ImageNeeds
from pilotlight.engine.description.tensor_sizes import Part, WeightShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.config import number, positive_int, refuse_unless


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_heads: int
    context_length: int
    num_token_types: int
    eps: float
    first_position: int = 0  # index of the first token's position in the table of positions
    num_classes: int = 0  # number of classes of the head; 0 without a head
    cached_layers: tuple[CachedLayer, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.num_encoder_layers

    @property
    def num_kv_heads(self) -> int:
        return 0

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
        return 0

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        hidden, inner = self.hidden_size, self.intermediate_size
        matrices = [("attention", hidden, hidden)] * 4 + [("dense", inner, hidden), ("dense", hidden, inner)]
        found = []
        for i, (part, rows, columns) in enumerate(matrices):
            kind: Part = "attention" if part == "attention" else "dense"
            found += [WeightShape(kind, f"{name}.{i}", rows, columns), WeightShape(kind, f"{name}.{i}.bias", rows)]
        return [*found, *(WeightShape("norms", f"{name}.norm_{i}", hidden) for i in range(4))]

    @property
    def outer_weights(self) -> list[WeightShape]:
        tables = (self.vocab_size, self.first_position + self.context_length, self.num_token_types)
        found = [WeightShape("embedding", f"embeddings.{i}", rows, self.hidden_size) for i, rows in enumerate(tables)]
        found += [WeightShape("norms", f"embeddings.{part}", self.hidden_size) for part in ("weight", "bias")]
        if self.num_classes:
            for name, rows in (("dense", self.hidden_size), ("out_proj", self.num_classes)):
                found.append(WeightShape("head", f"classifier.{name}", rows, self.hidden_size))
                found.append(WeightShape("head", f"classifier.{name}.bias", rows))
        return found


def parse_config(config: Mapping[str, Any]) -> BertConfig:
    refuse_unless(config, "hidden_act", "gelu")
    refuse_unless(config, "position_embedding_type", "absolute")
    refuse_unless(config, "is_decoder", False)
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(
            f"config.json has hidden_size {hidden} and {heads} heads: it must be a multiple of the heads"
        )
    return BertConfig(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_encoder_layers=positive_int(config, "num_hidden_layers"),
        num_heads=heads,
        context_length=positive_int(config, "max_position_embeddings"),
        num_token_types=positive_int(config, "type_vocab_size", 2),
        eps=number(config, "layer_norm_eps", 1e-12),
        num_classes=len(class_labels(config)) if is_classifier(config) else 0,
    )
