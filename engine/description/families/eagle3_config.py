"""The config of an EAGLE-3 head (arXiv:2503.01840), in the form that SafeAILab/EAGLE publishes.

The head is one layer like Llama's. Its inputs are a token and three of the model's hidden states; its vocabulary has only the most frequent tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheSegment, keys_and_values
from pilotlight.engine.weights.config import flag, layer_numbers, positive_int

NUM_TAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DenseConfig):
    draft_vocab_size: int
    model_hidden_size: int
    taps: tuple[int, ...]  # layers of the model after which its hidden states are taken
    adds_normed: bool  # whether the residual that is added to the layer's output is normalised

    @property
    def head_layers(self) -> tuple[CachedLayer, ...]:
        """The cached values per token: the layer's keys and values, and the features that it reads."""
        features = CacheSegment("features", 1, self.hidden_size)
        return CachedLayer(keys_and_values(self.num_kv_heads, self.head_dim)), CachedLayer((features,))


def parse_config(config: Mapping[str, Any], vocab_size: int, hidden_size: int, num_layers: int) -> Eagle3Config:
    """Parse a head's config.json. The other arguments describe the model, for which it must be trained."""
    if "draft_vocab_size" not in config:
        raise CheckpointError("its config.json has no draft_vocab_size: it is not an EAGLE-3 head")
    own = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"  # numbers of the layers that have the hidden states as input
    entered = layer_numbers({**config, **own}, key, num_layers + 1) or [2, num_layers // 2, num_layers - 3]
    taps = tuple(number - 1 for number in entered)
    if len(taps) != NUM_TAPS or list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise CheckpointError(
            f"its config.json has {key} = {entered}; they must be {NUM_TAPS} layers, rising, from 1 on"
        )
    if (of_model := config.get("target_hidden_size") or hidden_size) != hidden_size:
        raise CheckpointError(f"it reads hidden states of {of_model} numbers, and the model's have {hidden_size}")
    if (vocabulary := positive_int(config, "vocab_size")) != vocab_size:
        raise CheckpointError(f"it has a vocabulary of {vocabulary} tokens, and the model one of {vocab_size}")
    read = Eagle3Config.read(
        {**config, "num_hidden_layers": 1},
        intermediate_size=positive_int(config, "intermediate_size"),
        draft_vocab_size=positive_int(config, "draft_vocab_size"),
        model_hidden_size=hidden_size,
        taps=taps,
        adds_normed=flag(config, "norm_before_residual", False),
    )
    if read.draft_vocab_size > vocab_size:
        raise CheckpointError(f"it drafts by {read.draft_vocab_size} tokens, and the model has {vocab_size}")
    return read
