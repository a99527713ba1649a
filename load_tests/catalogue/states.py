"""The catalogue's entries of layers that keep a recurrent state."""

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels.state import delta_rule, gated_norm, short_conv, ssd
from pilotlight.kernels.state.state_batch import NO_BLOCK, StateBatch

_BANDWIDTH = Target(0.8, "read")
_EPS = 1e-5

# A pair for each sequence: the lengths of its runs of tokens, and whether its state is in a block (otherwise it is zeros); None for a state that is
# neither read nor kept. One block may be both read and written.
Runs = tuple[tuple[tuple[int, ...], bool | None], ...]
_ONE: Runs = (((1,), True),)
_DECODES: Runs = (((1,), True),) * 3
_MIXED: Runs = (((1,), True), ((1,), True), ((2, 3, 1), False), ((7,), True), ((1, 1), False))
_DROPPED: Runs = (((1,), True), ((1,), True), ((1,), None), ((1,), None))
_PROMPT: Runs = (((64, 64, 21), False),)
_NONE: Runs = ()


def state_batch(sequences: Runs) -> tuple[StateBatch, int]:
    """Return a batch and the number of its blocks. A sequence's first run writes the block that it reads."""
    before: list[int] = []
    after: list[int] = []
    ends: list[tuple[int, ...]] = []
    block, token = 1, 0
    for lengths, has_state in sequences:
        before.append(block if has_state else NO_BLOCK)
        if has_state is None:
            after += [NO_BLOCK] * len(lengths)
        else:
            after += range(block, block + len(lengths))
            block += len(lengths)
        ends.append(tuple([token := token + length for length in lengths]))
    first_runs = list(accumulate(map(len, ends), initial=0))
    of_runs = _integers([*chain(*ends)]), _integers(after)
    return StateBatch(_integers(before), _integers(first_runs), *of_runs, tuple(ends)), block + 1


def _integers(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def tokens_of(batch: StateBatch) -> Iterator[tuple[int, int, int]]:
    """Yield each token, the block that its state is read from, and the block that it is written to."""
    start, number = 0, 0
    for block, ends in zip(batch.before.tolist(), batch.host_ends, strict=True):
        for end in ends:
            after = int(batch.after[number])
            for token in range(start, end):
                yield token, block, after
                block = after
            start, number = end, number + 1


def _state(states: Tensor, block: int) -> Tensor:
    return torch.zeros_like(states[0]) if block == NO_BLOCK else states[block].clone()


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, activates: bool, states: Tensor, batch: StateBatch
) -> Tensor:
    y = torch.zeros_like(x)
    for token, before, after in tokens_of(batch):
        seen = torch.cat((_state(states, before), x[token : token + 1]))
        y[token] = (seen * weight.T).sum(0) + (0 if bias is None else bias)
        if after != NO_BLOCK:
            states[after] = seen[1:]
    return F.silu(y) if activates else y


