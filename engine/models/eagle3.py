"""An EAGLE-3 head (arXiv:2503.01840): one layer over a token and the features of the previous token.

Names of tensors: those of SafeAILab/EAGLE's checkpoints; the layer is called `midlayer` there, and `layers.0` in other checkpoints.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.families.eagle3_config import NUM_TAPS, Eagle3Config
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.embedding import TokenEmbedding
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.rotary import RotaryTable
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.stored_tensor import ExpectedTensor

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator

_NEVER = -1e9  # the logit of a token that only the model's vocabulary has


class Eagle3Layer:
    def __init__(self, config: Eagle3Config, loader: WeightLoader, name: str, cache: int) -> None:
        hidden, norm = config.hidden_size, config.norm
        self._adds_normed = config.adds_normed
        self._token_norm = RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm)
        self._feature_norm = RMSNorm.load(loader, f"{name}.hidden_norm", hidden, norm)
        shape = config.attention(0)._replace(layer=cache)
        self._attention = Attention.load(loader, f"{name}.self_attn", hidden, shape, input_size=2 * hidden)
        self._feed_forward_norm = RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm)
        self._feed_forward = GatedMLP.load(loader, f"{name}.mlp", hidden, config.intermediate_size)

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, context: Context) -> torch.Tensor:
        normed = self._feature_norm(before)
        both = torch.cat((self._token_norm(embedded), normed), 1)
        residual = normed if self._adds_normed else before
        x, residual = self._feed_forward_norm.add(self._attention(both, context), residual)
        return self._feed_forward(x, context) + residual


class Eagle3Head:
    def __init__(
        self,
        projection: Linear,
        layer: Eagle3Layer,
        norm: RMSNorm,
        head: TokenEmbedding,
        embedding: TokenEmbedding,
        rotary: RotaryTable,
        config: Eagle3Config,
        token_ids: torch.Tensor | None,
    ) -> None:
        """`token_ids` [draft vocabulary]: the model's id of each draft id; None if they are equal."""
        self.taps: Sequence[int] = config.taps
        self._projection = projection
        self._layer = layer
        self._norm = norm
        self._head = head
        self._embedding = embedding
        self._rotary = rotary
        self._vocab_size = config.vocab_size
        self._token_ids = token_ids

    @classmethod
    def load(
        cls, config: Eagle3Config, loader: WeightLoader, model: Decoder, cache: int, context_length: int
    ) -> "Eagle3Head":
        """Load a head. `cache`: the index of its layer's cache. Raises CheckpointError."""
        hidden = config.hidden_size
        name = "midlayer" if "midlayer.hidden_norm.weight" in loader else "layers.0"
        if "embed_tokens.weight" in loader:
            embedding = TokenEmbedding.load(loader, "embed_tokens", config.vocab_size, hidden)
        elif hidden == config.model_hidden_size and model.embedding is not None:
            embedding = model.embedding
        else:
            raise CheckpointError(
                "it has no embed_tokens, and cannot use the model's, because their hidden sizes differ"
            )
        rotary = RotaryTable(config.rotary[0], config.head_dim, context_length, loader.device)
        loader.compute(rotary.compute)
        loader.skip("t2d")
        return cls(
            Linear.load(loader, ["fc"], [hidden], NUM_TAPS * config.model_hidden_size, bias=False),
            Eagle3Layer(config, loader, name, cache),
            RMSNorm.load(loader, "norm", hidden, config.norm),
            TokenEmbedding.load(loader, "lm_head", config.draft_vocab_size, hidden),
            embedding,
            rotary,
            config,
            _token_ids(config, loader),
        )

    def features(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._projection.weight.linear(torch.cat(list(tapped), 1), None)

    def embed(self, context: Context) -> torch.Tensor:
        return self._embedding(context.batch.token_ids, context)

    def prepared(self, context: Context) -> Context:
        return replace(context, turns=(self._rotary.at(context.batch.positions),), temperatures=None)

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, context: Context) -> torch.Tensor:
        return self._layer(embedded, before, context)

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        own = self._head.logits(self._norm(hidden), ranks)
        if self._token_ids is None:
            return own
        logits = own.new_full((len(own), self._vocab_size), _NEVER)
        return logits.index_copy_(1, self._token_ids, own)


def _token_ids(config: Eagle3Config, loader: WeightLoader) -> torch.Tensor | None:
    """Return the model's id of each draft id, or None if they are equal. `d2t` has the differences."""
    size = config.draft_vocab_size
    if "d2t" not in loader:
        if size == config.vocab_size:
            return None
        raise CheckpointError(f"it has no d2t, which maps its {size} tokens to the model's {config.vocab_size}")
    added = loader.look(ExpectedTensor("d2t", (size,), ("I64", "I32")))
    if added is None:
        return None
    token_ids = added.long() + torch.arange(size)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= config.vocab_size or len(set(token_ids.tolist())) < size:
        raise CheckpointError(f"its d2t names tokens twice, or beyond the {config.vocab_size} of the model")
    return token_ids.to(loader.device)
