"""What a step yields before it becomes a message: one result per scheduled chunk."""

from typing import NamedTuple

from engine.protocol import TokenLogprobs


class SampledToken(NamedTuple):
    token_id: int
    is_finite: bool  # the logits it was chosen from were numbers
    logprobs: TokenLogprobs | None = None


class ChunkResult(NamedTuple):
    token: SampledToken | None = None  # None in the middle of a prompt
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] | None = None


class RunResult(NamedTuple):
    chunks: list[ChunkResult]
    device_s: float  # from launch to tokens on the host, without the preparation before it
