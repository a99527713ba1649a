"""Recurrent layers beyond the catalogue: a token has the same bits in any chunk and batch, and states are in their places."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from load_tests.catalogue.operation import Arguments, copied
from load_tests.catalogue.states import OPERATIONS, state_batch
from pilotlight.kernels.state.short_conv import short_conv
from tests.closeness import assert_close

KEEPING = [operation for operation in OPERATIONS if operation.changes]
LENGTHS = (1, 2, 17, 40)
TOKENS = sum(LENGTHS)


@pytest.fixture
def in_c(arithmetic: str) -> None:
    if arithmetic != "C library":
        pytest.skip("torch computes decodes and chunks in different orders")


def arguments_of(operation: Any, dtype: torch.dtype) -> Arguments:
    """Return a call with one sequence of 60 tokens in four runs, whose sizes fill vectors or leave a rest."""
    (case,) = [case for case in operation.bench if case.name.startswith("2,048")]
    made: Arguments = case.make(dtype)
    batch, blocks = state_batch(((LENGTHS, False),))
    for name, value in made.items():
        if isinstance(value, torch.Tensor) and value.shape[:1] == (2048,):
            made[name] = value[:TOKENS]
    states = made["states"]
    return made | {"batch": batch, "states": torch.randn(blocks, *states.shape[1:]).to(states.dtype)}


def of_tokens(arguments: Arguments, tokens: slice) -> Arguments:
    """Return the same call for some of its tokens."""
    return {
        name: value[tokens] if isinstance(value, torch.Tensor) and value.shape[:1] == (TOKENS,) else value
        for name, value in arguments.items()
    }


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", KEEPING, ids=lambda operation: operation.name)
def test_a_token_has_the_same_bits_in_any_chunk_and_company(operation: Any, dtype: torch.dtype) -> None:
    given = arguments_of(operation, dtype)
    whole = copied(given)
    outputs = operation.function(**whole)
    one_by_one = copied(given)
    states = one_by_one["states"]
    start, block = 0, 0
    for length, after in zip(LENGTHS, whole["batch"].after.tolist(), strict=True):
        # a decode of this token, beside a second sequence that starts with the same token
        for token in range(start, start + length):
            batch, _ = state_batch((((1,), token > 0), ((1,), False)))
            batch = batch._replace(
                before=torch.tensor([block if token else -1, -1]), after=torch.tensor([after, 0]),
            )  # fmt: skip
            both = of_tokens(one_by_one, slice(token, token + 1))
            both = {
                name: torch.cat((value, one_by_one[name][:1])) if value is not one_by_one[name] else value
                for name, value in both.items()
            }
            output = operation.function(**both | {"batch": batch, "states": states})
            assert torch.equal(output[0], outputs[token]), token
            block = after
        start += length
    used = whole["batch"].after
    assert torch.equal(states[used], whole["states"][used])


@pytest.mark.parametrize("operation", KEEPING, ids=lambda operation: operation.name)
def test_no_other_block_is_changed(operation: Any) -> None:
    for case in operation.cases:
        given = case.make(torch.float32)
        before = given["states"].clone()
        operation.function(**given)
        others = [block for block in range(len(before)) if block not in given["batch"].after.tolist()]
        assert torch.equal(given["states"][others], before[others])


@pytest.mark.parametrize("operation", KEEPING, ids=lambda operation: operation.name)
def test_states_lie_apart_in_the_blocks_of_a_cache(operation: Any) -> None:
    given = operation.cases[1].make(torch.float32)
    apart = copied(given)
    blocks = torch.randn(len(apart["states"]), apart["states"][0].numel() + 24)
    whole = blocks.clone()
    apart["states"] = blocks[:, 8:-16].unflatten(1, apart["states"].shape[1:])
    apart["states"].copy_(given["states"])
    assert torch.equal(operation.function(**apart), operation.function(**given))
    assert torch.equal(apart["states"], given["states"])
    assert torch.equal(blocks[:, :8], whole[:, :8])
    assert torch.equal(blocks[:, -16:], whole[:, -16:])


@pytest.mark.parametrize("bias", [None, torch.randn(7)])
def test_a_short_convolution_of_a_whole_prompt_is_torchs(bias: torch.Tensor | None) -> None:
    x, weight = torch.randn(11, 7), torch.randn(7, 4)
    batch, blocks = state_batch((((8, 3), False),))
    states = torch.zeros(blocks, 3, 7)
    y = short_conv(x, weight, bias, True, states, batch)
    expected = F.silu(F.conv1d(F.pad(x.T[None], (3, 0)), weight[:, None], bias, groups=7))[0].T
    assert_close("y", expected, y, 1e-6)
    assert torch.equal(states[batch.after[1]], x[-3:])
