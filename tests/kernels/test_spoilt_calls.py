"""Every tensor of every operation of the catalogue is spoilt in every way, one at a time.

A call with a spoilt tensor is refused with the argument's name, or gives the result of its formula; there is no other exception and no crash. Indices
out of range are known only on the device, so they are refused only in debug mode. A GPU is tested only in that mode, because such an index makes the
GPU unusable for the process, or damages other memory.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from load_tests.catalogue import OPERATIONS, attention
from load_tests.catalogue.matrices import E2M1
from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, copied, in_double, tensors
from load_tests.catalogue.paged_cases import varlen
from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.decode_attention import decode_attention
from pilotlight.kernels.attention.prefill_attention import prefill_attention
from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.elementwise.activation import silu_and_mul
from pilotlight.kernels.matrices.linear import gated_linear, linear, logits
from pilotlight.kernels.matrices.mxfp4 import unpack_mxfp4
from pilotlight.kernels.matrices.weight import Weight
from pilotlight.kernels.sampling.logprobs import token_ranks
from tests.closeness import assert_close
from tests.kernels.conftest import DEVICE, set_debug_mode


def storage_type(operation: Operation) -> torch.dtype:
    return torch.float32 if torch.float32 in operation.dtypes else operation.dtypes[0]


def undeclared(
    function: Callable[..., object], reference: Callable[..., object], make: Callable[[], Arguments], **more: object
) -> Operation:
    """Return an `Operation` for a function that is not in the catalogue, because it has no Triton form or uses another's."""
    case, name = Case("ordinary", lambda dtype: make()), function.__name__
    return Operation(name, function, reference, 30.0, (case,), (), lambda _: Cost(0), (torch.float32,), **more)


def unpacked(blocks: Tensor, scales: Tensor, into: Tensor) -> None:
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    values = torch.tensor(E2M1, dtype=torch.float64)[codes & 7] * (1 - 2 * (codes >> 3))
    into.copy_((values * 2.0 ** (scales.double() - 127)[..., None]).view(into.shape))


FURTHER = [
    undeclared(
        gated_linear,
        lambda x, weight, bias, activation: activation(x @ weight.T + bias),
        lambda: {"x": torch.randn(3, 12), "weight": torch.randn(10, 12), "bias": torch.randn(10), "activation": silu_and_mul},
    ),
    undeclared(
        logits,
        lambda hidden, weight: hidden @ weight.T,
        lambda: {"hidden": torch.randn(3, 12), "weight": torch.randn(10, 12)},
    ),
    undeclared(
        unpack_mxfp4,
        unpacked,
        lambda: {
            "blocks": torch.randint(256, (3, 2, 16)).byte(), "scales": torch.randint(120, 130, (3, 2)).byte(), "into": torch.zeros(3, 64),
        },
        changes=("into",),
    ),
    undeclared(
        token_ranks,
        lambda logits, token_ids: (logits > logits.gather(1, token_ids[:, None])).sum(1) + 1,
        lambda: {"logits": torch.randn(3, 40), "token_ids": torch.randint(40, (3,))},
    ),
]  # fmt: skip
ALL = [*OPERATIONS, *FURTHER]
# Arguments whose numbers are indices.
INDICES = {
    "slot_mapping", "block_tables", "context_lens", "batch.block_tables", "batch.context_lens", "expert_ids", "places", "rows", "token_ids",
    "entries.rows", "entries.token_ids",
}  # fmt: skip

# Spoilt calls that are valid calls with another meaning.
UNKNOWABLE = {
    ("sample", "logits", "longer in 1"),  # a larger vocabulary, whose last entry top-k excludes
    # Only the last number of another tensor, on the device, says how many escapes a weight needs.
    *[
        (name, "weight.escapes", "shorter in 0")
        for name in (
            "lossless_linear", "lossless_gated_linear", "lossless_logits", "lossless_rows", "unpack_lossless",
        )
    ],
}  # fmt: skip

