"""PEFT writes adapters with random weights for the tests' tiny models, and merges them."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pilotlight.engine.adapters.peft import digest_of
from pilotlight.engine.api.protocol import AdapterSource, Submit
from pilotlight.engine.api.struct import replace

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")  # of layers with latent attention
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model: PreTrainedModel,
    seed: int = 0,
    targets: Sequence[str] = LINEAR,
    rank: int = 4,
    **options: Any,
) -> PreTrainedModel:
    """Write an adapter with random weights to a directory; return a copy of the model with the adapter merged by PEFT."""
    pytest.importorskip("peft")
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)} | options
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.15)
        adapted.save_pretrained(str(directory))
        merged: PreTrainedModel = adapted.merge_and_unload()
        return merged.eval()


def source_of(directory: Path) -> AdapterSource:
    return AdapterSource(directory.name, str(directory), digest_of(directory))


def adapted(message: Submit, directory: Path | None) -> Submit:
    """Return the request with the adapter in `directory`; without an adapter if None."""
    return message if directory is None else replace(message, adapter=source_of(directory))
