"""Bias and penalties equal their definitions, entry by entry, and those that `transformers` has."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from pilotlight.kernels.sampling.penalties import LogitEntries, penalize_, restore_


def entries_of(rows: list[list[float]]) -> LogitEntries:
    """Return entries from tuples (row, token id, bias, seen, num_outputs, repetition, presence, frequency)."""
    columns = torch.tensor(rows).unbind(1)
    return LogitEntries(columns[0].long(), columns[1].long(), *columns[2:])


@pytest.mark.parametrize("logit", [3.0, 0.0, -3.0])
@pytest.mark.parametrize(
    ("bias", "seen", "outputs", "repetition", "presence", "frequency"),
    [
        (0.0, 1, 0, 1.3, 1.5, 0.7),  # only in the prompt: the repetition penalty applies, the others do not
        (0.0, 1, 3, 1.3, 1.5, 0.7),
        (0.0, 1, 3, 0.5, -2.0, -2.0),
        (-5.0, 0, 0, 1.3, 1.5, 0.7),  # in neither prompt nor output: only the bias applies
        (5.0, 1, 1, 1.3, 0.0, 0.0),  # the bias makes a negative logit positive before the repetition penalty divides it
        (-100.0, 1, 2, 1.0, 2.0, 2.0),
    ],
)
def test_an_entry_is_biased_then_penalized(
    logit: float, bias: float, seen: int, outputs: int, repetition: float, presence: float, frequency: float
) -> None:
    logits = torch.full((2, 5), logit)
    penalize_(logits, entries_of([[1, 3, bias, seen, outputs, repetition, presence, frequency]]))
    expected = logit + bias
    if seen:
        expected = expected / repetition if expected > 0 else expected * repetition
    expected -= frequency * outputs + (presence if outputs else 0.0)
    assert logits[1, 3].item() == pytest.approx(expected, rel=1e-6)
    logits[1, 3] = logit
    assert torch.equal(logits, torch.full((2, 5), logit)), "no other entry was touched"


def test_repetition_agrees_with_transformers() -> None:
    logits = torch.randn(1, 123)
    seen = torch.tensor([[5, 42, 6, 42, 122]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits.clone())
    penalize_(logits, entries_of([[0, token, 0.0, 1, 0, 1.7, 0.0, 0.0] for token in seen.unique().tolist()]))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)


def test_what_was_changed_is_put_back_to_the_bit() -> None:
    logits = torch.randn(3, 431)
    original = logits.clone()
    entries = entries_of([[i % 3, 7 * i, 0.1 * i, 1, i, 1.1, 0.3, 0.2] for i in range(42)])
    before = penalize_(logits, entries)
    assert not torch.equal(logits, original)
    restore_(logits, entries, before)
    assert torch.equal(logits, original)
