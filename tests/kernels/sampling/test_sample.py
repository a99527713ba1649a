"""The sampler draws the surviving tokens with the probabilities that a few lines of plain Python compute."""

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.sampling.philox import uniform
from pilotlight.kernels.sampling.sample import NUM_CANDIDATES, argmax, draw, pick, piece_sums, sample, weigh
from pilotlight.kernels.sampling.sampling_batch import HEAVIEST, POWER, SamplingBatch, SamplingRow
from tests.kernels.conftest import on_device


def reference_distribution(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, min_p: float
) -> list[float]:
    """Return probabilities after temperature, then min-p, top-k and top-p, ties kept together."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    floor = min_p
    if top_k is not None:
        floor = max(floor, sorted(weights, reverse=True)[top_k - 1])
    kept = sorted((w for w in weights if w >= floor), reverse=True)
    mass = 0.0
    for w in kept:
        mass += w
        if top_p < 1.0 and mass >= top_p * math.fsum(kept):
            floor = max(floor, w)
            break
    weights = [w if w >= floor else 0.0 for w in weights]
    return [w / math.fsum(weights) for w in weights]


def drawn_with(
    logits: torch.Tensor,
    u: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    candidates: int = NUM_CANDIDATES,
) -> torch.Tensor:
    """Draw one token for each uniform number in `u`."""
    batch = SamplingBatch.of(
        [SamplingRow(temperature, top_k, top_p, min_p, 0, 0)] * len(u), logits.shape[-1], on_device
    )
    rows = logits.expand(len(u), -1).contiguous()
    return draw(rows, rows.amax(-1), batch, lambda *_: u, candidates)


CASES = [
    (1.0, None, 1.0, 0.0),
    (0.7, None, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.3, None, 0.8, 0.0),
    (1.0, None, 1.0, 0.2),
    (0.9, 20, 0.9, 0.05),
    (1.0, 1, 1.0, 0.0),
    (2.0, None, 1e-6, 0.0),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), CASES)
@pytest.mark.parametrize("candidates", [256, 4])
def test_numbers_at_both_ends_of_every_tokens_share_draw_that_token(
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    candidates: int,
) -> None:
    """Few candidates make the search for the nucleus take several rounds."""
    logits = on_device(torch.randn(42, generator=torch.Generator().manual_seed(6), device="cpu")) * 2
    shares = reference_distribution(logits.tolist(), temperature, top_k, top_p, min_p)
    ends = list(accumulate(shares))
    wide = [token for token in range(42) if shares[token] > 3e-6]
    numbers = [u for token in wide for u in (ends[token] - shares[token] + 1e-6, ends[token] - 1e-6)]
    ids = drawn_with(logits, torch.tensor(numbers, dtype=torch.float64), temperature, top_k, top_p, min_p, candidates)
    assert ids.tolist() == [token for token in wide for _ in range(2)]


def test_tied_tokens_stay_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert set(drawn_with(logits, u, 1.0, 2, 1.0, 0.0).tolist()) == {1, 2, 3, 4}
    assert set(drawn_with(logits, u, 1.0, None, 0.6, 0.0).tolist()) == {1, 2, 3, 4}


def in_bits(*distances: float) -> torch.Tensor:
    """Return a row whose tokens weigh exactly 2**-distance of the likeliest, on the scale that `sampled` sets."""
    return -torch.tensor(distances, dtype=torch.float32)


def sampled(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    row: SamplingRow,
    *,
    truncates: bool = False,
    candidates: int = NUM_CANDIDATES,
) -> set[int]:
    """Return the tokens that `numbers` draw from logits [vocab], whose unit is a factor of two."""
    batch = SamplingBatch.of([row] * len(numbers), logits.shape[-1], on_device)
    batch.reals[0] = 2.0**24
    batch = batch._replace(truncates=batch.truncates or truncates)
    rows = logits.expand(len(numbers), -1).contiguous()
    return set(draw(rows, rows.amax(-1), batch, lambda *_: on_device(numbers), candidates).tolist())


EIGHTHS = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
LAST = torch.tensor([1 - 2.0**-53], dtype=torch.float64)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {0}), (0.75, {0, 1}), (0.750001, {0, 1, 2, 3}), (0.49, {0})])
def test_a_nucleus_ends_with_the_token_that_fills_it(top_p: float, kept: set[int]) -> None:
    """Weights are 4, 2, 1 and 1, so the shares are exact and no further token may be kept."""
    assert sampled(in_bits(0, 1, 2, 2), EIGHTHS, SamplingRow(1.0, None, top_p, 0.0, 0, 0)) == kept


def test_a_top_k_beyond_the_first_candidates_keeps_as_many_tokens() -> None:
    logits = in_bits(*(i / 1024 for i in range(600)))
    assert NUM_CANDIDATES < 500
    assert sampled(logits, LAST, SamplingRow(1.0, 500, 1.0, 0.0, 0, 0)) == {499}
    assert sampled(logits, LAST, SamplingRow(1.0, None, 1.0, 0.0, 0, 0)) == {599}


def test_a_row_whose_top_p_is_one_loses_nothing_beside_rows_that_are_truncated() -> None:
    """The first token's share is below 2**-53. A nucleus of the rounded total weight would end before it."""
    logits, number = in_bits(42, *[0] * 2048), torch.zeros(1, dtype=torch.float64)
    beside = SamplingRow(1.0, None, 1.0, 0.0, 0, 0)
    for truncates in (False, True):
        assert sampled(logits, number, beside, truncates=truncates, candidates=4096) == {0}


