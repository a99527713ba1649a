"""Positions from 200,000 on are rotated as by `transformers`. The cached keys and values of all earlier tokens are zeros, in the engine and in the
reference.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    Ministral3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from pilotlight.engine.core.chunk_steps import scratch_step
from pilotlight.engine.execution.runner import ModelRunner
from tests.checkpoints import LLAMA3_SCALING, write_checkpoint
from tests.engine.agreement import TOLERANCE
from tests.engine.driver import load_engine, random_prompt
from tests.engine.families import LATENT, YARN, config

BEFORE = 200_000
# Large weights: with small ones the many keys of zeros would take all of the attention, and a wrong angle would have no effect. With these,
# frequencies that are 0.1 % off change log-probabilities by at least 0.002.
LONG: dict[str, Any] = {"max_position_embeddings": 1 << 18, "num_hidden_layers": 2, "initializer_range": 0.4}
SCALED = YARN | {"factor": 64.0, "original_max_position_embeddings": 4096}
MODELS: dict[str, PreTrainedConfig] = {
    "llama3": config(LlamaConfig, **LONG, rope_parameters=LLAMA3_SCALING | {"original_max_position_embeddings": 8192}),
    "yarn": config(Qwen3Config, **LONG, rope_parameters=SCALED),
    "yarn, queries that grow": config(
        Ministral3Config, **LONG, sliding_window=None, rope_parameters=SCALED | {"llama_4_scaling_beta": 0.1}
    ),
    "yarn, latent": config(
        DeepseekV3Config,
        **LONG,
        **LATENT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        rope_parameters=SCALED | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "longrope": config(
        Phi3Config,
        **LONG | {"initializer_range": 0.3},
        hidden_size=60,
        head_dim=None,
        sliding_window=None,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 4096,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.0, 3.0, 9.0, 20.0, 50.0],
        },
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_positions_behind_200_000_tokens_agree(tmp_path: Path, name: str) -> None:
    model = write_checkpoint(tmp_path, MODELS[name])
    engine = load_engine(tmp_path, dtype="float32", kv_tokens=BEFORE + 64)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    token_ids = [0] * BEFORE + random_prompt(24, seed=4)
    for start, end in (
        (BEFORE, len(token_ids) - 1),
        (len(token_ids) - 1, len(token_ids)),
    ):  # a chunk of the prompt, and a decode
        step, _ = scratch_step(token_ids[:end], start, engine.info.block_size)
        forwarded = runner.forward(step)
        assert forwarded.logits is not None
        exact = _reference(model.double(), token_ids[BEFORE:end])
        # In fp32 torch's sum of 200,000 equal weights is off by up to 2e-4, which large weights amplify.
        inexact = _reference(model.float(), token_ids[BEFORE:end])
        found = forwarded.logits[-1].log_softmax(-1)
        assert (found - exact).abs().max() <= max(TOLERANCE, 1.5 * float((inexact - exact).abs().max()))


def _reference(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return the reference's distribution after the tokens, with BEFORE cached tokens of zeros."""
    sizes, dtype = model.config, model.dtype
    cache = DynamicCache(config=sizes)
    widths = (sizes.kv_lora_rank, sizes.qk_rope_head_dim) if hasattr(sizes, "kv_lora_rank") else None
    for layer in range(sizes.num_hidden_layers):
        if widths is not None:
            zeros = [torch.zeros(1, 1, BEFORE, width, dtype=dtype) for width in widths]
        else:
            head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
            zeros = [torch.zeros(1, sizes.num_key_value_heads, BEFORE, head_dim, dtype=dtype)] * 2
        cache.update(*zeros, layer)
    logits: torch.Tensor = model(torch.tensor([token_ids]), past_key_values=cache).logits
    return logits[0, -1].log_softmax(-1)
