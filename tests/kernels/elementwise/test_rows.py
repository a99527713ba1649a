"""Rows of a table by number are bit-identical in C and torch."""

import pytest
import torch

from pilotlight.kernels.elementwise.rows import rows_of

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 24), (123, 431), (40, 1024)])
def test_rows_are_copied_as_they_are(rows: int, size: int, dtype: torch.dtype) -> None:
    table = torch.randn(50, size).to(dtype)
    numbers = torch.randint(0, 50, (rows,))
    assert torch.equal(rows_of(table, numbers), torch.stack([table[int(number)] for number in numbers]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_is_rounded_once(dtype: torch.dtype) -> None:
    table, numbers = torch.randn(9, 431).to(dtype), torch.tensor([8, 0, 3, 3])
    assert torch.equal(rows_of(table, numbers, 34.0), (table[numbers].double() * 34.0).to(dtype))


@pytest.mark.cpu_only  # on a GPU a number outside the table makes the device unusable for the process
@pytest.mark.parametrize("number", [-1, 9, 1 << 40])
def test_a_number_that_the_table_does_not_have_is_noticed_and_harms_no_other(number: int, arithmetic: str) -> None:
    table, numbers = torch.randn(9, 24), torch.tensor([3, number, 8])
    if arithmetic == "torch":
        with pytest.raises((IndexError, RuntimeError)):
            rows_of(table, numbers)
        return
    found = rows_of(table, numbers)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], table[[3, 8]])


def test_numbers_that_are_no_int64_and_strided_tables_are_torchs() -> None:
    table = torch.randn(9, 48)[:, :24]
    assert torch.equal(rows_of(table, torch.tensor([1, 2], dtype=torch.int32)), table[1:3])