def test_every_half_of_a_seed_counts() -> None:
    """One of 2**16 equal tokens is chosen by the first bits of the random number of (both halves, position)."""
    seeds, vocab = [0, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1], 1 << 16
    batch = SamplingBatch.of([SamplingRow(1.0, None, 1.0, 0.0, seed, 5) for seed in seeds], vocab, on_device)
    low, high = (torch.tensor([seed >> shift & 0xFFFFFFFF for seed in seeds]) for shift in (0, 32))
    expected = (uniform(low, high, torch.full((len(seeds),), 5)) * vocab).long().tolist()
    assert draw(torch.zeros(len(seeds), vocab), torch.zeros(len(seeds)), batch).tolist() == expected
    assert len(set(expected)) == len(seeds)


def test_each_row_follows_its_own_parameters() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    parameters = [(1.0, None, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, None, 0.1, 0.0), (0.01, None, 1.0, 0.0)]
    batch = SamplingBatch.of([SamplingRow(*row, 0, 0) for row in parameters], 4, on_device)
    numbers = torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    assert draw(logits, logits.amax(-1), batch, lambda *_: numbers).tolist() == [0, 3, 3, 3]


def picked_from(weights: torch.Tensor, u: float) -> list[int]:
    def weights_of(entries: torch.Tensor) -> torch.Tensor:
        inside = entries < weights.shape[1]
        return weights.gather(1, entries.where(inside, 0)) * inside

    numbers = torch.full((len(weights),), u, dtype=torch.float64)
    picked: list[int] = pick(piece_sums(weights), numbers, weights_of).tolist()
    return picked


@pytest.mark.long
@given(
    st.lists(st.integers(0, HEAVIEST), min_size=1, max_size=40).filter(lambda w: sum(w) > 0),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_token_without_weight_is_never_picked(weights: list[int], u: float) -> None:
    assert weights[picked_from(torch.tensor([weights]), u)[0]] > 0


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 128_256])
def test_large_vocabularies_are_picked_from_without_gaps(vocab: int, u: float) -> None:
    weights = torch.zeros(2, vocab, dtype=torch.int64)
    weights[0, -1] = 1
    weights[1, 0] = HEAVIEST
    assert picked_from(weights, u) == [vocab - 1, 0]


def test_a_flat_distribution_over_a_large_vocabulary_keeps_its_nucleus() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :2500] = 1e-3  # half of the tokens are slightly likelier, and are exactly the nucleus of 0.5
    tokens = [0, 1, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2498, 2499]
    u = (torch.tensor(tokens, dtype=torch.float64) + 0.5) / 2500
    assert drawn_with(logits, u, 1.0, None, 0.5, 0.0).tolist() == tokens