# Spoilt calls with indices beyond what is left. C would read other memory, and torch refuses them.
BEYOND = {
    *[(name, "cache", "shorter in 0") for name in ("mla_decode", "mla_prefill", "mla_selected")],
    *[("mla_selected", place, "shorter in 1") for place in ("block_tables", "cache", "positions")],
}


@pytest.mark.parametrize("operation", ALL, ids=lambda operation: operation.name)
def test_a_spoilt_call_is_refused_or_right(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for arguments in ordinary(operation):
        for place, x in places(arguments):
            for name, spoilt in spoils(x):
                if (operation.name, place, name) in UNKNOWABLE or (
                    name == "elsewhere" and len(tensors(arguments)) == 1
                ):
                    continue
                set_debug_mode(monkeypatch, DEVICE == "cuda" or (operation.name, place, name) in BEYOND)
                same_numbers = spoilt.numel() == x.numel() and spoilt.dtype == x.dtype
                meant = arguments if same_numbers else with_(arguments, place, spoilt.clone())
                problem = outcome(operation, with_(copied(arguments), place, spoilt), meant, monkeypatch)
                problems += [f"{place}, {name}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("operation", ALL, ids=lambda operation: operation.name)
def test_an_index_out_of_range_is_refused_in_debug_mode(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    set_debug_mode(monkeypatch)
    for arguments in ordinary(operation):
        operation.function(**copied(arguments))
        for place, x in places(arguments):
            for wild in (-1, 1_000_000) if place in INDICES else ():
                spoilt = x.clone()
                spoilt.view(-1)[-1] = wild
                with pytest.raises(ArgumentError) as caught:
                    operation.function(**with_(copied(arguments), place, spoilt))
                assert caught.value.argument == place


@pytest.mark.parametrize(
    "operation",
    [o for o in OPERATIONS if o.name.endswith(("attention", "mla_decode", "mla_prefill"))],
    ids=lambda o: o.name,
)
@pytest.mark.parametrize(
    ("argument", "value"), [("scale", 0.0), ("scale", -1.0), ("window", 0), ("soft_cap", 0.0), ("max_context_len", 10_000)]
)  # fmt: skip
def test_a_number_that_means_nothing_is_refused(operation: Operation, argument: str, value: float) -> None:
    arguments = next(ordinary(operation))
    spoilt: Arguments = {}
    if argument in arguments:
        spoilt = {argument: value}
    elif argument in AttentionRule._fields and "rule" in arguments:
        spoilt = {"rule": arguments["rule"]._replace(**{argument: value})}
        argument = f"rule.{argument}"
    else:
        pytest.skip("the operation has no such argument")
    with pytest.raises(ArgumentError) as caught:
        operation.function(**arguments | spoilt)
    assert caught.value.argument == argument


def test_an_fp8_cache_without_its_scales_is_refused() -> None:
    (arguments,) = (case.make(torch.float32) for case in attention.DECODE_ATTENTION.cases[-2:-1])
    with pytest.raises(ArgumentError, match=r"^decode_attention: rule.kv_scales is missing"):
        decode_attention(**arguments | {"rule": AttentionRule(0.3)})


def test_the_error_says_what_to_change() -> None:
    with pytest.raises(
        ArgumentError, match=r"^silu_and_mul: x has 5 columns; wanted an even number: half gate, half up$"
    ):
        silu_and_mul(torch.randn(2, 5))
    with pytest.raises(
        ArgumentError,
        match=r"^linear: weight has shape \[4, 6\], wanted \[outputs, inputs\] with inputs = 5 as x has it$",
    ):
        linear(torch.randn(2, 5), torch.randn(4, 6))


def test_attention_refuses_what_its_host_numbers_cannot_mean() -> None:
    # one sequence of 4 query heads and 2 kv heads, in one block of 16
    decoding = next(ordinary(attention.DECODE_ATTENTION))
    for value in (0, 17):
        with pytest.raises(ArgumentError, match=rf"^decode_attention: max_context_len is {value}"):
            decode_attention(**decoding | {"max_context_len": value})
    with pytest.raises(
        ArgumentError, match=r"^decode_attention: q has 4 heads, which 3 key heads cannot share evenly$"
    ):
        decode_attention(**decoding | {name: torch.zeros(6, 16, 3, 16) for name in ("k_cache", "v_cache")})
    heads = {"k_cache": torch.zeros(6, 4, 2, 8), "v_cache": torch.zeros(6, 4, 2, 8)}
    batch = varlen(torch.randint(6, (2, 2)), (2, 2), (7, 7))
    for field, lens, message in (
        ("host_q_lens", (2, 3), "sums to 5, and q has 4 tokens"),
        ("host_context_lens", (7, 9), "holds 9, wanted 2"),
        ("host_context_lens", (1, 7), "holds 1, wanted 2"),
        ("host_context_lens", (7,), "has 1 lengths, and batch.block_tables 2 rows"),
    ):
        with pytest.raises(ArgumentError, match=rf"^prefill_attention: batch\.{field} {message}"):
            prefill_attention(
                torch.randn(4, 4, 8), **heads, batch=batch._replace(**{field: lens}), rule=AttentionRule(0.3)
            )


@pytest.mark.parametrize("operation", [attention.VERIFY_ATTENTION, attention.MLA_PREFILL], ids=lambda o: o.name)
def test_later_keys_are_refused_where_no_query_sees_them(operation: Operation) -> None:
    arguments = next(ordinary(operation))
    batch = arguments["batch"]
    ahead = batch._replace(last_visible=torch.zeros(sum(batch.host_q_lens), dtype=torch.int32))
    with pytest.raises(ArgumentError, match=rf"^{operation.name}: batch.last_visible is set, but here a query sees no"):
        operation.function(**arguments | {"batch": ahead})


def ordinary(operation: Operation) -> Iterator[Arguments]:
    """Yield one call for each combination of optional tensors."""
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
    """Return what is wrong with the outcome of a call, or None. `meant`: the arguments of its formula."""
    try:
        results = operation.results(operation.function, arguments)
    except ArgumentError as error:
        is_known = (
            error.operation.removesuffix("_") != operation.name or re.split(r"\W", error.argument)[0] in arguments
        )
        return None if is_known else f"the error names no argument of the operation: {error}"
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error) and "out of range" not in str(error):
            return f"{type(error).__name__}: {error}"
        with monkeypatch.context() as patch:
            set_debug_mode(patch)
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
        return f"accepted, but its results differ from the formula: {type(error).__name__}: {error}"
    return None


def spoils(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "another type", x.int() if x.is_floating_point() else x.float()
    yield "a dimension more", x[None]
    if x.dim():
        yield "a dimension less", x[0]
    for dim in range(x.dim()):
        raw = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        # halved, so that the added numbers differ from the others and a choice is unambiguous
        more = raw.narrow(dim, 0, 1)
        yield f"longer in {dim}", torch.cat((raw, more / 2 if raw.is_floating_point() else more), dim).view(x.dtype)
        yield f"shorter in {dim}", x.narrow(dim, 0, x.shape[dim] - 1)
    yield "elsewhere", x.to("meta")
    if x.element_size() > 1 and x.is_cpu:
        yield "misaligned", misaligned(x)
    if x.dim() and x.dtype != torch.float8_e4m3fn:
        yield "spread out", torch.stack((x, torch.full_like(x, 3)), -1).flatten(-2)[..., ::2]


def misaligned(x: Tensor) -> Tensor:
    """Return the same numbers, one byte after an aligned address."""
    moved = torch.zeros(x.numel() * x.element_size() + 1, dtype=torch.uint8)
    moved[1:] = x.contiguous().view(-1).view(torch.uint8)
    return torch.frombuffer(moved.numpy(), dtype=x.dtype, offset=1).view(x.shape)


def places(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name; those of a batch or a packed weight are named like "batch.lens"."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Weight):
            names = [field.name for field in fields(value)]
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
