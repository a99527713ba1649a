"""Low-rank adapters beside a product: a token's result does not depend on others, and replays use the slots' present adapters."""

import pytest
import torch
from torch import Tensor

from load_tests.catalogue.adapters import random_adapters
from pilotlight.kernels import lora
from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.cpu.recording import ProgramRecorder
from pilotlight.kernels.lora import add_lora, blocked
from tests.kernels.conftest import DEVICE, set_debug_mode

SIZES, COLUMNS = (70, 33, 5), 331
ENDS = (70, 103, 108)
DTYPES = [torch.float32, torch.bfloat16]


def call(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    adapters, places = random_adapters((8, 16, 64, 32), SIZES, COLUMNS, dtype, without=((1, 1),))
    return torch.randn(tokens, ENDS[-1]).to(dtype), torch.randn(tokens, COLUMNS).to(dtype), adapters, places


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, 61])
def test_a_token_has_the_same_bits_in_any_company(tokens: int, dtype: torch.dtype, arithmetic: str) -> None:
    if arithmetic == "torch":
        pytest.skip("torch's products have the bits of their batch")
    y, x, adapters, places = call(tokens, dtype)
    slots = torch.randint(-1, 4, (tokens,)).sort().values
    alone = [
        add_lora(y[i : i + 1].clone(), x[i : i + 1], adapters, places, slots[i : i + 1], ENDS) for i in range(tokens)
    ]
    assert torch.equal(add_lora(y.clone(), x, adapters, places, slots, ENDS), torch.cat(alone))
    order = torch.randperm(tokens)
    mixed = add_lora(y[order], x[order], adapters, places, slots[order], ENDS)
    assert torch.equal(mixed, torch.cat(alone)[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_without_an_adapter_stays_as_it_was(dtype: torch.dtype) -> None:
    y, x, adapters, places = call(20, dtype)
    slots = torch.tensor([-1, 0] * 10)
    added = add_lora(y.clone(), x, adapters.fill_(torch.nan), places, slots, ENDS)
    assert torch.equal(added[::2], y[::2])
    assert added[1::2].isnan().all()


@pytest.mark.cpu_only
def test_a_recorded_call_follows_the_slots_and_their_content(arithmetic: str) -> None:
    if arithmetic == "torch":
        pytest.skip("torch's calls are not recorded")
    _, x, adapters, places = call(6, torch.float32)
    slots, weight = torch.tensor([0, -1, 1, 1, 2, 3]), torch.randn(ENDS[-1], COLUMNS)

    def computed() -> tuple[Tensor]:
        from pilotlight.kernels.matrices.linear import linear

        return (add_lora(linear(x, weight), x, adapters, places, slots, ENDS),)

    with torch.inference_mode():
        program = ProgramRecorder(torch.float32).record(computed)
        slots.copy_(torch.tensor([3, 3, -1, 0, 2, 1]))
        adapters.mul_(1.5)
        places[3, 0, 2] = 0
        x.add_(0.25)
        program.replay()
        assert torch.equal(program.output[0], computed()[0])


@pytest.mark.parametrize(("rows", "rank"), [(1, 8), (64, 8), (130, 16)])
def test_blocks_hold_every_row_once_and_zeros_after_them(rows: int, rank: int) -> None:
    b = torch.randn(rows, rank)
    blocks = blocked(b)
    assert blocks.shape == (-(-rows // 64), rank, 64)
    flat = blocks.transpose(1, 2).flatten(0, 1)
    assert torch.equal(flat[:rows], b)
    assert not flat[rows:].any()


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (8, 8), (9, 16), (33, 64), (64, 64)])
def test_ranks_are_padded_to_a_class(rank: int, padded: int) -> None:
    assert lora.padded_rank(rank) == padded


def test_wrong_arguments_are_named() -> None:
    y, x, adapters, places = call(3, torch.float32)
    slots = torch.tensor([0, 1, -1])
    for changed, name in (
        ({"y": y[:, :-1]}, "y"),
        ({"adapters": adapters.half()}, "adapters"),
        ({"places": places[:, :2]}, "places"),
        ({"slots": slots.int()}, "slots"),
        ({"slots": slots[:2]}, "slots"),
        ({"ends": (70, 103)}, r"ends\[-1\]"),
        ({"ends": (1, 2, 3, 108)}, "ends"),
    ):
        given = {"y": y, "x": x, "adapters": adapters, "places": places, "slots": slots, "ends": ENDS} | changed
        with pytest.raises(ArgumentError, match=f"add_lora: {name}"):
            add_lora(**given)


def test_a_slot_that_is_not_there_is_refused_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    set_debug_mode(monkeypatch)
    y, x, adapters, places = call(2, torch.float32)
    with pytest.raises(ArgumentError, match="slots holds 4"):
        add_lora(y, x, adapters, places, torch.tensor([0, 4], device=DEVICE), ENDS)
