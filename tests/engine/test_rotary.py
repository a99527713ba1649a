"""Rotary scaling rules with the parameters of published checkpoints, compared with the tables of `transformers`."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.layers.rotary import RotaryTable, rotary_frequencies

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 3.1": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "gpt-oss": {
        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "qwen3, stretched": {
        "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0, "original_max_position_embeddings": 32768
    },
    "deepseek-v3": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
    },
    "kimi k2.5": {
        "rope_type": "yarn", "rope_theta": 50_000.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096,
    },
    "llama 4 scout": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


MANY_TURNS = {  # the slowest dimension turns more than once in the trained context
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 0.5,
    "original_max_position_embeddings": 65536,
}  # fmt: skip


@pytest.mark.parametrize("described", [*PUBLISHED.values(), MANY_TURNS], ids=[*PUBLISHED, "many turns"])
def test_rules_turn_as_the_reference_does(described: dict[str, Any]) -> None:
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(described))
    expected, factor = ROPE_INIT_FUNCTIONS[described["rope_type"]](config, torch.device("cpu"))
    rule = read_rotary_rule({"rope_parameters": described})
    torch.testing.assert_close(rotary_frequencies(rule, 64), expected, rtol=1e-6, atol=0.0)
    table = RotaryTable(rule, 64, 3, torch.device("cpu"))
    table.compute()
    torch.testing.assert_close(table.cos[0], torch.full((32,), float(factor)))
    torch.testing.assert_close(table.sin[2], (2 * expected).sin() * factor)


def test_the_last_of_256k_positions_turns_as_the_reference_computes_it_in_fp32() -> None:
    described, length = PUBLISHED["kimi k2.5"], 1 << 18
    config = LlamaConfig(head_dim=64, max_position_embeddings=length, rope_parameters=dict(described))
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    table = RotaryTable(read_rotary_rule({"rope_parameters": described}), 64, length, torch.device("cpu"))
    table.compute()
    positions = torch.tensor([length // 2, length - 1])
    cos, sin = table.at(positions)
    angles = positions.float().unsqueeze(1) * frequencies
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0.0, atol=1e-6)


def test_old_and_new_places_of_a_rule_are_read_alike() -> None:
    described = {"factor": 4.0, "original_max_position_embeddings": 32768}
    new = read_rotary_rule({"rope_parameters": described | {"rope_type": "yarn", "rope_theta": 1e6}})
    old = read_rotary_rule({"rope_theta": 1e6, "rope_scaling": described | {"type": "yarn"}})
    assert old == new


@pytest.mark.parametrize("rope_type", ["dynamic", "ntk"])
def test_other_rules_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(CheckpointError, match=f"{rope_type!r}; supported are default, linear, llama3, yarn"):
        read_rotary_rule({"rope_scaling": {"type": rope_type, "factor": 2.0}})
