import pytest
import torch

from pilotlight.kernels.sampling.philox import philox4x32, uniform

ONES = 0xFFFFFFFF
# Test vectors of the authors' implementation (kat_vectors of Random123).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors_are_reproduced(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    computed = philox4x32(torch.tensor(counter).unsqueeze(1), torch.tensor(key).unsqueeze(1))
    assert computed.squeeze(1).tolist() == list(words)


def test_rows_do_not_influence_each_other() -> None:
    counters = torch.tensor([counter for counter, _, _ in KNOWN]).T
    keys = torch.tensor([key for _, key, _ in KNOWN]).T
    assert philox4x32(counters, keys).T.tolist() == [list(words) for _, _, words in KNOWN]


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    position = torch.arange(50_000)
    numbers = uniform(torch.full_like(position, 7), torch.zeros_like(position), position)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = torch.histc(numbers.float(), bins=50, min=0.0, max=1.0)
    chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
    assert chi_square < 94  # the 99.99th percentile for 49 degrees of freedom; the numbers are the same in every run
    assert abs(torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1].item()) < 0.02


def test_seed_halves_and_position_halves_all_matter() -> None:
    one, zero = torch.tensor([1]), torch.tensor([0])
    far = torch.tensor([1 << 32])
    draws = [
        uniform(*row).item() for row in [(zero, zero, zero), (one, zero, zero), (zero, one, zero), (zero, zero, one)]
    ]
    assert len({*draws, uniform(zero, zero, far).item()}) == 5
