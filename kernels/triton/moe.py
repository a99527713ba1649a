"""Experts without waiting for the host: tokens are sorted on the device, and two launches serve all.

One launch computes gate, up and activation of all experts, the other one down. Then each token's results are summed in the order of its experts. A
table made on the device names the expert of each tile of rows. The grid is large enough for the worst case; programs of unused tiles end at once.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.elementwise.activation import clamped_swiglu, gelu_tanh_and_mul, relu2, silu_and_mul
from pilotlight.kernels.matrices.weight import PLAIN, GatedActivation, Operands, Weight, plain_operands
from pilotlight.kernels.triton.elementwise.activation import CLAMPED_SWIGLU, GELU_TANH, RELU2, SILU, activated
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch, dense_rows
from pilotlight.kernels.triton.matrices import packed
from pilotlight.kernels.triton.matrices.linear import Tile
from pilotlight.kernels.triton.matrices.packed import multiply_packed, none
from pilotlight.kernels.triton.matrices.tiles import multiply
from pilotlight.kernels.triton.routing import MOST_EXPERTS

# Up to so many pairs of token and expert, each pair finds its place by comparison with all other pairs, in one launch.
_MOST_COMPARED = 4096
WARPS = 2  # warps of a program that share rows of a four-bit weight
_GROUP_TILES = 8  # tiles of rows that take turns at the same rows of a weight


class DecodingLimits(NamedTuple):
    """The numbers of rows per expert, on average, that decide where weights are decoded.

    For 512 rows for each of 32 experts in MXFP4 of 2880 x 2880 an H100 took 5.8 ms when it decoded tile by tile; decoding into memory takes it less
    than 0.8 ms, and multiplying 2.0.
    """

    most_in_registers: int = 64  # with up to so many rows, four-bit weights are multiplied in registers
    fewest_in_memory: int = 128  # with more rows than these, experts are decoded into memory
    scratch_bytes: int = 256 << 20  # size of that memory; experts are decoded in parts if it is too small


_USUAL_LIMITS = DecodingLimits()


@jit(of_batch=("pairs", "tiles", "search_steps"))
def _by_expert(
    ids, order, table, pairs, experts, tiles, rows_a_tile, search_steps,
    IS_SORTED: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert, stably, and fill the table of tiles.

    order [pairs]: the pairs by expert. table [tiles, 3]: each tile's expert (-1: none), its first row in that order, and the end of its rows. With
    IS_SORTED the ids are sorted already, and order is not changed.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    if IS_SORTED:
        ends = _up_to(ids, expert, pairs, search_steps, EXPERTS)
        counts = ends - _up_to(ids, expert - 1, pairs, search_steps, EXPERTS)
    else:
        mine = program * PAIRS + tl.arange(0, PAIRS)
        my_id = tl.load(ids + mine, mask=mine < pairs, other=0).to(tl.int32)
        place = tl.zeros([PAIRS], tl.int32)
        for start in range(0, pairs, PAIRS):
            other = start + tl.arange(0, PAIRS)
            other_id = tl.load(ids + other, mask=other < pairs, other=EXPERTS).to(tl.int32)
            is_before = (other_id[None, :] < my_id[:, None]) | (
                (other_id[None, :] == my_id[:, None]) & (other[None, :] < mine[:, None])
            )
            place += tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(order + place, mine.to(tl.int64), mask=mine < pairs)
        counts = tl.zeros([EXPERTS], tl.int32)
        for start in range(0, pairs, COUNTED):
            other = start + tl.arange(0, COUNTED)
            other_id = tl.load(ids + other, mask=other < pairs, other=0).to(tl.int32)
            counts += tl.histogram(other_id, EXPERTS, mask=other < pairs)
        ends = tl.cumsum(counts, axis=0)
    its_tiles = (counts + rows_a_tile - 1) // rows_a_tile
    tile_ends = tl.cumsum(its_tiles, axis=0)
    tile = program * TILES + tl.arange(0, TILES)
    its_expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    is_its = expert[None, :] == its_expert[:, None]
    first_tile = tl.sum(tl.where(is_its, (tile_ends - its_tiles)[None, :], 0), axis=1)
    begin = tl.sum(tl.where(is_its, (ends - counts)[None, :], 0), axis=1)
    end = tl.sum(tl.where(is_its, ends[None, :], 0), axis=1)
    first_row = begin + (tile - first_tile) * rows_a_tile
    entry = table + tile * 3
    tl.store(entry, tl.where(its_expert < EXPERTS, its_expert, -1), mask=tile < tiles)
    tl.store(entry + 1, first_row, mask=tile < tiles)
    tl.store(entry + 2, tl.minimum(first_row + rows_a_tile, end), mask=tile < tiles)


@jit
def _up_to(ids, most, pairs, search_steps, EXPERTS: tl.constexpr):
    """Return for each value in `most` [EXPERTS] how many of the sorted ids are at most that value."""
    low, high = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32) + pairs
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_open = low < high
        goes_on = tl.load(ids + middle, mask=is_open, other=0).to(tl.int32) <= most
        low = tl.where(is_open & goes_on, middle + 1, low)
        high = tl.where(is_open & (goes_on == 0), middle, high)
    return low


@jit
def _place(table, tiles, row_tiles, group_tiles):
    """Return the pointer to a program's row of `table`, and its tile of rows of the weight."""
    program = tl.program_id(0)
    band = program // (group_tiles * row_tiles)
    in_band = tl.minimum(tiles - band * group_tiles, group_tiles)
    within = program - band * group_tiles * row_tiles
    return table + (band * group_tiles + within % in_band) * 3, within // in_band


