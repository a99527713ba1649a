"""The sampler against enumeration: which tokens survive, and with which probability, from a few lines of plain
Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.sample
from kernels.checks import ArgumentError
from kernels.draws import HEAVIEST, POWER, Draw, Draws
from kernels.sample import choose, highest, pick, piece_sums, sample, weigh


def reference_distribution(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, min_p: float
) -> list[float]:
    """Probabilities after temperature, then min-p, top-k and top-p, ties kept together."""
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


def draw(
    logits: torch.Tensor, u: torch.Tensor, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> torch.Tensor:
    """One token for each of the numbers `u`."""
    draws = Draws.of([Draw(temperature, top_k, top_p, min_p, 0, 0)] * len(u), logits.shape[-1])
    rows = logits.expand(len(u), -1).contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.sample, "uniform", lambda *_: u)
        return sample(rows, rows.amax(-1), draws)


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
def test_an_even_grid_of_numbers_reproduces_the_distribution(
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    candidates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels.sample, "NUM_CANDIDATES", candidates)  # 4: the nucleus is looked for again and again
    logits = torch.randn(42, generator=torch.Generator().manual_seed(6)) * 2
    n = 20_000
    ids = draw(logits, (torch.arange(n, dtype=torch.float64) + 0.5) / n, temperature, top_k, top_p, min_p)
    expected = reference_distribution(logits.tolist(), temperature, top_k, top_p, min_p)
    drawn = torch.bincount(ids, minlength=42) / n
    for token, probability in enumerate(expected):
        assert (drawn[token] > 0) == (probability > 1 / n) or 0 < probability <= 1 / n
        assert abs(drawn[token].item() - probability) <= 2 / n + 1e-6


def test_tied_tokens_stay_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert set(draw(logits, u, 1.0, 2, 1.0, 0.0).tolist()) == {1, 2, 3, 4}
    assert set(draw(logits, u, 1.0, None, 0.6, 0.0).tolist()) == {1, 2, 3, 4}


def test_each_row_follows_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    parameters = [(1.0, None, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, None, 0.1, 0.0), (0.01, None, 1.0, 0.0)]
    draws = Draws.of([Draw(*row, 0, 0) for row in parameters], 4)
    numbers = torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    monkeypatch.setattr(kernels.sample, "uniform", lambda *_: numbers)
    assert sample(logits, logits.amax(-1), draws).tolist() == [0, 3, 3, 3]


def picked_from(weights: torch.Tensor, u: float) -> list[int]:
    def weights_of(entries: torch.Tensor) -> torch.Tensor:
        inside = entries < weights.shape[1]
        return weights.gather(1, entries.where(inside, 0)) * inside

    numbers = torch.full((len(weights),), u, dtype=torch.float64)
    picked: list[int] = pick(piece_sums(weights), numbers, weights_of).tolist()
    return picked


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
    logits[0, :2500] = 1e-3  # half of the tokens are a little likelier: exactly they are the nucleus of 0.5
    u = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    ids = draw(logits, u, 1.0, None, 0.5, 0.0)
    assert ids.max().item() < 2500
    assert ids.unique().numel() == 2500


def test_weights_are_powers_of_two_to_fp32_precision() -> None:
    distances = torch.cat((torch.linspace(0, 1, 10_001), torch.linspace(1, 41, 10_001)))
    costs, weights = weigh(-distances.unsqueeze(0), torch.zeros(1), torch.tensor([2.0**24], dtype=torch.float64))
    exact = HEAVIEST * torch.exp2(-distances.double())
    assert torch.equal(costs[0], (distances.double() * 2**24).int())
    # the polynomial's error, half a unit of the cost, and a whole one of the integer
    assert ((weights[0] - exact).abs() <= exact * (2.6e-7 + 2.0**-24) + 1).all()
    assert weights[0, 0] == HEAVIEST
    assert POWER[-1] == 2.0**24


def test_what_is_no_number_gets_a_token_all_the_same() -> None:
    logits = torch.zeros(3, 7)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    logits[2, 5] = torch.inf
    ids, tops = choose(logits, Draws.of([Draw(1.0, 3, 0.9, 0.0, 1, 1)] * 3, 7))
    assert bool(((ids >= 0) & (ids < 7)).all())
    assert tops.isfinite().tolist() == [False] * 3


@pytest.mark.parametrize("vocab", [1, 5, 16, 431, 32000])
def test_the_highest_is_the_first_of_equals_and_no_number_if_any_is_none(vocab: int) -> None:
    logits = torch.randn(6, vocab + 3)[:, :vocab]
    logits[1] = logits[1].round()  # many are equal
    logits[2] = -torch.inf
    logits[3, vocab // 2] = torch.inf
    logits[4, vocab - 1] = torch.nan
    logits[5, vocab // 3 :] = torch.nan
    ids, tops = highest(logits)
    best = logits.max(dim=-1)
    assert torch.equal(tops[:4], best.values[:4])
    assert tops[4:].isnan().all()
    assert ids.tolist() == [
        int((row.isnan() if row.isnan().any() else row == row.max()).nonzero()[0]) for row in logits
    ]


def test_what_cannot_be_chosen_from_is_named() -> None:
    draws = Draws.of([Draw(1.0, None, 1.0, 0.0, 1, 1)] * 2, 7)
    with pytest.raises(ArgumentError, match="choose: logits has dtype float16"):
        choose(torch.zeros(2, 7).half(), draws)
    with pytest.raises(ArgumentError, match="choose: logits has 0 entries a row"):
        choose(torch.zeros(2, 0), draws)
    with pytest.raises(
        ArgumentError, match=r"choose: draws.integers has shape \[4, 2\], wanted \[4, rows\] with rows = 3"
    ):
        choose(torch.zeros(3, 7), draws)
    with pytest.raises(ArgumentError, match="choose: logits has stride 2 in dimension 1"):
        choose(torch.zeros(7, 2).T, draws)