def _corrected(
    qkv: Tensor, steps: Tensor, decays: Tensor, decay_logs: Tensor, decay_bias: Tensor, key_heads: int, states: Tensor, batch: StateBatch
) -> Tensor:  # fmt: skip
    _, heads, key, value = states.shape
    q, k, v = torch.split(qkv, [key_heads * key, key_heads * key, heads * value], dim=1)
    q, k = (x.view(-1, key_heads, key).repeat_interleave(heads // key_heads, 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + delta_rule.EPS).sqrt() for x in (q, k))
    v, b = v.view(-1, heads, value), steps.sigmoid()
    g = -decay_logs.exp()[:, None] * F.softplus(decays + decay_bias).view(-1, heads, decays.shape[1] // heads)
    out = torch.zeros_like(v)
    for token, before, after in tokens_of(batch):
        state = g[token].exp()[:, :, None] * _state(states, before)
        seen = torch.einsum("hkv,hk->hv", state, k[token])
        state += torch.einsum("hk,hv->hkv", k[token], b[token][:, None] * (v[token] - seen))
        out[token] = torch.einsum("hkv,hk->hv", state, q[token]) / key**0.5
        if after != NO_BLOCK:
            states[after] = state
    return out


def _scanned(
    xbc: Tensor, steps: Tensor, decay_logs: Tensor, step_bias: Tensor, skip: Tensor, groups: int, states: Tensor, batch: StateBatch
) -> Tensor:  # fmt: skip
    _, heads, rows, value = states.shape
    x, b, c = torch.split(xbc, [heads * value, groups * rows, groups * rows], dim=1)
    x = x.view(-1, heads, value)
    b, c = (one.view(-1, groups, rows).repeat_interleave(heads // groups, 1) for one in (b, c))
    widths = F.softplus(steps + step_bias)
    out = skip[:, None] * x
    for token, before, after in tokens_of(batch):
        kept = (-decay_logs.exp() * widths[token]).exp()
        state = kept[:, None, None] * _state(states, before)
        state += torch.einsum("hs,hv->hsv", b[token], widths[token][:, None] * x[token])
        out[token] += torch.einsum("hsv,hs->hv", state, c[token])
        if after != NO_BLOCK:
            states[after] = state
    return out


def _gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool) -> Tensor:
    y = x * F.silu(gate) if gates_first else x
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if gates_first else y * F.silu(gate)


def _strided(rows: int, columns: int, gap: int, dtype: torch.dtype) -> Tensor:
    """Draw [rows, columns] with `gap` other columns between two rows."""
    return torch.randn(rows, columns + gap).to(dtype)[:, :columns]


def _conv(name: str, sequences: Runs, channels: int, width: int, *, biased: bool, gap: int = 0, **more: Any) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        batch, blocks = state_batch(sequences)
        return {
            "x": _strided(_tokens(batch), channels, gap, dtype),
            "weight": torch.randn(channels, width).to(dtype),
            "bias": torch.randn(channels).to(dtype) if biased else None,
            "activates": biased,
            "states": torch.randn(blocks, width - 1, channels).to(dtype),
            "batch": batch,
        }

    return Case(f"{name}, {channels} x {width}", make, **more)


def _delta(
    name: str, sequences: Runs, key_heads: int, heads: int, key: int, value: int, gap: int = 0, by_row: bool = False, **more: Any
) -> Case:  # fmt: skip
    """Make a case. `by_row`: each row of a state has its own decay."""
    num_decays = heads * key if by_row else heads

    def make(dtype: torch.dtype) -> Arguments:
        batch, blocks = state_batch(sequences)
        tokens = _tokens(batch)
        return {
            "qkv": _strided(tokens, 2 * key_heads * key + heads * value, gap, dtype),
            "steps": _strided(tokens, heads, gap, dtype),
            "decays": _strided(tokens, num_decays, gap, dtype),
            "decay_logs": torch.rand(heads) - 1,
            "decay_bias": torch.randn(num_decays),
            "key_heads": key_heads,
            "states": torch.randn(blocks, heads, key, value),
            "batch": batch,
        }

    rows = ", a decay a row" if by_row else ""
    return Case(f"{name}, {key_heads} to {heads} heads of {key} x {value}{rows}", make, **more)


def _ssd(name: str, sequences: Runs, groups: int, heads: int, rows: int, value: int, gap: int = 0, **more: Any) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        batch, blocks = state_batch(sequences)
        tokens = _tokens(batch)
        return {
            "xbc": _strided(tokens, heads * value + 2 * groups * rows, gap, dtype),
            "steps": _strided(tokens, heads, gap, dtype),
            "decay_logs": torch.rand(heads) - 1,
            "step_bias": torch.randn(heads),
            "skip": torch.randn(heads),
            "groups": groups,
            "states": torch.randn(blocks, heads, rows, value),
            "batch": batch,
        }

    return Case(f"{name}, {heads} heads of {rows} x {value} in {groups}", make, **more)


def _norm(tokens: int, groups: int, numbers: int, rows: int, *, gates_first: bool, gap: int = 0, **more: Any) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return {
            "x": torch.randn(tokens, groups, numbers).to(dtype),
            "gate": torch.unflatten(_strided(tokens, groups * numbers, gap, dtype), 1, (groups, numbers)),
            "weight": torch.randn(rows, numbers).to(dtype),
            "eps": _EPS,
            "gates_first": gates_first,
        }

    order = "gated first" if gates_first else "gated last"
    return Case(f"{tokens} x {groups} x {numbers} {order}", make, **more)


def _tokens(batch: StateBatch) -> int:
    return batch.host_ends[-1][-1] if batch.host_ends else 0


def _state_bytes(arguments: Arguments) -> int:
    """Return how many bytes of states are read and written, both together."""
    batch, states = arguments["batch"], arguments["states"]
    read = int((batch.before >= 0).sum())
    return (read + len(batch.after)) * states[0].numel() * states.element_size()


def _conv_cost(arguments: Arguments) -> Cost:
    x, weight = arguments["x"], arguments["weight"]
    return Cost(
        2 * size(x) + size(weight, arguments["bias"]) + _state_bytes(arguments), 2 * x.numel() * weight.shape[1]
    )


def _delta_cost(arguments: Arguments) -> Cost:
    """Count three multiply-adds for each element of a state per token: recall, correction and output."""
    qkv, states = arguments["qkv"], arguments["states"]
    given = size(qkv, arguments["steps"], arguments["decays"])
    out = qkv.shape[0] * states.shape[1] * states.shape[3] * qkv.element_size()
    return Cost(given + out + _state_bytes(arguments), 6 * qkv.shape[0] * states[0].numel())


def _ssd_cost(arguments: Arguments) -> Cost:
    """Count two multiply-adds for each element of a state per token: addition and output."""
    xbc, states = arguments["xbc"], arguments["states"]
    out = xbc.shape[0] * states.shape[1] * states.shape[3] * xbc.element_size()
    return Cost(size(xbc, arguments["steps"]) + out + _state_bytes(arguments), 4 * xbc.shape[0] * states[0].numel())


def _norm_cost(arguments: Arguments) -> Cost:
    return Cost(3 * size(arguments["x"]) + size(arguments["weight"]))


_SIXTEEN: Runs = (((1,), True),) * 16
_LONG: Runs = (((1024, 1024), False),)

# Tolerance: in the storage type, the rounding of the result; in fp32, those of sums of a few products.
SHORT_CONV = Operation(
    name="short_conv",
    function=short_conv.short_conv,
    reference=_convolved,
    roundings=2,
    arithmetic=4,
    changes=("states",),
    cases=(
        _conv("decodes", _DECODES, 40, 4, biased=True),
        _conv("decodes and prompts", _MIXED, 300, 3, biased=False, gap=5),
        _conv("a prompt", _PROMPT, 7, 5, biased=True),
        _conv("decodes and prompts", _MIXED, 5, 2, biased=False),
        _conv("decodes without a trace", _DROPPED, 40, 4, biased=True),
        _conv("nothing", _NONE, 8, 4, biased=False),
    ),
    bench=(
        _conv("16 decodes", _SIXTEEN, 8192, 4, biased=True, target=_BANDWIDTH),
        _conv("2,048 tokens", _LONG, 8192, 4, biased=True),
    ),
    cost=_conv_cost,
)
# Tolerance: in the storage type, the rounding of the result; in fp32, those of sums of as many products as a key has elements, and of as many
# corrections as there are tokens.
GATED_DELTA_RULE = Operation(
    name="gated_delta_rule",
    function=delta_rule.gated_delta_rule,
    reference=_corrected,
    roundings=2,
    arithmetic=40,
    changes=("states",),
    cases=(
        _delta("decodes", _DECODES, 2, 4, 6, 5),
        _delta("decodes and prompts", _MIXED, 1, 3, 17, 9, gap=3),
        _delta("a prompt", _PROMPT, 2, 2, 16, 128),
        _delta("decodes and prompts", _MIXED, 2, 4, 33, 64),
        _delta("decodes", _DECODES, 2, 4, 6, 5, by_row=True),
        _delta("decodes and prompts", _MIXED, 3, 3, 17, 9, gap=3, by_row=True),
        _delta("a prompt", _PROMPT, 2, 2, 16, 128, by_row=True),
        _delta("decodes without a trace", _DROPPED, 2, 4, 6, 128),
        _delta("nothing", _NONE, 1, 1, 4, 4),
    ),
    bench=(
        _delta("16 decodes", _SIXTEEN, 16, 32, 128, 128, target=_BANDWIDTH),
        _delta("2,048 tokens", _LONG, 16, 32, 128, 128, target=Target(0.5, "matmul")),
        _delta("16 decodes", _SIXTEEN, 32, 32, 128, 128, by_row=True, target=_BANDWIDTH),
    ),
    cost=_delta_cost,
)
# The roundings are those of GATED_DELTA_RULE.
SSD = Operation(
    name="ssd",
    function=ssd.ssd,
    reference=_scanned,
    roundings=2,
    arithmetic=40,
    changes=("states",),
    cases=(
        _ssd("decodes", _DECODES, 1, 4, 6, 5),
        _ssd("decodes and prompts", _MIXED, 2, 6, 17, 9, gap=3),
        _ssd("a prompt", _PROMPT, 1, 2, 16, 64),
        _ssd("decodes and prompts", _MIXED, 2, 4, 33, 64),
        _ssd("decodes without a trace", _DROPPED, 2, 4, 6, 128),
        _ssd("nothing", _NONE, 1, 1, 4, 4),
    ),
    bench=(
        _ssd("16 decodes", _SIXTEEN, 1, 128, 128, 64, target=_BANDWIDTH),
        _ssd("2,048 tokens", _LONG, 1, 128, 128, 64, target=Target(0.5, "matmul")),
    ),
    cost=_ssd_cost,
)
# Tolerance: in the storage type, the rounding of the result; in fp32, those of the sum of squares and of two factors.
GATED_NORM = Operation(
    name="gated_norm",
    function=gated_norm.gated_norm,
    reference=_gated,
    roundings=2,
    arithmetic=8,
    cases=(
        _norm(3, 4, 16, 1, gates_first=False),
        _norm(5, 2, 431, 2, gates_first=True, gap=3),
        _norm(1, 1, 1, 1, gates_first=False),
        _norm(0, 2, 8, 2, gates_first=True),
    ),
    bench=(
        _norm(2048, 32, 128, 1, gates_first=False, target=_BANDWIDTH),
        _norm(2048, 1, 8192, 1, gates_first=True, target=_BANDWIDTH),
    ),
    cost=_norm_cost,
    rows=("x", "gate"),
)
OPERATIONS = (SHORT_CONV, GATED_DELTA_RULE, SSD, GATED_NORM)
