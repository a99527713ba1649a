"""The results of a step before they become messages."""

from collections.abc import Mapping
from typing import NamedTuple

from pilotlight.engine.api.protocol import TokenLogprobs
from pilotlight.engine.api.struct import Struct


class SampledToken(Struct, frozen=True, gc=False):
    token_id: int
    is_finite: bool  # the logits it was chosen from were finite
    logprobs: TokenLogprobs | None = None


class RunResult(NamedTuple):
    tokens: list[SampledToken]  # tokens of the rows that choose one
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]]  # by the chunk's index in the step
    embeddings: Mapping[int, tuple[float, ...]]  # by the chunk's index in the step
    device_s: float  # from launch to tokens on the host, without the preparation before it
