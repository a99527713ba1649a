"""Ties: tell whether two answers to one prompt differ by rounding alone, or one is wrong.

With another batch or other chunks, sums are rounded differently. So a greedy choice between nearly equal logits, or a sample whose random number is
at the boundary between two tokens, may change. The model's distribution where the texts differ is computed again here, and shows how close the choice
was.
"""

from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams, Submit
from pilotlight.engine.embedded import ember
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.kernels.sampling.philox import uniform

EMBER = Path(ember.__file__).parent
# In fp32, logprobs of two orders of summation differ by some 1e-5; probabilities differ by less.
TIE = 1e-4


class TieJudge:
    """The embedded model in this process, which computes whole distributions."""

    def __init__(self) -> None:
        config = HostConfig(device="cpu", threads=1, kv_bytes=64 << 20)
        self._engine = load_model(
            ModelSpec("ember", str(EMBER), "auto", kv_tokens=4096), config, make_kv_memory(config)
        ).engine
        self._numbers = count()

    def margin(
        self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], sampling: dict[str, Any]
    ) -> float:
        """Return how far the choice at which two answers differ was from a tie.

        The unit is logprobs, or probability if `sampling` has a temperature. Infinity if one answer is a prefix of the other.
        """
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
        if same == min(len(one), len(other)):
            return float("inf")
        tokens = (*prompt, *one[:same])
        drawn = None
        if sampling["temperature"]:
            seed = torch.tensor([sampling["seed"]])
            drawn = uniform(seed, torch.zeros_like(seed), torch.tensor([len(tokens)])).item()
        return margin_of(self.logprobs(tokens), sampling["temperature"], drawn, one[same], other[same])

    def logprobs(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Return the logprobs [vocab] of the token after these tokens."""
        name, vocab = str(next(self._numbers)), self._engine.info.vocab_size
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, num_logprobs=vocab)
        self._engine.submit(Submit(name, "ember", tokens, sampling))
        while self._engine.has_work:
            self._engine.step()
        (output,) = self._engine.sequences.take_outputs()
        assert output.logprobs is not None, output.error_message
        found = torch.empty(vocab, dtype=torch.float64)
        ids, values = zip(*output.logprobs[0].top, strict=True)
        found[list(ids)] = torch.tensor(values, dtype=torch.float64)
        return found


def margin_of(logprobs: torch.Tensor, temperature: float, drawn: float | None, one: int, other: int) -> float:
    """Return how far a choice between tokens `one` and `other` was from a tie.

    logprobs [vocab]; `drawn` is the random number in [0, 1), None if the likeliest token is taken.
    """
    if drawn is None:
        return float(logprobs.max() - min(logprobs[one], logprobs[other]))
    first, last = sorted((one, other))
    ends = (logprobs / temperature).softmax(0).cumsum(0)
    before_last = ends[last - 1].item()  # in a tie, tokens between the two have no probability
    return max(abs(drawn - ends[first].item()), abs(drawn - before_last))
