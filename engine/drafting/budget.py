"""How many of the proposed drafts are worth their rows: the number with which the batch gets the most tokens a second.

Drafts are taken in order of how likely they are to count, whosever they are. What prompts in the same step take is spent either way, and left out.
"""

from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from operator import mul

from pilotlight.engine.drafting.costs import StepCosts

# Of drafts in one step: few sizes, so that steps are of few shapes, which are recorded (decode_graphs.py).
_SIZES = (1, 2, 3, 4, 6, 8, 12, 15, 24, 32, 48, 64, 96, 128)
_LEAST_GAIN = 1.06  # below it, predictions are no better than a coin
_MOST_GUESSED = 6  # tokens of each sequence, by a drafter that computes them one after another


def allot(
    proposed: SequenceOf[SequenceOf[float]],
    costs: StepCosts,
    num_decodes: int,
    num_rows: int,
    bias: float = 1.0,
    turn_lost: float = 0.0,
) -> list[int]:
    """Return how many of each sequence's drafts to check. `proposed`: for each of them how likely it is right if those before are; `num_decodes`:
    the step's sequences that get a token; `num_rows`: of the step without drafts; `bias`: how many drafts were right of as many as were expected to
    be; `turn_lost`: tokens that a sequence with drafts goes without, where it must wait for them while others are computed."""
    # Of each draft, that it counts: all up to it are right.
    counting = [list(accumulate(chances, mul)) for chances in proposed]
    worth = [(i, chances) for i, chances in enumerate(counting) if bias * sum(chances) > turn_lost]
    likely = sorted([(-chance, i) for i, chances in worth for chance in chances])
    expected, with_drafts = [float(num_decodes)], set()
    for chance, i in likely:
        expected.append(expected[-1] - bias * chance - (0.0 if i in with_drafts else turn_lost))
        with_drafts.add(i)
    decodes_s, step_s = costs.predict_s(num_decodes), costs.predict_s(num_rows)
    best, num_best = _LEAST_GAIN * num_decodes / decodes_s, 0
    for size in (*_SIZES, len(likely)):
        if size > len(likely):
            continue
        rate = expected[size] / (decodes_s + costs.predict_s(num_rows + size, size) - step_s)
        if rate > best:
            best, num_best = rate, size
    counts = [0] * len(proposed)
    for _, i in likely[:num_best]:
        counts[i] += 1
    return counts


def num_worth_guessing(
    chances: SequenceOf[float],
    guess_s: float,
    costs: StepCosts,
    num_decodes: int,
    num_rows: int,
    bias: float = 1.0,
    turn_lost: float = 0.0,
) -> int:
    """Return how many tokens of each sequence to guess, of which each is right with its sequence's chance if those before are: none where it does not
    pay. `guess_s`: what a guess of all takes; the rest as `allot` has it."""
    decodes_s, step_s = costs.predict_s(num_decodes), costs.predict_s(num_rows)
    best, num_best = _LEAST_GAIN * num_decodes / decodes_s, 0
    expected, each = num_decodes - turn_lost * len(chances), list(chances)
    for length in range(1, _MOST_GUESSED + 1):
        expected += bias * sum(each)
        each = list(map(mul, each, chances))
        num_drafts = length * len(chances)
        checked_s = decodes_s + costs.predict_s(num_rows + num_drafts, num_drafts) - step_s
        rate = expected / (checked_s + length * guess_s)
        if rate > best:
            best, num_best = rate, length
    return num_best
