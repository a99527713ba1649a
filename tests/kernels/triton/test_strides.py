"""An argument with strides that passes an operation's checks is read correctly by its Triton form, or refused by name."""

import pytest
import torch

pytest.importorskip("triton")

from load_tests.catalogue import OPERATIONS
from load_tests.catalogue.operation import Arguments, Operation, copied, in_double
from pilotlight.kernels.checks import ArgumentError
from tests.closeness import assert_close
from tests.kernels.test_spoilt_calls import ordinary, places, spoils, storage_type, with_


@pytest.mark.timeout(600)  # the interpreter takes seconds of processor time for the experts' calls
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_numbers_that_lie_apart_are_refused_or_read(operation: Operation) -> None:
    for arguments in ordinary(operation):
        names = [place for place, x in places(arguments) if "spread out" in dict(spoils(x))]
        taken = [place for place in names if is_taken(operation, spread(arguments, [place]))]
        # All arguments at once; one by one if the form asserts that torch computes such a call.
        if taken and not agrees(operation, arguments, taken):
            for place in taken:
                agrees(operation, arguments, [place])


def spread(arguments: Arguments, names: list[str]) -> Arguments:
    made = copied(arguments)  # copies, because a call may change its arguments
    for place, x in list(places(made)):
        if place in names:
            made = with_(made, place, dict(spoils(x))["spread out"])
    return made


def is_taken(operation: Operation, arguments: Arguments) -> bool:
    try:
        operation.function(**arguments)
    except ArgumentError:
        return False
    return True


def agrees(operation: Operation, arguments: Arguments, names: list[str]) -> bool:
    """Return False if the Triton form refuses the call; else assert that its results equal the formula."""
    try:
        actual = operation.results(operation.triton_form(), spread(arguments, names))
    except AssertionError:
        return False
    for name, wanted in operation.results(operation.reference, in_double(arguments)).items():
        if wanted.is_floating_point():
            assert_close(
                f"{names}: {name}",
                wanted,
                actual[name],
                operation.tolerance(storage_type(operation), actual[name].dtype),
            )
        else:
            assert torch.equal(actual[name], wanted), f"{names}: {name}"
    return True
