"""The choice of a token from a row of logits without torch.

It equals that of kernels/sampling/sample.py. It uses the C library. Supports rows that are greedy, or sampled with at most min-p. Refuses everything
else: top-k and top-p, for which logits have to be sorted, and unknown parameters.
"""

import ctypes
import math

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.core.results import SampledToken
from pilotlight.kernels.cpu import functions
from pilotlight.kernels.sampling.sampling_scale import PIECE, highest_cost, scale_of

_MASK32 = 0xFFFFFFFF


def can_compute(submit: Submit) -> bool:
    """True if a request uses only the parameters listed here.

    A field that is added elsewhere is refused until it is supported here, too.
    """
    asked = submit.sampling
    plain = SamplingParams(
        asked.max_tokens, asked.temperature, min_p=asked.min_p, seed=asked.seed,
        stop_token_ids=asked.stop_token_ids, ignore_eos=asked.ignore_eos,
    )  # fmt: skip
    return submit == Submit(
        submit.sequence_id, submit.model, submit.prompt_token_ids, plain,
        salt=submit.salt, num_delivered_tokens=submit.num_delivered_tokens, leader=submit.leader, priority=submit.priority,
    )  # fmt: skip


class BootstrapSampler:
    def __init__(self, library: functions.Opened, vocab: int, threads: int) -> None:
        self._argmax = functions.find(library, "argmax")
        self._sums = functions.find(library, "sampling_sums")
        self._uniform = functions.find(library, "philox_uniform")
        self._vocab = vocab
        self._threads = threads

    def choose(self, logits: int, sampling: SamplingParams, position: int) -> SampledToken:
        """Choose a token. `logits`: the address of a row in fp32; `position`: of the token to be chosen."""
        token_id, top = ctypes.c_int64(), ctypes.c_float()
        self._argmax(logits, ctypes.byref(token_id), ctypes.byref(top), 1, self._vocab, self._vocab, self._threads)
        if sampling.temperature == 0 or not math.isfinite(top.value):
            return SampledToken(token_id.value, math.isfinite(top.value))
        return SampledToken(self._draw(logits, top, sampling, position), True)

    def _draw(self, logits: int, top: ctypes.c_float, sampling: SamplingParams, position: int) -> int:
        """Return the first token whose cumulative weight exceeds the drawn share of the total."""
        scale, floor = ctypes.c_double(scale_of(sampling.temperature)), ctypes.c_int64(highest_cost(sampling.min_p))

        def weights(start: int, count: int) -> "ctypes.Array[ctypes.c_int64]":
            """Return the weights of `count` logits, in sums of PIECE."""
            sums = (ctypes.c_int64 * -(-count // PIECE))()
            self._sums(
                *(logits + 4 * start, ctypes.byref(top), ctypes.byref(scale), ctypes.byref(floor), sums),
                *(1, count, count, self._threads),
            )
            return sums

        low, high = ctypes.c_int64(sampling.seed & _MASK32), ctypes.c_int64(sampling.seed >> 32 & _MASK32)
        number = ctypes.c_double()
        self._uniform(
            *(ctypes.byref(low), ctypes.byref(high), ctypes.byref(ctypes.c_int64(position)), ctypes.byref(number), 1)
        )
        sums = weights(0, self._vocab)
        total = sum(sums)
        target = min(int(number.value * float(total)), total - 1)
        piece = 0
        while target >= sums[piece]:
            target -= sums[piece]
            piece += 1
        # Bisect the piece for the shortest prefix that weighs more.
        start, shorter, longer = piece * PIECE, 0, min(PIECE, self._vocab - piece * PIECE)
        while longer - shorter > 1:
            middle = (shorter + longer) // 2
            if weights(start, middle)[0] > target:
                longer = middle
            else:
                shorter = middle
        return start + shorter
