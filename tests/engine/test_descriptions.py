"""What a `config.json` leaves out, or has that no model can be."""

from typing import Any

import pytest

from engine.description import bert, gemma3
from engine.errors import CheckpointError

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    assert bert.parse_config(SIZES).num_heads == 4
    with pytest.raises(CheckpointError, match="hidden_size 32 and 5 heads"):
        bert.parse_config({**SIZES, "num_attention_heads": 5})


def test_gemmas_windows_turn_by_a_base_of_their_own() -> None:
    config = gemma3.parse_config({**SIZES, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6})
    assert [rule.theta for rule in config.rotary] == [1_000_000.0, 10_000.0]
