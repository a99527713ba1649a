"""Triton's sampler draws the same tokens as the torch form, with chunks so small that every path of the kernels is taken.

A row's token is the same alone and in a batch.
"""

import random
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import pilotlight.kernels.triton.sampling.sample as triton_sample
from pilotlight.kernels.sampling.sample import sample
from pilotlight.kernels.sampling.sampling_batch import SamplingBatch, SamplingRow
from tests.kernels.conftest import on_device

LOGITS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda rows, vocab: 3 * torch.randn(rows, vocab),
    "flat": lambda rows, vocab: 1e-4 * torch.randn(rows, vocab),
    "tied": lambda rows, vocab: torch.randint(0, 6, (rows, vocab)).float(),
    "spikes": lambda rows, vocab: 10 * (torch.rand(rows, vocab) < 0.02) + 0.1 * torch.randn(rows, vocab),
    "half forbidden": lambda rows, vocab: torch.where(
        torch.rand(rows, vocab) < 0.5, -torch.inf, torch.randn(rows, vocab)
    ).index_fill(1, torch.tensor([0]), 1.0),
}


def some_row(chance: random.Random, vocab: int) -> SamplingRow:
    return SamplingRow(
        temperature=chance.choice([0.0, 0.01, 0.7, 1.0, 1.5, 5.0]),
        top_k=chance.choice([None, None, 1, 2, 5, 40, vocab]),
        top_p=chance.choice([1.0, 1.0, 0.01, 0.3, 0.5, 0.9, 0.99, 0.9999999]),
        min_p=chance.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=chance.getrandbits(64),
        position=chance.getrandbits(33),
    )


@pytest.mark.long
@pytest.mark.parametrize("vocab", [1, pytest.param(63, marks=pytest.mark.slow), 64, 431])
@pytest.mark.parametrize("kind", LOGITS)
def test_both_forms_choose_the_same_tokens(kind: str, vocab: int) -> None:
    # several chunks and tiles per row; smaller ones take 20 s for 431 entries
    chunk, tile = (64, 16) if vocab <= 64 else (128, 64)
    chance = random.Random(f"{kind} {vocab}")
    logits = LOGITS[kind](6, vocab)
    batch = SamplingBatch.of([some_row(chance, vocab) for _ in range(6)], vocab, on_device)
    for expected, actual in zip(sample(logits, batch), triton_sample.sample(logits, batch, chunk, tile), strict=True):
        assert torch.equal(expected, actual)


def test_a_row_is_the_same_in_any_company() -> None:
    chance = random.Random(5)
    logits, asked = 3 * torch.randn(5, 431), [some_row(chance, 431) for _ in range(5)]
    together = triton_sample.sample(logits, SamplingBatch.of(asked, 431, on_device))[0].tolist()
    assert [
        triton_sample.sample(logits[i : i + 1], SamplingBatch.of(asked[i : i + 1], 431, on_device))[0].item()
        for i in range(5)
    ] == together


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by numpy, which interprets inf - inf
def test_what_is_no_number_gets_a_token_all_the_same() -> None:
    logits = torch.zeros(4, 7)
    logits[0, 3], logits[1], logits[2, 5] = torch.nan, -torch.inf, torch.inf
    for temperature in (0.0, 1.0):
        batch = SamplingBatch.of([SamplingRow(temperature, 3, 0.9, 0.0, 1, 1)] * 4, 7, on_device)
        ids, highest = triton_sample.sample(logits, batch)
        assert bool(((ids >= 0) & (ids < 7)).all())
        assert highest.isfinite().tolist() == [False, False, False, True]
