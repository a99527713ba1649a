"""What an operation cannot take gets an error with its name and an argument's, or the right answer all the same; never a wrong one, never a crash.

Every tensor of an ordinary call is spoilt in every way, one at a time. `make gpu-check` does the same to what a GPU computes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import activation, checks, kv_write, linear, logprobs, moe, mxfp4, norm, penalties, qkv, rotary
from kernels.attention_rule import AttentionRule
from kernels.checks import ArgumentError
from kernels.decode_attention import decode_attention
from kernels.mla import mla_decode, mla_prefill, mla_write
from kernels.plain import PlainWeight
from kernels.prefill_attention import prefill_attention
from kernels.varlen import VarlenBatch
from kernels.verify_attention import verify_attention
from kernels.weight import Weight
from tests.closeness import assert_close

BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 6, 4, 2, 8
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    name: str
    function: Callable[..., Any]
    make: Callable[[int], Arguments]  # for a number of tokens, rows or sequences
    free: tuple[
        str, ...
    ] = ()  # "argument.dimension": may have any size by itself; "argument.rank": any number of dimensions
    changes: tuple[str, ...] = ()
    indices: tuple[str, ...] = ()  # what debug mode looks at


def caches() -> Arguments:
    arena = torch.randn(BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return {"k_cache": arena[:, 0], "v_cache": arena[:, 1]}


def angles(tokens: int) -> Arguments:
    angle = torch.rand(tokens, HEAD_DIM // 2)
    return {"cos": angle.cos(), "sin": angle.sin()}


def keys_and_slots(tokens: int) -> Arguments:
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:tokens]
    return {**caches(), "slot_mapping": slots}


def decoding(seqs: int) -> Arguments:
    tables = torch.randint(BLOCKS, (seqs, 3))
    lens = torch.randint(1, 3 * BLOCK_SIZE + 1, (seqs,))
    given = {"block_tables": tables, "context_lens": lens, "max_context_len": 3 * BLOCK_SIZE}
    return {"q": torch.randn(seqs, 4, HEAD_DIM), **caches(), **given, "rule": AttentionRule(0.3, sinks=torch.randn(4))}


def prompts(seqs: int) -> Arguments:
    q_lens, context_lens = [2] * seqs, [7] * seqs
    batch = VarlenBatch(
        torch.randint(BLOCKS, (seqs, 2)),
        torch.tensor([0, *q_lens]).cumsum(0).int(),
        torch.tensor(context_lens).int(),
        tuple(q_lens),
        tuple(context_lens),
    )
    return {
        "q": torch.randn(2 * seqs, 4, HEAD_DIM),
        **caches(),
        "batch": batch,
        "rule": AttentionRule(0.3, sinks=torch.randn(4)),
    }


def in_fp8(arguments: Arguments) -> Arguments:
    """With a cache in FP8."""
    stored = {name: arguments[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    return arguments | stored | {"rule": arguments["rule"]._replace(kv_scales=torch.rand(2) + 0.5)}


def latent(arguments: Arguments, tokens: int) -> Arguments:
    """The batch of other arguments."""
    made = {
        name: arguments[name]
        for name in ("block_tables", "context_lens", "max_context_len", "batch")
        if name in arguments
    }
    queries = {"q_latent": torch.randn(tokens, 5, 6), "q_rotary": torch.randn(tokens, 5, 2)}
    return {**queries, "cache": torch.randn(BLOCKS, BLOCK_SIZE, 8), **made, "scale": 0.3}


def experts(tokens: int) -> Arguments:
    return {
        "x": torch.randn(tokens, 6), "weights": torch.rand(tokens, 2), "expert_ids": torch.randint(3, (tokens, 2)),
        "gate_up": PlainWeight(torch.randn(3, 10, 6)), "down": PlainWeight(torch.randn(3, 6, 5)), "activation": activation.silu_and_mul,
        "gate_up_bias": torch.randn(3, 10), "down_bias": torch.randn(3, 6),
    }  # fmt: skip


def entries(count: int) -> Arguments:
    numbers = {name: torch.rand(count) + 0.5 for name in penalties.LogitEntries._fields[2:]}
    made = penalties.LogitEntries(torch.zeros(count).long(), torch.randperm(40)[:count], **numbers)
    return {"logits": torch.randn(2, 40), "entries": made}


def packed(rows: int) -> Arguments:
    blocks, scales = torch.randint(256, (rows, 2, 16)), torch.randint(120, 130, (rows, 2))
    return {"blocks": blocks.byte(), "scales": scales.byte(), "into": torch.zeros(rows, 64)}


OPERATIONS = [
    Operation("rms_norm", norm.rms_norm, lambda n: {"x": torch.randn(n, 8), "weight": torch.randn(8), "eps": 1e-5}, ("x.0",)),
    Operation(
        "add_rms_norm",
        norm.add_rms_norm,
        lambda n: {"x": torch.randn(n, 8), "residual": torch.randn(n, 8), "weight": torch.randn(8), "eps": 1e-5},
    ),
    Operation(
        "head_rms_norm",
        norm.head_rms_norm,
        lambda n: {"x": torch.randn(n, 3, 8), "weight": torch.randn(3, 8), "eps": 1e-5},
        ("x.0",),
    ),
    Operation("silu_and_mul", activation.silu_and_mul, lambda n: {"x": torch.randn(n, 10)}, ("x.0",)),
    Operation("gelu_tanh_and_mul", activation.gelu_tanh_and_mul, lambda n: {"x": torch.randn(n, 10)}, ("x.0",)),
    Operation("clamped_swiglu", activation.clamped_swiglu, lambda n: {"x": torch.randn(n, 10), "alpha": 1.7, "limit": 7.0}, ("x.0",)),
    Operation("rotary", rotary.rotary, lambda n: {"x": torch.randn(n, 3, HEAD_DIM), **angles(n)}, ("x.1",)),
    Operation(
        "kv_write",
        kv_write.kv_write,
        lambda n: {"k": torch.randn(n, KV_HEADS, HEAD_DIM), "v": torch.randn(n, KV_HEADS, HEAD_DIM), **keys_and_slots(n)},
        changes=("k_cache", "v_cache"),
        indices=("slot_mapping",),
    ),
    Operation(
        "rotate_and_cache",
        qkv.rotate_and_cache,
        lambda n: {
            "qkv": torch.randn(n, 4 + 2 * KV_HEADS, HEAD_DIM), "norm": torch.randn(4 + KV_HEADS, HEAD_DIM), "eps": 1e-5, **angles(n),
            **keys_and_slots(n),
        },
        changes=("k_cache", "v_cache"),
        indices=("slot_mapping",),
    ),
    Operation("decode_attention", decode_attention, decoding, ("block_tables.1",), indices=("block_tables", "context_lens")),
    Operation(
        "prefill_attention",
        prefill_attention,
        prompts,
        ("batch.block_tables.1",),
        indices=("batch.block_tables", "batch.context_lens"),
    ),
    Operation(
        "verify_attention",
        verify_attention,
        prompts,
        ("batch.block_tables.1",),
        indices=("batch.block_tables", "batch.context_lens"),
    ),
    Operation(
        "mla_write",
        mla_write,
        lambda n: {
            "x": torch.randn(n, 8), "norm": torch.randn(6), "eps": 1e-5, "cos": torch.randn(n, 1), "sin": torch.randn(n, 1),
            "cache": torch.randn(BLOCKS, BLOCK_SIZE, 8), "slot_mapping": torch.randperm(BLOCKS * BLOCK_SIZE)[:n],
        },
        ("cache.0", "cache.1"),
        changes=("cache",),
        indices=("slot_mapping",),
    ),
    Operation(
        "mla_decode",
        mla_decode,
        lambda n: latent(decoding(n), n),
        ("block_tables.1", "cache.0", "cache.1"),
        indices=("block_tables", "context_lens"),
    ),
    Operation(
        "mla_prefill",
        mla_prefill,
        lambda n: latent(prompts(n), 2 * n),
        ("batch.block_tables.1", "cache.0", "cache.1"),
        indices=("batch.block_tables", "batch.context_lens"),
    ),
    Operation("decode_attention in fp8", decode_attention, lambda n: in_fp8(decoding(n)), ("block_tables.1",), indices=("block_tables",)),
    Operation("prefill_attention in fp8", prefill_attention, lambda n: in_fp8(prompts(n)), ("batch.block_tables.1",)),
    Operation(
        "linear",
        linear.linear,
        lambda n: {"x": torch.randn(n, 12), "weight": torch.randn(10, 12), "bias": torch.randn(10)},
        ("x.0",),
    ),
    Operation(
        "gated_linear",
        linear.gated_linear,
        lambda n: {"x": torch.randn(n, 12), "weight": torch.randn(10, 12), "bias": torch.randn(10), "activation": activation.silu_and_mul},
        ("x.0",),
    ),
    Operation("logits", linear.logits, lambda n: {"hidden": torch.randn(n, 12), "weight": torch.randn(10, 12)}, ("hidden.0", "weight.0")),
    Operation("route", moe.route, lambda n: {"logits": torch.randn(n, 6), "top_k": 2, "renormalise": True}, ("logits.0", "logits.1")),
    Operation("moe_experts", moe.moe_experts, experts, indices=("expert_ids",)),
    Operation("unpack_mxfp4", mxfp4.unpack_mxfp4, packed, ("into.rank",), changes=("into",)),
    Operation("penalize_", penalties.penalize_, entries, ("logits.0", "logits.1"), ("logits",), ("entries.rows", "entries.token_ids")),
    Operation(
        "token_logprobs",
        logprobs.token_logprobs,
        lambda n: {"logits": torch.randn(n, 40), "token_ids": torch.randint(40, (n,)), "num_top": 3},
        ("logits.1",),
        indices=("token_ids",),
    ),
    Operation(
        "token_ranks",
        logprobs.token_ranks,
        lambda n: {"logits": torch.randn(n, 40), "token_ids": torch.randint(40, (n,))},
        ("logits.1",),
        indices=("token_ids",),
    ),
]  # fmt: skip
each = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def places(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name, those of a batch as "batch.lens"."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Weight):
            names = [field.name for field in fields(value)]  # type: ignore[arg-type]
            yield from ((f"{name}.{n}", x) for n in names if isinstance(x := getattr(value, n), Tensor))
        elif isinstance(value, tuple):
            yield from (
                (f"{name}.{field}", part) for field, part in value._asdict().items() if isinstance(part, Tensor)
            )


def with_(arguments: Arguments, place: str, x: Tensor) -> Arguments:
    name, _, field = place.partition(".")
    value = arguments[name]
    if isinstance(value, Weight):
        return {**arguments, name: replace(value, **{field: x})}  # type: ignore[type-var]
    return {**arguments, name: value._replace(**{field: x}) if field else x}


def copied(arguments: Arguments) -> Arguments:
    for place, x in places(arguments):
        arguments = with_(arguments, place, x.clone())
    return arguments


def results(operation: Operation, arguments: Arguments) -> list[Tensor]:
    returned = operation.function(**arguments)
    parts = returned if isinstance(returned, tuple) else (returned,)
    return [part.clone() for part in parts if part is not None] + [arguments[name] for name in operation.changes]


def longer(x: Tensor, dim: int) -> Tensor:
    return torch.cat((x, x.narrow(dim, 0, 1)), dim)


def misaligned(x: Tensor) -> Tensor:
    """The same numbers, one byte beside where their type may start."""
    moved = torch.zeros(x.numel() * x.element_size() + 1, dtype=torch.uint8)
    moved[1:] = x.contiguous().view(-1).view(torch.uint8)
    if x.is_cuda:
        pytest.skip("there is no way to make one on a GPU")
    return torch.frombuffer(moved.numpy(), dtype=x.dtype, offset=1).view(x.shape)


def spread_out(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack((x, torch.full_like(x, 3)), -1).flatten(-2)[..., ::2] if x.dim() else x


def refused(operation: Operation, arguments: Arguments) -> ArgumentError:
    with pytest.raises(ArgumentError) as caught:
        operation.function(**arguments)
    error = caught.value
    assert error.operation == operation.name.partition(" ")[0] or error.operation in ("linear", "silu_and_mul")
    known = {*arguments, *(place for place, _ in places(arguments))}
    assert (
        error.argument in known
        or any(name.startswith(error.argument) for name in known)
        or error.argument.startswith(("batch.host", "rule."))
    ), str(error)
    return error


def refused_or_read(operation: Operation, arguments: Arguments, place: str, spoil: Callable[[Tensor], Tensor]) -> None:
    """The same numbers otherwise: what is not refused gives the same results."""
    wanted = results(operation, copied(arguments))
    whole = copied(arguments)
    spoilt = with_(whole, place, spoil(dict(places(whole))[place]))
    try:
        actual = results(operation, spoilt)
    except ArgumentError as error:
        named = error.argument
    else:
        named = None
    if named is None:
        for expected, result in zip(wanted, actual, strict=True):
            assert_close(place, expected, result.view(expected.shape), 1e-6)
    else:
        assert named in {*arguments, *dict(places(arguments))}


@each
def test_an_ordinary_call_is_taken(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    results(operation, operation.make(3))
    monkeypatch.setattr(checks, "DEBUG", True)
    results(operation, operation.make(3))


@each
def test_a_call_without_rows_is_taken(operation: Operation) -> None:
    for result in results(operation, operation.make(0)):
        assert bool(result.isfinite().all())


@each
def test_a_wrong_type_is_refused(operation: Operation) -> None:
    arguments = operation.make(3)
    for place, x in places(arguments):
        wrong = x.int() if x.is_floating_point() else x.float()
        refused(operation, with_(arguments, place, wrong))


@each
def test_a_wrong_number_of_dimensions_is_refused(operation: Operation) -> None:
    arguments = operation.make(3)
    for place, x in places(arguments):
        if f"{place}.rank" not in operation.free:
            refused(operation, with_(arguments, place, x[0]))
            refused_or_read(operation, arguments, place, lambda x: x[None])


@each
def test_a_wrong_size_is_refused(operation: Operation) -> None:
    arguments = operation.make(3)
    for place, x in places(arguments):
        for dim in range(x.dim()):
            if f"{place}.{dim}" not in operation.free:
                refused(operation, with_(arguments, place, longer(x, dim)))
                refused(operation, with_(arguments, place, x.narrow(dim, 0, x.shape[dim] - 1)))


@each
def test_another_device_is_refused(operation: Operation) -> None:
    arguments = operation.make(3)
    found = list(places(arguments))
    for place, x in found if len(found) > 1 else ():
        refused(operation, with_(arguments, place, x.to("meta")))


@each
@pytest.mark.parametrize("spoil", [misaligned, spread_out])
def test_numbers_in_an_odd_place_are_refused_or_read(operation: Operation, spoil: Callable[[Tensor], Tensor]) -> None:
    arguments = operation.make(3)
    for place, _ in places(arguments):
        refused_or_read(operation, arguments, place, spoil)


@pytest.mark.parametrize(
    ("operation", "place"), [pytest.param(o, place, id=f"{o.name}-{place}") for o in OPERATIONS for place in o.indices]
)
@pytest.mark.parametrize("wild", [-1, 1_000_000])
def test_an_index_out_of_range_is_refused_in_debug_mode(
    operation: Operation, place: str, wild: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DEBUG", True)
    arguments = operation.make(3)
    x = dict(places(arguments))[place].clone()
    x.view(-1)[-1] = wild
    assert refused(operation, with_(arguments, place, x)).argument == place


NUMBERS = (("scale", 0.0), ("scale", -1.0), ("window", 0), ("soft_cap", 0.0))


@pytest.mark.parametrize(
    "operation", [o for o in OPERATIONS if "attention" in o.name or "mla" in o.name], ids=lambda o: o.name
)
@pytest.mark.parametrize(("argument", "value"), [*NUMBERS, ("max_context_len", 10_000)])
def test_a_number_that_means_nothing_is_refused(operation: Operation, argument: str, value: float) -> None:
    arguments = operation.make(2)
    if argument in arguments:
        assert refused(operation, arguments | {argument: value}).argument == argument
    elif "rule" in arguments and (argument, value) in NUMBERS:
        rule = arguments["rule"]._replace(**{argument: value})
        assert refused(operation, arguments | {"rule": rule}).argument == f"rule.{argument}"


def test_an_fp8_cache_without_its_scales_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^decode_attention: rule.kv_scales is missing"):
        decode_attention(**in_fp8(decoding(2)) | {"rule": AttentionRule(0.3)})


def test_the_error_says_what_to_change() -> None:
    with pytest.raises(ArgumentError, match=r"^silu_and_mul: x has 5 columns, wanted as many of the gate as of up$"):
        activation.silu_and_mul(torch.randn(2, 5))
    with pytest.raises(
        ArgumentError,
        match=r"^linear: weight has shape \[4, 6\], wanted \[outputs, inputs\] with inputs = 5 as x has it$",
    ):
        linear.linear(torch.randn(2, 5), torch.randn(4, 6))


def test_attention_refuses_what_its_host_numbers_cannot_mean() -> None:
    for value in (0, 13):
        with pytest.raises(ArgumentError, match=rf"^decode_attention: max_context_len is {value}"):
            decode_attention(**{**decoding(3), "max_context_len": value})
    ordinary = prompts(2)
    for field, lens, message in (
        ("host_q_lens", (2, 3), "sums to 5, and q has 4 tokens"),
        ("host_context_lens", (7, 9), "holds 9, wanted 2"),
        ("host_context_lens", (1, 7), "holds 1, wanted 2"),
        ("host_context_lens", (7,), "has 1 lengths, and batch.block_tables 2 rows"),
    ):
        batch = ordinary["batch"]._replace(**{field: lens})
        with pytest.raises(ArgumentError, match=rf"^prefill_attention: batch\.{field} {message}"):
            prefill_attention(**{**ordinary, "batch": batch})
    with pytest.raises(
        ArgumentError, match=r"^decode_attention: q has 4 heads, which 3 key heads cannot share evenly$"
    ):
        decode_attention(**{**decoding(3), "k_cache": torch.zeros(6, 4, 3, 8), "v_cache": torch.zeros(6, 4, 3, 8)})