def test_weights_are_powers_of_two_to_fp32_precision() -> None:
    distances = torch.cat((torch.linspace(0, 1, 10_001), torch.linspace(1, 41, 10_001)))
    costs, weights = weigh(-distances.unsqueeze(0), torch.zeros(1), torch.tensor([2.0**24], dtype=torch.float64))
    exact = HEAVIEST * torch.exp2(-distances.double())
    assert torch.equal(costs[0], (distances.double() * 2**24).int())
    # allowed errors: that of the polynomial, half a unit of the cost, and one unit of the integer weight
    assert ((weights[0] - exact).abs() <= exact * (2.6e-7 + 2.0**-24) + 1).all()
    assert weights[0, 0] == HEAVIEST
    assert POWER[-1] == 2.0**24


def test_what_is_no_number_gets_a_token_all_the_same() -> None:
    logits = torch.zeros(3, 7)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    logits[2, 5] = torch.inf
    ids, tops = sample(logits, SamplingBatch.of([SamplingRow(1.0, 3, 0.9, 0.0, 1, 1)] * 3, 7, on_device))
    assert bool(((ids >= 0) & (ids < 7)).all())
    assert tops.isfinite().tolist() == [False] * 3


@pytest.mark.parametrize("vocab", [1, 5, 16, 431, 32000])
def test_the_highest_is_the_first_of_equals_and_not_a_number_if_any_is_not(vocab: int) -> None:
    logits = torch.randn(6, vocab + 3)[:, :vocab]
    logits[1] = logits[1].round()  # many are equal
    logits[2] = -torch.inf
    logits[3, vocab // 2] = torch.inf
    logits[4, vocab - 1] = torch.nan
    logits[5, vocab // 3 :] = torch.nan
    ids, tops = argmax(logits)
    best = logits.max(dim=-1)
    assert torch.equal(tops[:4], best.values[:4])
    assert tops[4:].isnan().all()
    assert ids.tolist() == [
        int((row.isnan() if row.isnan().any() else row == row.max()).nonzero()[0]) for row in logits
    ]


def test_what_cannot_be_chosen_from_is_named() -> None:
    batch = SamplingBatch.of([SamplingRow(1.0, None, 1.0, 0.0, 1, 1)] * 2, 7, on_device)
    with pytest.raises(ArgumentError, match="sample: logits has dtype float16"):
        sample(torch.zeros(2, 7).half(), batch)
    with pytest.raises(ArgumentError, match="sample: logits has 0 entries a row"):
        sample(torch.zeros(2, 0), batch)
    with pytest.raises(
        ArgumentError, match=r"sample: batch.integers has shape \[4, 2\], wanted \[4, rows\] with rows = 3"
    ):
        sample(torch.zeros(3, 7), batch)
    with pytest.raises(ArgumentError, match="sample: logits has stride 2 in dimension 1"):
        sample(torch.zeros(7, 2).T, batch)


def test_rows_that_are_drawn_and_rows_that_are_not_choose_as_if_they_were_alone() -> None:
    logits = on_device(torch.randn(4, 42, generator=torch.Generator().manual_seed(3), device="cpu"))
    rows = [SamplingRow(2.0 * (i % 2), None, 1.0, 0.0, 7 + i, i) for i in range(4)]
    ids, tops = sample(logits, SamplingBatch.of(rows, 42, on_device))
    alone = [sample(logits[i : i + 1], SamplingBatch.of([row], 42, on_device)) for i, row in enumerate(rows)]
    assert ids.tolist() == [each.item() for each, _ in alone]
    assert tops.tolist() == logits.amax(-1).tolist()
    assert ids[::2].tolist() == logits.argmax(-1)[::2].tolist()
    assert ids[1::2].tolist() != logits.argmax(-1)[1::2].tolist(), "the seeds were chosen so"
