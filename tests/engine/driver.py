"""Helpers that run an Engine step by step and collect the outputs of each sequence."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pilotlight.engine.api.protocol import (
    HostConfig,
    KvDtype,
    ModelSpec,
    Pooling,
    SamplingParams,
    Submit,
    TokenLogprobs,
    TokenOutput,
)
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.drafting.speculator import Speculator
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.shared_tiers import SharedTiers
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.parallel.ranks import RankedRunner
from pilotlight.engine.scheduling.plan import Speculation, StepCount


@dataclass
class Heard:
    """The outputs of one sequence, merged as its client would receive them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int | None = None
    num_fetched_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    num_outputs: int = 0
    embedding: tuple[float, ...] | None = None

    def hear(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, f"{output.sequence_id} got an output after its end"
        assert (output.num_cached_tokens is not None) == (self.num_outputs == 0 and bool(output.token_ids))
        self.num_outputs += 1
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.finish_reason = output.finish_reason
        self.error = output.error_message
        self.embedding = output.embedding
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
            self.num_fetched_tokens = output.num_fetched_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs


def runner_of(engine: Engine) -> ModelRunner:
    """Return the runner of this rank's model."""
    runner = engine.runner.own if isinstance(engine.runner, RankedRunner) else engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


def load_engine(
    directory: Path,
    name: str = "tiny",
    kv_tokens: int = 1024,
    dtype: Any = "auto",
    depth: int = 1,
    tiers: SharedTiers | None = None,
    speculate: str = "off",
    kv_dtype: KvDtype = "auto",
    **limits: Any,
) -> Engine:
    """Load an engine. With `depth` 2 it steps as on a GPU: each step is launched before the tokens of the previous one are known."""
    config = HostConfig(kv_bytes=64 << 20, threads=1, **limits)
    spec = ModelSpec(name, str(directory), dtype, kv_tokens, speculate=speculate, kv_dtype=kv_dtype)
    engine = load_model(spec, config, make_kv_memory(config), tiers=tiers).engine
    engine.runner.depth = depth
    check_all_drafts(engine)
    return engine


def draft_with(engine: Engine, speculation: Speculation) -> None:
    """Replace the speculation of an engine that has no sequences: it begins anew, as after a failed step."""
    engine.speculation = speculation
    engine.fail_all("engine_error", "nothing is open")


class CheapRows:
    """Costs with which every draft and every search for drafts pays, so that decisions do not depend on the machine."""

    is_known = True

    def is_trial(self, rows: int, num_drafts: int) -> bool:
        return False

    def count(self, rows: int, seconds: float, num_drafts: int = 0) -> None:
        pass

    def predict_s(self, rows: float, num_drafts: int = 0) -> float:
        return 1e6 + rows


class Welcome:
    """A measure of gain that always permits drafts."""

    def may_draft(self, num_decodes: int) -> bool:
        return True

    def count(self, step: StepCount, looking_s: float) -> None:
        pass


def check_all_drafts(engine: Engine) -> None:
    """Make an engine with speculation verify all proposed drafts."""
    if isinstance(engine.speculation, Speculator):
        engine.speculation.costs = CheapRows()
        engine.speculation.gain = Welcome()


def submit(
    sequence_id: str,
    prompt: list[int],
    salt: bytes = b"",
    num_delivered_tokens: int = 0,
    leader: str | None = None,
    priority: int = 0,
    pooling: Pooling | None = None,
    second_from: int = 0,
    **sampling: Any,
) -> Submit:
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
    params = SamplingParams(**settings)
    message = Submit(sequence_id, "tiny", tuple(prompt), params, salt, num_delivered_tokens, leader, priority, pooling)
    return replace(message, second_from=second_from)


def drain(
    engine: Engine, submits: list[Submit], max_steps: int = 2000, heard: dict[str, Heard] | None = None
) -> dict[str, Heard]:
    """Submit all requests, then step until there is no work; return the outputs of each sequence.

    `heard` has the earlier outputs of sequences that are already open.
    """
    for message in submits:
        engine.submit(message)
    heard = {} if heard is None else heard
    num_steps = 0
    while _hear_all(engine, heard):
        assert num_steps < max_steps, f"{max_steps} steps were not enough"
        num_steps += 1
        if not engine.step():
            time.sleep(0.001)  # blocks are being loaded from a tier
    engine.scheduler.pool.assert_consistent()
    assert engine.scheduler.pool.num_held == 0
    return heard


def _hear_all(engine: Engine, heard: dict[str, Heard]) -> bool:
    """Take the engine's outputs; return True if it has more work."""
    for output in engine.sequences.take_outputs():
        heard.setdefault(output.sequence_id, Heard()).hear(output)
    engine.on_idle()
    return engine.has_work


def drain_preempting(engine: Engine, submits: list[Submit]) -> dict[str, Heard]:
    """Do the same as `drain`, but preempt the youngest sequence in some steps.

    A sequence whose layers all have windows needs so few blocks that it would never be preempted otherwise.
    """
    heard: dict[str, Heard] = {}
    for message in submits:
        engine.submit(message)
    for step in range(1, 25):
        engine.step()
        for output in engine.sequences.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
        engine.on_idle()
        if step % 8 == 0:
            engine.scheduler.preemption.preempt_youngest(keep_oldest=False)
    return drain(engine, [], heard=heard)


def one(engine: Engine, message: Submit) -> Heard:
    return drain(engine, [message])[message.sequence_id]


def random_prompt(length: int, seed: int, vocab: int = 431) -> list[int]:
    return torch.randint(2, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
