"""How fast a model computes, as moving averages over measured steps.

Time and tokens are averaged apart and divided last, so that a step counts by its size: a thousand prompts of ten tokens
say little about one of ten thousand.
"""

from collections.abc import Iterable

from engine.scheduler import Chunk

_DECAY = 0.95  # a step's weight halves after 13 further steps of its kind


class Rates:
    def __init__(self) -> None:
        self._prefill = _Ratio()
        self._decode = _Ratio()

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill.value

    @property
    def decode_tokens_per_s(self) -> float:
        """Per sequence."""
        return self._decode.value

    def count(self, chunks: Iterable[Chunk], step_s: float) -> None:
        prefilled = sum(chunk.length for chunk in chunks if not chunk.is_decode)
        if prefilled:
            self._prefill.add(prefilled, step_s)  # decodes that ride along make it slower, as they will the next time
        else:
            self._decode.add(1, step_s)


class _Ratio:
    def __init__(self) -> None:
        self._amount = self._time = 0.0

    @property
    def value(self) -> float:
        return self._amount / self._time if self._time else 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * _DECAY + amount
        self._time = self._time * _DECAY + seconds
