"""How fast a model computes and a tier delivers, as moving averages over what was measured.

Time and amounts are averaged apart and divided last, so that a step counts by its size: a thousand prompts of ten
tokens say little about one of ten thousand.
"""

import math

_DECAY = 0.95  # a step's weight halves after 13 further steps of its kind
# Of a transfer of any size: a thread is woken, and its end is noticed at the next step or a millisecond later.
_TRANSFER_OVERHEAD_S = 0.002
_TRY_EVERY = 16  # refusals, after which one is let through: a tier that was slow once may have become fast


class Rates:
    def __init__(self) -> None:
        self._prefill = _Ratio()
        self._decode = _Ratio()
        self._decode_steps = _Ratio()
        self._prompts = _Ratio()  # prefill, less what the decodes beside it take by themselves

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill.value

    @property
    def decode_tokens_per_s(self) -> float:
        """Per sequence."""
        return self._decode.value

    def num_prompt_tokens_in(self, seconds: float) -> float:
        """Return how many prompt tokens make a step longer by so much; infinity before any was measured."""
        return seconds * self._prompts.value if self._prompts.value else math.inf

    def count(self, prompt_tokens: int, num_decodes: int, output_tokens: int, step_s: float) -> None:
        """Count a step. `output_tokens`: of all its decodes, each of which may have several."""
        if prompt_tokens:
            self._prefill.add(prompt_tokens, step_s)  # decodes beside them make it slower, as they will the next time
            decodes_s = 1 / self._decode_steps.value if num_decodes and self._decode_steps.value else 0.0
            # An average of other steps: of this one, no more than three quarters are taken for theirs.
            self._prompts.add(prompt_tokens, max(step_s - decodes_s, step_s / 4))
        elif output_tokens:
            self._decode_steps.add(1, step_s)
            self._decode.add(output_tokens / num_decodes, step_s)


class TransferRate:
    """The rate of one way between two tiers."""

    def __init__(self) -> None:
        self._ratio = _Ratio()
        self._refusals = 0

    @property
    def bytes_per_s(self) -> float:
        return self._ratio.value

    def add(self, num_bytes: int, seconds: float) -> None:
        self._ratio.add(num_bytes, seconds)

    def predict_s(self, num_bytes: int) -> float:
        """Predict how long a transfer takes. An unmeasured way is taken to be fast: then it will be measured."""
        return _TRANSFER_OVERHEAD_S + num_bytes / (self._ratio.value or math.inf) if num_bytes else 0.0

    def is_worth_it(self, predicted_s: float, recompute_s: float) -> bool:
        """Tell whether to fetch rather than compute again. Now and then a slow way is tried all the same."""
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
