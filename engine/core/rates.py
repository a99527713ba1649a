"""The speeds of a model and of its tiers, as moving averages of measurements.

Time and amounts are averaged separately and divided last, so that a step counts by its size: a thousand short prompts say little about the speed of
one long prompt.
"""

import math

_DECAY = 0.95  # each step multiplies the weight of earlier ones by this: half is left after 13 steps
# Added to the predicted duration of a transfer: a thread has to wake up, and the engine notices the end at its next step or after a millisecond.
_TRANSFER_OVERHEAD_S = 0.002
_TRY_EVERY = 16  # one of this many slow transfers is tried anyway: the tier may have become fast


class Rates:
    def __init__(self) -> None:
        self._prefill = _Ratio()
        self._decode = _Ratio()
        self._decode_steps = _Ratio()
        self._prompts = _Ratio()  # prefill, without the time of decodes in the same steps

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill.value

    @property
    def decode_tokens_per_s(self) -> float:
        """Return the decoding speed of one sequence."""
        return self._decode.value

    def num_prompt_tokens_in(self, seconds: float) -> float:
        """Return how many prompt tokens lengthen a step by `seconds`; infinity before any measurement."""
        return seconds * self._prompts.value if self._prompts.value else math.inf

    def count(self, prompt_tokens: int, num_decodes: int, output_tokens: int, step_s: float) -> None:
        """Count a step. `output_tokens`: total of its decodes, each of which may yield several."""
        if prompt_tokens:
            # includes the time of decodes in the same step, which will slow down the next prefill, too
            self._prefill.add(prompt_tokens, step_s)
            decodes_s = 1 / self._decode_steps.value if num_decodes and self._decode_steps.value else 0.0
            # `decodes_s` is an average of other steps: it may take at most three quarters of this step's time.
            self._prompts.add(prompt_tokens, max(step_s - decodes_s, step_s / 4))
        elif output_tokens:
            self._decode_steps.add(1, step_s)
            self._decode.add(output_tokens / num_decodes, step_s)


class TransferRate:
    """The transfer rate between two tiers, in one direction."""

    def __init__(self) -> None:
        self._ratio = _Ratio()
        self._refusals = 0

    @property
    def bytes_per_s(self) -> float:
        return self._ratio.value

    def add(self, num_bytes: int, seconds: float) -> None:
        self._ratio.add(num_bytes, seconds)

    def predict_s(self, num_bytes: int) -> float:
        """Predict how long a transfer takes.

        Without a measurement the rate counts as infinite, so that a transfer is tried and measured.
        """
        return _TRANSFER_OVERHEAD_S + num_bytes / (self._ratio.value or math.inf) if num_bytes else 0.0

    def is_worth_it(self, predicted_s: float, recompute_s: float) -> bool:
        """True if fetching is faster than computing again. Now and then a slow transfer is tried anyway."""
        if predicted_s < recompute_s:
            return True
        self._refusals += 1
        return self._refusals % _TRY_EVERY == 0


class _Ratio:
    def __init__(self) -> None:
        self._amount = self._time = 0.0

    @property
    def value(self) -> float:
        return self._amount / self._time if self._time else 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * _DECAY + amount
        self._time = self._time * _DECAY + seconds