@jit(of_batch=("tiles", "group_tiles", "first_expert", "experts"))
def _gate_up(
    x, weight, scales, zeros, bias, order, table, hidden,
    x_token, hidden_row, bias_expert, top_k, tiles, intermediate, columns, weight_expert, weight_row, scales_expert, scales_row, row_group,
    column_group, group_tiles, first_expert, experts, alpha, limit,
    KIND: tl.constexpr, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute gates, if there are any, and ups of `experts` experts from `first_expert` on.

    `weight` has only these.
    """
    entry, row_tile = _place(table, tiles, tl.cdiv(intermediate, ROWS), group_tiles)
    expert = tl.load(entry).to(tl.int64)
    i = expert - first_expert
    if (i >= 0) & (i < experts):
        place = tl.load(entry + 1) + tl.arange(0, TOKENS)
        is_token = place < tl.load(entry + 2)
        token = tl.load(order + place, mask=is_token, other=0) // top_k
        row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_row = row < intermediate
        gate, up = multiply(
            x + token * x_token, is_token, weight + i * weight_expert, scales + i * scales_expert, zeros + i * scales_expert,
            row, is_row, intermediate, 0, columns, columns, weight_row, scales_row, row_group, column_group,
            FORMAT, HAS_ZEROS, IS_GATED, TOKENS, ROWS, HALF,
        )  # fmt: skip
        if HAS_BIAS:
            biases = bias + expert * bias_expert + row
            gate += tl.load(biases, mask=is_row, other=0.0).to(tl.float32)[None, :]
            if IS_GATED:
                up += tl.load(biases + intermediate, mask=is_row, other=0.0).to(tl.float32)[None, :]
        if not IS_GATED:
            up = gate
        value = activated(gate, up, alpha, limit, KIND)
        target = hidden + place.to(tl.int64)[:, None] * hidden_row + row[None, :]
        tl.store(target, value.to(hidden.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


@jit(of_batch=("tiles", "group_tiles", "first_expert", "experts"))
def _down(
    hidden, weight, scales, zeros, bias, order, table, out,
    hidden_row, out_pair, bias_expert, tiles, rows, columns, weight_expert, weight_row, scales_expert, scales_row, row_group, column_group,
    group_tiles, first_expert, experts,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute downs of `experts` experts from `first_expert` on; `weight` has only these."""
    entry, row_tile = _place(table, tiles, tl.cdiv(rows, ROWS), group_tiles)
    expert = tl.load(entry).to(tl.int64)
    i = expert - first_expert
    if (i >= 0) & (i < experts):
        place = tl.load(entry + 1) + tl.arange(0, TOKENS)
        is_token = place < tl.load(entry + 2)
        pair = tl.load(order + place, mask=is_token, other=0)
        row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_row = row < rows
        sums, _ = multiply(
            hidden + place.to(tl.int64) * hidden_row, is_token,
            weight + i * weight_expert, scales + i * scales_expert, zeros + i * scales_expert,
            row, is_row, 0, 0, columns, columns, weight_row, scales_row, row_group, column_group, FORMAT, HAS_ZEROS, False, TOKENS, ROWS, HALF,
        )  # fmt: skip
        if HAS_BIAS:
            sums += tl.load(bias + expert * bias_expert + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        target = out + pair[:, None] * out_pair + row[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


@jit(of_batch=("tiles", "group_tiles"))
def _gate_up_packed(
    x, words, scales, zeros, bias, order, table, hidden, magic,
    x_token, hidden_row, bias_expert, top_k, tiles, intermediate, columns, weight_expert, weight_row, scales_expert, scales_row,
    group_tiles, alpha, limit,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCKS: tl.constexpr, LATE: tl.constexpr,
    PAIRWISE: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute _gate_up with four-bit weights, by tiles of up to 16 rows; x is in words of two columns."""
    entry, row_tile = _place(table, tiles, tl.cdiv(intermediate, 16), group_tiles)
    expert = tl.load(entry).to(tl.int64)
    if expert >= 0:
        begin, end, x_at, is_token = tl.load(entry + 1), tl.load(entry + 2), none(), none()
        for t in tl.static_range(TOKENS // 8):
            place = begin + t * 8 + tl.arange(0, WARPS * 8)[:, None] % 8
            x_at += (x + tl.load(order + place, mask=place < end, other=0) // top_k * x_token,)
            is_token += (place < end,)
        row = row_tile * 16
        totals = multiply_packed(
            x_at, is_token, words + expert * weight_expert, scales + expert * scales_expert, zeros + expert * scales_expert,
            (row, intermediate + row), (intermediate - 1, 2 * intermediate - 1), magic, columns, weight_row, scales_row,
            hidden.dtype.element_ty, FORMAT, HAS_ZEROS, BLOCKS, LATE, PAIRWISE, TOKENS, 2, WARPS, True,
        )  # fmt: skip
        row += tl.arange(0, 16)[None, :]
        for t in tl.static_range(TOKENS // 8):
            gate, up = tl.trans(totals[t]), tl.trans(totals[TOKENS // 8 + t])
            if HAS_BIAS:
                biases = bias + expert * bias_expert + row
                gate += tl.load(biases, mask=row < intermediate, other=0.0).to(tl.float32)
                up += tl.load(biases + intermediate, mask=row < intermediate, other=0.0).to(tl.float32)
            place = begin + t * 8 + tl.arange(0, 8)[:, None]
            value = activated(gate, up, alpha, limit, KIND).to(hidden.dtype.element_ty)
            mask = (place < end) & (row < intermediate)
            tl.store(hidden + place.to(tl.int64) * hidden_row + row, value, mask=mask)


@jit(of_batch=("tiles", "group_tiles"))
def _down_packed(
    hidden, words, scales, zeros, bias, order, table, out, magic,
    hidden_row, out_pair, bias_expert, tiles, rows, columns, weight_expert, weight_row, scales_expert, scales_row, group_tiles,
    HAS_BIAS: tl.constexpr, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCKS: tl.constexpr, LATE: tl.constexpr,
    PAIRWISE: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute _down with four-bit weights; `hidden` is in words of two columns."""
    entry, row_tile = _place(table, tiles, tl.cdiv(rows, 16), group_tiles)
    expert = tl.load(entry).to(tl.int64)
    if expert >= 0:
        begin, end, x_at, is_token = tl.load(entry + 1), tl.load(entry + 2), none(), none()
        for t in tl.static_range(TOKENS // 8):
            place = begin + t * 8 + tl.arange(0, WARPS * 8)[:, None] % 8
            x_at += (hidden + place.to(tl.int64) * hidden_row,)
            is_token += (place < end,)
        row = row_tile * 16
        totals = multiply_packed(
            x_at, is_token, words + expert * weight_expert, scales + expert * scales_expert, zeros + expert * scales_expert,
            (row,), (rows - 1,), magic, columns, weight_row, scales_row,
            out.dtype.element_ty, FORMAT, HAS_ZEROS, BLOCKS, LATE, PAIRWISE, TOKENS, 1, WARPS, True,
        )  # fmt: skip
        row += tl.arange(0, 16)[None, :]
        for t in tl.static_range(TOKENS // 8):
            total, place = tl.trans(totals[t]), begin + t * 8 + tl.arange(0, 8)[:, None]
            if HAS_BIAS:
                total += tl.load(bias + expert * bias_expert + row, mask=row < rows, other=0.0).to(tl.float32)
            mask = (place < end) & (row < rows)
            pair = tl.load(order + place, mask=place < end, other=0)
            tl.store(out + pair * out_pair + row, total.to(out.dtype.element_ty), mask=mask)


@jit
def _weighted_sum(pairs, weights, out, top_k, columns, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    token = program // blocks
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(top_k):
        pair = token * top_k + i
        total += tl.load(weights + pair) * tl.load(pairs + pair * columns + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: GatedActivation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limits: DecodingLimits = _USUAL_LIMITS,
) -> torch.Tensor:
    """Compute moe_experts of kernels/moe.py."""
    kind, alpha, limit = _kind(activation)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.operands().is_permuted:
            why = "has permuted columns, which experts do not support: they share one input"
            raise ArgumentError("moe_experts", name, why)
    first, second = gate_up.operands(), down.operands()
    check_launch("moe_experts", "gate_up", first.weight.shape[0], "experts", MOST_EXPERTS)
    x, weights = dense_rows(x), weights.contiguous()
    tokens, hidden_size = x.shape
    is_gated = kind != RELU2
    intermediate, num_experts, top_k = first.rows // (1 + is_gated), first.weight.shape[0], expert_ids.shape[1]
    gate_up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias))
    out = torch.empty((tokens, second.rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    pairs = tokens * top_k
    hidden = torch.empty((pairs, intermediate), dtype=x.dtype, device=x.device)
    by_pair = torch.empty((pairs, second.rows), dtype=x.dtype, device=x.device)
    biases = (x if gate_up_bias is None else gate_up_bias), (x if down_bias is None else down_bias)
    bias_experts = tuple(0 if bias is None else bias.stride(0) for bias in (gate_up_bias, down_bias))
    is_few = pairs <= limits.most_in_registers * num_experts
    if is_gated and is_few and packed.takes(x, first) and packed.takes(hidden, second):
        tile_tokens = 8 if pairs <= 4 * num_experts else 16
        order, table = by_expert(expert_ids, num_experts, tile_tokens)
        tiles, words = table.shape[0], packed.in_words(x)
        _gate_up_packed[(tiles * triton.cdiv(intermediate, 16),)](
            words, first.weight.view(torch.int32), first.scales, first.zeros, biases[0], order, table, hidden, packed.MAGIC[x.dtype],
            words.stride(0), intermediate, bias_experts[0], top_k, tiles, intermediate, hidden_size,
            first.weight_expert // 4, first.weight_row // 4, first.scales_expert, first.scales_row, _GROUP_TILES, alpha, limit,
            KIND=kind, HAS_BIAS=gate_up_bias is not None, PAIRWISE=x.is_cuda, TOKENS=tile_tokens, WARPS=WARPS,
            num_warps=WARPS, maxnreg=packed.REGISTERS[tile_tokens, 2], **packed.flags(first),
        )  # fmt: skip
        _down_packed[(tiles * triton.cdiv(second.rows, 16),)](
            packed.in_words(hidden), second.weight.view(torch.int32), second.scales, second.zeros, biases[1], order, table, by_pair,
            packed.MAGIC[x.dtype], intermediate // 2, second.rows, bias_experts[1], tiles, second.rows, intermediate,
            second.weight_expert // 4, second.weight_row // 4, second.scales_expert, second.scales_row, _GROUP_TILES,
            HAS_BIAS=down_bias is not None, PAIRWISE=x.is_cuda, TOKENS=tile_tokens, WARPS=WARPS,
            num_warps=WARPS, maxnreg=packed.REGISTERS[tile_tokens, 1], **packed.flags(second),
        )  # fmt: skip
    else:
        is_many = pairs > limits.fewest_in_memory * num_experts
        is_decoded = is_many and packed.is_decodable(x, first) and packed.is_decodable(x, second)
        scratch_bytes = limits.scratch_bytes if is_decoded else 0
        tile = tile_for(pairs, num_experts, x.dtype, is_decoded or first.format == second.format == PLAIN)
        order, table = by_expert(expert_ids, num_experts, tile.tokens)
        tiles = table.shape[0]
        for begin, experts, part in _parts(first, x.dtype, scratch_bytes):
            _gate_up[(tiles * triton.cdiv(intermediate, tile.rows),)](
                x, part.weight, part.scales, part.zeros, biases[0], order, table, hidden,
                x.stride(0), intermediate, bias_experts[0], top_k, tiles, intermediate, hidden_size,
                part.weight_expert, part.weight_row, part.scales_expert, part.scales_row, part.row_group, part.column_group,
                _GROUP_TILES, begin, experts, alpha, limit,
                KIND=kind, FORMAT=part.format, HAS_ZEROS=part.has_zeros, HAS_BIAS=gate_up_bias is not None,
                IS_GATED=is_gated, TOKENS=tile.tokens, ROWS=tile.rows, HALF=tile.half, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        rows = tile.rows * 2  # twice the rows of _gate_up, since _down computes one product for each row, not two
        for begin, experts, part in _parts(second, x.dtype, scratch_bytes):
            _down[(tiles * triton.cdiv(second.rows, rows),)](
                hidden, part.weight, part.scales, part.zeros, biases[1], order, table, by_pair,
                intermediate, second.rows, bias_experts[1], tiles, second.rows, intermediate,
                part.weight_expert, part.weight_row, part.scales_expert, part.scales_row, part.row_group, part.column_group,
                _GROUP_TILES, begin, experts,
                FORMAT=part.format, HAS_ZEROS=part.has_zeros, HAS_BIAS=down_bias is not None,
                TOKENS=tile.tokens, ROWS=rows, HALF=tile.half, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    blocks = triton.cdiv(second.rows, 1024)
    _weighted_sum[(tokens * blocks,)](by_pair, weights, out, top_k, second.rows, blocks, BLOCK=1024, num_warps=4)
    return out


def _parts(stored: Operands, dtype: torch.dtype, scratch_bytes: int) -> Iterator[tuple[int, int, Operands]]:
    """Yield the first expert, the number of experts and their weight, in parts.

    A weight that stays packed, without scratch memory, is one part. If it is decoded into memory, each part reuses the memory of the previous one.
    """
    experts, rows = stored.weight.shape[:2]
    if not scratch_bytes:
        yield 0, experts, stored
        return
    times = triton.cdiv(experts, max(1, scratch_bytes // (rows * stored.columns * dtype.itemsize)))
    step = triton.cdiv(experts, times)
    scratch = torch.empty((step, rows, stored.columns), dtype=dtype, device=stored.weight.device)
    for begin in range(0, experts, step):
        some = scratch[: min(step, experts - begin)]
        packed.decode_rows(stored, some.flatten(0, 1), begin * rows)
        yield begin, len(some), plain_operands(some)


def by_expert(
    expert_ids: torch.Tensor, num_experts: int, rows_a_tile: int, most_compared: int = _MOST_COMPARED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs sorted by expert, and the table of tiles, without waiting for the device.

    expert_ids [tokens, top_k]. order [pairs] int64: flat indices of expert_ids by expert; table [tiles, 3] int32: for each tile its expert, or -1,
    and where its rows start and end in that order.
    `most_compared`: the most pairs that find their places by comparison; more are sorted by torch.
    """
    ids = expert_ids.flatten().contiguous()
    pairs = ids.numel()
    tiles = pairs // rows_a_tile + min(num_experts, pairs)
    table = torch.empty((tiles, 3), dtype=torch.int32, device=ids.device)
    is_sorted = pairs > most_compared
    if is_sorted:
        ids, order = ids.sort(stable=True)
    else:
        order = torch.empty((pairs,), dtype=torch.int64, device=ids.device)
    experts = triton.next_power_of_2(num_experts)
    programs = triton.cdiv(tiles, 16) if is_sorted else max(triton.cdiv(pairs, 64), triton.cdiv(tiles, 16))
    _by_expert[(programs,)](
        ids, order, table, pairs, num_experts, tiles, rows_a_tile, pairs.bit_length() + 1,
        IS_SORTED=is_sorted, EXPERTS=experts, PAIRS=64, TILES=16, COUNTED=512, num_warps=4,
    )  # fmt: skip
    return order, table


def tile_for(pairs: int, experts: int, dtype: torch.dtype, is_plain: bool) -> Tile:
    """Return the tile for an average number of rows per expert.

    A program computes `rows` gates and as many ups. With the largest tile all registers are in use, and none are left for decoding.
    """
    stages = 2 if dtype == torch.float32 else 3
    if pairs <= 16 * experts:
        return Tile(16, 32, 64, 4, stages)
    if pairs <= 64 * experts:
        return Tile(64, 64, 32, 8, stages)
    if pairs > 256 * experts and is_plain and dtype != torch.float32:
        return Tile(128, 128, 32, 8, 4)
    return Tile(128, 64, 32, 8, stages)


def _kind(activation: GatedActivation) -> tuple[int, float, float]:
    if activation is silu_and_mul:
        return SILU, 0.0, 0.0
    if isinstance(activation, partial) and activation.func is clamped_swiglu:
        return CLAMPED_SWIGLU, activation.keywords["alpha"], activation.keywords["limit"]
    if activation is gelu_tanh_and_mul:
        return GELU_TANH, 0.0, 0.0
    if activation is relu2:
        return RELU2, 0.0, 0.0
    raise ArgumentError(
        "moe_experts",
        "activation",
        f"is {activation!r}; it must be silu_and_mul, gelu_tanh_and_mul, relu2 or a partial of clamped_swiglu",
    )
