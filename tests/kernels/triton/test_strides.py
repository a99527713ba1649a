"""Arguments whose numbers do not lie side by side: what an operation's door lets through, its Triton form reads as it is, or refuses by name."""

import pytest

pytest.importorskip("triton")

from kernels.catalogue import OPERATIONS
from kernels.catalogue.operation import Operation, copied
from kernels.checks import ArgumentError
from tests.closeness import assert_close
from tests.kernels.test_spoilt_calls import ordinary, places, spoils, storage_type, with_


@pytest.mark.timeout(600)  # the interpreter takes seconds of a core for the experts' calls
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_numbers_that_lie_apart_are_refused_or_read(operation: Operation) -> None:
    for arguments in ordinary(operation):
        expected = None
        for place, x in places(arguments):
            if "spread out" not in dict(spoils(x)):
                continue
            try:  # each anew: a call may change what it is given
                for form in (operation.function, operation.triton_form()):
                    actual = operation.results(form, with_(copied(arguments), place, dict(spoils(x))["spread out"]))
            except (ArgumentError, AssertionError):  # or its door leaves such a call to torch, and the form asserts it
                continue
            expected = expected or operation.results(operation.triton_form(), copied(arguments))
            for name, wanted in expected.items():
                assert_close(
                    f"{place}: {name}", wanted, actual[name], operation.tolerance(storage_type(operation), wanted.dtype)
                )
