"""DeepSeek-V3's additional last layer, which predicts a further token (arXiv:2412.19437, section 2.2).

It is a layer like the model's own. Its input is a projection of a token's embedding and of the model's features of the previous token. Names of
tensors: deepseek-ai/DeepSeek-V3's model.safetensors.index.json. The layer's embedding and head are the model's, which the checkpoint contains twice.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pilotlight.engine.description.sparse_config import SparseConfig
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.models.decoder import Decoder, DecoderLayer
from pilotlight.engine.weights.loader import WeightLoader

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class MtpHead:
    taps: Sequence[int] = ()

    def __init__(
        self, model: Decoder, layer: DecoderLayer, norms: tuple[RMSNorm, RMSNorm, RMSNorm], projection: Linear
    ) -> None:
        """`norms`: norms of the token and of the features, and the norm before the head."""
        self._model = model
        self._layer = layer
        self._token_norm, self._feature_norm, self._norm = norms
        self._projection = projection

    @classmethod
    def load(
        cls, config: SparseConfig, loader: WeightLoader, name: str, layer: DecoderLayer, model: Decoder
    ) -> "MtpHead":
        """Load the parts around `layer`, whose tensor names start with `name`."""
        hidden = config.hidden_size
        token, features, last = (
            RMSNorm.load(loader, f"{name}.{part}", hidden, config.norm)
            for part in ("enorm", "hnorm", "shared_head.norm")
        )
        loader.skip(rf"{re.escape(name)}\.(embed_tokens|shared_head\.head)\..*")
        return cls(
            model, layer, (token, features, last), Linear.load(loader, [f"{name}.eh_proj"], [hidden], 2 * hidden, False)
        )

    def features(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        return hidden

    def embed(self, context: Context) -> torch.Tensor:
        return self._model.embed(context)

    def prepared(self, context: Context) -> Context:
        return self._model.prepared(replace(context, incoming=None))

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, context: Context) -> torch.Tensor:
        both = torch.cat((self._token_norm(embedded), self._feature_norm(before)), 1)
        x, residual = self._layer(self._projection(both, context), None, context)
        return x + residual

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        return self._model.logits(self._norm(hidden), ranks)
