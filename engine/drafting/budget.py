"""Chooses the number of drafts in a step that gives the most tokens per second.

Drafts of all sequences are taken in order of the probability that they are accepted. Prompts in the same step are ignored: drafts do not change their
cost.
"""

from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from operator import mul

from pilotlight.engine.drafting.costs import StepCosts

# Allowed numbers of drafts in one step: few, because each needs a recorded step (decode_graphs.py).
_SIZES = (1, 2, 3, 4, 6, 8, 12, 15, 24, 32, 48, 64, 96, 128)
_LEAST_GAIN = 1.06  # predictions are not precise enough for smaller gains
_MOST_GUESSED = 6  # limit of drafts for one sequence from a drafter that computes them one after another


def allot(
    proposed: SequenceOf[SequenceOf[float]],
    costs: StepCosts,
    num_decodes: int,
    num_rows: int,
    bias: float = 1.0,
    turn_lost: float = 0.0,
) -> list[int]:
    """Return for each sequence how many of its drafts to verify.

    `proposed`: for each draft, the probability that it is right if the drafts before it are; `num_decodes`: number of sequences that get a token;
    `num_rows`: rows of the step without drafts; `bias`: ratio of right drafts to expected ones; `turn_lost`: tokens that a sequence with drafts loses
    because it misses the next of two overlapping steps.
    """
    # The probability that a draft is accepted: it and all drafts before it are right.
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
    """Return how many tokens to guess for each sequence; 0 if none pay off.

    `chances`: for each sequence, the probability that a guess is right if the guesses before it are; `guess_s`: time of one guess for all sequences;
    other arguments as in `allot`.
    """
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
