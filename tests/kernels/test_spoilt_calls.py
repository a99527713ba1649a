"""Every tensor of every operation of the catalogue spoilt in every way, one at a time: the call is refused by name, or what it gives is what its
formula gives for the spoilt arguments. Nothing else, no other exception and no crash.

An index beyond the end lies on the device: what only that can tell is refused in debug mode. A GPU is asked in that mode alone, since such an index
ends its process's use of it, or spoils what others wrote.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from kernels import checks
from kernels.catalogue import OPERATIONS
from kernels.catalogue.operation import Arguments, Operation, copied, in_double, tensors
from kernels.checks import ArgumentError
from kernels.weight import Weight
from tests.closeness import assert_close
from tests.kernels.conftest import DEVICE


def storage_type(operation: Operation) -> torch.dtype:
    return torch.float32 if torch.float32 in operation.dtypes else operation.dtypes[0]


# What no one can tell from a call that was meant so.
UNKNOWABLE = {
    ("sample", "logits", "longer in 1"),  # a larger vocabulary, of which top-k leaves out the last entry
    # How many escapes there are stands in another tensor's last number.
    *[
        (name, "weight.escapes", "shorter in 0")
        for name in (
            "lossless_linear", "lossless_gated_linear", "lossless_logits", "lossless_rows", "unpack_lossless",
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_spoilt_call_is_refused_or_right(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEBUG", DEVICE == "cuda")
    problems = []
    for arguments in ordinary(operation):
        for place, x in places(arguments):
            for name, spoilt in spoils(x):
                if (operation.name, place, name) in UNKNOWABLE or (
                    name == "elsewhere" and len(tensors(arguments)) == 1
                ):
                    continue
                same_numbers = spoilt.numel() == x.numel() and spoilt.dtype == x.dtype
                meant = arguments if same_numbers else with_(arguments, place, spoilt.clone())
                problem = outcome(operation, with_(copied(arguments), place, spoilt), meant, monkeypatch)
                problems += [f"{place}, {name}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


def ordinary(operation: Operation) -> Iterator[Arguments]:
    """One call for each set of tensors that a call can have."""
    seen = set()
    for case in operation.cases:
        arguments = case.make(storage_type(operation))
        names = tuple(place for place, _ in places(arguments))
        if names not in seen and all(x.numel() for x in tensors(arguments)):
            seen.add(names)
            yield arguments


def outcome(
    operation: Operation, arguments: Arguments, meant: Arguments, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """What is wrong with what a call does, if anything; `meant`: what its formula is given."""
    try:
        results = operation.results(operation.function, arguments)
    except ArgumentError:
        return None
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error) and "out of range" not in str(error):
            return f"{type(error).__name__}: {error}"
        with monkeypatch.context() as patch:
            patch.setattr(checks, "DEBUG", True)
            try:
                operation.function(**arguments)
            except ArgumentError:
                return None
            except Exception as again:
                return f"in debug mode {type(again).__name__}: {again}"
        return f"not refused in debug mode either: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        for name, expected in operation.results(operation.reference, in_double(meant)).items():
            tolerance = max(operation.tolerance(storage_type(operation), results[name].dtype), 1e-6)
            if expected.is_floating_point() and expected.numel():
                assert_close(name, expected, results[name].view(expected.shape), tolerance)
            else:
                assert torch.equal(results[name].view(expected.shape), expected), f"{name} differs"
    except Exception as error:
        return f"taken, and its formula says otherwise: {type(error).__name__}: {error}"
    return None


def spoils(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "another type", x.int() if x.is_floating_point() else x.float()
    yield "a dimension more", x[None]
    if x.dim():
        yield "a dimension less", x[0]
    for dim in range(x.dim()):
        raw = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        more = raw.narrow(dim, 0, 1)  # halved, so that none is as large as another and a choice is clear
        yield f"longer in {dim}", torch.cat((raw, more / 2 if raw.is_floating_point() else more), dim).view(x.dtype)
        yield f"shorter in {dim}", x.narrow(dim, 0, x.shape[dim] - 1)
    yield "elsewhere", x.to("meta")
    if x.element_size() > 1 and x.is_cpu:
        yield "misaligned", misaligned(x)
    if x.dim() and x.dtype != torch.float8_e4m3fn:
        yield "spread out", torch.stack((x, torch.full_like(x, 3)), -1).flatten(-2)[..., ::2]


def misaligned(x: Tensor) -> Tensor:
    """The same numbers, one byte beside where their type may start."""
    moved = torch.zeros(x.numel() * x.element_size() + 1, dtype=torch.uint8)
    moved[1:] = x.contiguous().view(-1).view(torch.uint8)
    return torch.frombuffer(moved.numpy(), dtype=x.dtype, offset=1).view(x.shape)


def places(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name, those of a batch or a packed weight as "batch.lens"."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Weight):
            names = [field.name for field in fields(value)]  # type: ignore[arg-type]
            yield from ((f"{name}.{n}", x) for n in names if isinstance(x := getattr(value, n), Tensor))
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            yield from (
                (f"{name}.{field}", part) for field, part in value._asdict().items() if isinstance(part, Tensor)
            )


def with_(arguments: Arguments, place: str, x: Tensor) -> Arguments:
    name, _, field = place.partition(".")
    value = arguments[name]
    if isinstance(value, Weight):
        return {**arguments, name: replace(value, **{field: x})}  # type: ignore[type-var]
    return {**arguments, name: value._replace(**{field: x}) if field else x}
