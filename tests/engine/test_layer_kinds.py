"""A new kind of layer needs only the parts in this file. Its layers cache a state for each token, alone or beside attention, and give the same
answers on every path of a sequence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheSegment
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.models.decoder import Decoder, DecoderLayer, Part, load_decoder
from pilotlight.engine.models.model_registry import FAMILIES
from pilotlight.engine.weights.loader import WeightLoader
from tests.checkpoints import write_llama
from tests.engine.driver import Heard, drain, load_engine, random_prompt, submit

ATTENTION_AND_SHIFT, SHIFTS = "attention, then a shift", "shifts alone"


class TokenShift:
    """A layer that mixes each token with the previous one, which the cache keeps."""

    def __init__(self, proj: Linear, layer: int) -> None:
        self.proj = proj
        self.layer = layer

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        cache = context.caches[self.layer]
        (kept,), group = cache.segments, cache.group
        block_size = kept.shape[1]
        slots = context.batch.groups[group].slot_mapping
        kept[slots // block_size, slots % block_size, 0] = x
        before = (context.batch.positions - 1).clamp(min=0)
        blocks = self._tables(context, group).gather(1, (before // block_size).unsqueeze(1)).squeeze(1)
        shifted = kept[blocks, before % block_size, 0]
        shifted[context.batch.positions == 0] = 0
        return self.proj(x + 0.5 * shifted, context)

    @staticmethod
    def _tables(context: Context, group: int) -> torch.Tensor:
        """Return each token's block table, [tokens, blocks]."""
        own = context.batch.groups[group]
        tables = [own.decode.block_tables] if own.decode is not None else []
        for part in (own.verify, own.prefill):
            if part is not None:
                tables.append(
                    part.block_tables.repeat_interleave(
                        torch.tensor(part.host_q_lens, device=part.block_tables.device), dim=0
                    )
                )
        width = max(table.shape[1] for table in tables)
        return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftConfig(DenseConfig):
    shifting: tuple[int, ...]

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        plain = DenseConfig.cached_layers.fget(self)  # type: ignore[attr-defined]
        shift = CachedLayer((CacheSegment("shift", 1, self.hidden_size),))
        return tuple(shift if i in self.shifting else layer for i, layer in enumerate(plain))


def parse_config(config: Mapping[str, Any]) -> ShiftConfig:
    sizes = {"intermediate_size": config["intermediate_size"], "shifting": tuple(config["shifting"])}
    return ShiftConfig.read(config, **sizes)


def load(config: ShiftConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm = config.hidden_size, config.norm

    def mixer(i: int, name: str) -> Part:
        if i in config.shifting:
            return TokenShift(Linear.load(loader, [f"{name}.shift"], [hidden], hidden, bias=False), i)
        return Attention.load(loader, f"{name}.self_attn", hidden, config.attention(i))

    def layer(i: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=mixer(i, name),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=GatedMLP.load(loader, f"{name}.mlp", hidden, config.intermediate_size),
        )

    return load_decoder(config, loader, context_length, layer)


@pytest.fixture(params=[ATTENTION_AND_SHIFT, SHIFTS])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a llama in which the new kind of layer replaces attention, in the second layer or in both."""
    monkeypatch.setitem(FAMILIES, "ShiftForCausalLM", SimpleNamespace(parse_config=parse_config, load=load))
    write_llama(tmp_path, num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    shifting = [0, 1] if request.param == SHIFTS else [1]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["ShiftForCausalLM"], "shifting": shifting})
    )
    tensors = load_file(tmp_path / "model.safetensors")
    hidden = config["hidden_size"]
    for i in shifting:
        tensors = {name: tensor for name, tensor in tensors.items() if f"layers.{i}.self_attn." not in name}
        weight = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(i)) * hidden**-0.5
        tensors[f"model.layers.{i}.shift.weight"] = weight
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def answers(heard: dict[str, Heard]) -> dict[str, list[int]]:
    assert all(one.error is None for one in heard.values())
    return {name: one.token_ids for name, one in heard.items()}


def test_chunks_batches_hits_and_preemptions_change_no_token(checkpoint: Path) -> None:
    shared = random_prompt(40, seed=9)
    many = [submit(str(i), shared[: 20 * (i % 3)] + random_prompt(9 + 7 * i, seed=i), max_tokens=30) for i in range(4)]
    alone = {name: ids for one in many for name, ids in answers(drain(load_engine(checkpoint), [one])).items()}
    assert len({tuple(ids) for ids in alone.values()}) == len(many)
    for options in ({}, {"max_num_batched_tokens": 8}, {"kv_tokens": 160}, {"depth": 2}):
        engine = load_engine(checkpoint, **options)
        assert answers(drain(engine, many)) == alone
        again = [submit(f"{one.sequence_id}", list(one.prompt_token_ids), max_tokens=30) for one in many]
        assert answers(drain(engine, again)) == alone, "cached prefixes must not change answers"


@pytest.mark.parametrize("checkpoint", [SHIFTS], indirect=True)
def test_its_answers_are_those_of_its_formula(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    prompt = random_prompt(21, seed=3)
    found = answers(drain(engine, [submit("a", prompt, max_tokens=12)]))["a"]
    weights = load_file(checkpoint / "model.safetensors")
    ids = list(prompt)
    for _ in found:
        ids.append(int(_logits(weights, ids)[-1].argmax()))
    assert ids[len(prompt) :] == found


def _logits(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[f"model.{name}.weight"]

    x = weights["model.embed_tokens.weight"][ids]
    for i in range(2):
        mixed = norm(x, f"layers.{i}.input_layernorm")
        before = torch.cat((torch.zeros_like(mixed[:1]), mixed[:-1]))
        x = x + (mixed + 0.5 * before) @ weights[f"model.layers.{i}.shift.weight"].T
        fed = norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up, down = (weights[f"model.layers.{i}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(fed @ gate.T) * (fed @ up.T)) @ down.T
    return norm(x, "norm") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("checkpoint", [SHIFTS], indirect=True)
def test_hidden_states_behind_named_layers_can_be_had(checkpoint: Path) -> None:
    """The states are the same in a whole pass and in a pass in chunks, and reading them changes no result."""
    seen: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    engine = load_engine(checkpoint)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    model: Decoder = runner.model
    assert model.norm is not None

    class Tapping:
        def forward(self, context: Context) -> torch.Tensor:
            seen.append(model.tapped(context, [0, 1]))
            prepared = model.prepared(context)
            rows = model.embed(prepared)
            x, residual = model.run(range(1), model.embed(prepared, rows), None, prepared)
            assert residual is not None
            assert torch.equal(x + residual, seen[-1][1][0])
            hidden = model.finish(*model.run(range(1, 2), x, residual, prepared))
            assert torch.equal(hidden, seen[-1][0])
            return hidden

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return model.logits(hidden)

    runner.replace_model(Tapping())
    assert answers(drain(engine, [submit("a", [5, 6, 7], max_tokens=3)])) == answers(
        drain(load_engine(checkpoint), [submit("a", [5, 6, 7], max_tokens=3)])
    )
    hidden, (first, last) = seen[0]
    assert first.shape == last.shape == hidden.shape
    assert torch.allclose(model.norm(last), hidden)
