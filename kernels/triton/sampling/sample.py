"""Choice of one token per row without a sort; the token equals that of kernels/sampling/sample.py.

A row is cut into chunks, one program each, so that few long rows fill a GPU. A row is read three times, after the first time from the L2 cache:

1. `_tops`: each chunk's highest logit.
2. `_count`: how many logits of a row have which cost, in bins of 1/32 of a factor of two (rows that top-k or top-p truncate).
3. `_bound`, one program a row: derives from the counts a narrow *window* of costs in which truncation ends.
4. `_sum`: adds up the logits that are cheaper than the window and so certainly kept, and lists the tokens in the window.
5. `_pick`, one program a row: bisects the window over the listed tokens, exactly, and inverts the cumulative distribution, first over chunks, then
inside one.

A window holds tens of tokens of a language model's logits, and thousands if they are as flat as noise; the list has room for all of them.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.sampling.sampling_batch import POWER, SamplingBatch
from pilotlight.kernels.sampling.sampling_scale import FAR, GREEDY_SCALE
from pilotlight.kernels.triton.jit import jit

CHUNK = 8192  # logits per program
TILE = 2048  # logits in registers at once
BINS = 1024  # bins of a row's costs; the last bin also counts all higher costs
_NO_FUSION = {"enable_fp_fusion": False}  # products and sums are rounded one by one, as in torch

_BIN_BITS = tl.constexpr(19)
_BIN = tl.constexpr(1 << 19)
_FAR = tl.constexpr(FAR)
_GREEDY = tl.constexpr(GREEDY_SCALE)
_P5, _P4, _P3, _P2, _P1, _P0 = map(tl.constexpr, POWER)


@jit
def _cost(logits, top, scale):
    distance = (top - logits) * scale
    return tl.where(distance < _FAR * 1.0, distance, _FAR * 1.0).to(tl.int32)  # NaN is far, too


@jit
def _weight(cost):
    part = (cost & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
    power = part * _P5 + _P4
    power = power * part + _P3
    power = power * part + _P2
    power = power * part + _P1
    power = power * part + _P0
    return (power.to(tl.int64) << 18) >> (cost >> 24).to(tl.int64)


@jit
def _top_of(tops, row, chunks, CHUNKS: tl.constexpr):
    """Return a row's highest logit, NaN if any of its logits is."""
    chunk = tl.arange(0, CHUNKS)
    values = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    is_bad = tl.max((values != values).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    return tl.where(is_bad, float("nan"), top)


@jit
def _tops(
    logits, tops, bests, histogram, num_listed, row_stride, vocab, chunks,
    BINS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    column = tl.arange(0, TILE)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    place = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    bad = tl.zeros([TILE], tl.int32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab), TILE):
        token = start + column
        values = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
        bad = bad | (values != values).to(tl.int32)
        is_higher = values > highest
        highest = tl.where(is_higher, values, highest)
        place = tl.where(is_higher, token, place)
    top = tl.max(highest, axis=0)
    best = tl.min(tl.where(highest == top, place, 0x7FFFFFFF), axis=0)
    at = row * chunks + chunk
    tl.store(tops + at, tl.where(tl.max(bad, axis=0) > 0, float("nan"), top))
    tl.store(bests + at, tl.minimum(best, vocab - 1))
    if chunk == 0:
        bins = tl.arange(0, BINS)
        tl.store(histogram + row * BINS + bins, tl.zeros([BINS], tl.int32))
        tl.store(num_listed + row, 0)


@jit
def _best(tops, bests, ids, highest, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    values = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    places = tl.load(bests + row * chunks + chunk, mask=chunk < chunks, other=0x7FFFFFFF)
    top = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    tl.store(ids + row, tl.min(tl.where((values == top) | (values != values), places, 0x7FFFFFFF), axis=0).to(tl.int64))
    tl.store(highest + row, _top_of(tops, row, chunks, CHUNKS))


@jit(of_batch=("rows",))
def _count(
    logits, tops, integers, reals, histogram, row_stride, rows, vocab, chunks,
    CHUNKS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    if (tl.load(integers + 2 * rows + row) < vocab) | (tl.load(reals + rows + row) < 1.0):
        top = _top_of(tops, row, chunks, CHUNKS)
        scale = tl.load(reals + row).to(tl.float32)
        column, bins = tl.arange(0, TILE), tl.arange(0, BINS)
        counts = tl.zeros([BINS], tl.int32)
        end = tl.minimum(chunk * CHUNK + CHUNK, vocab)
        for start in range(chunk * CHUNK, end, TILE):
            token = start + column
            values = tl.load(logits + row * row_stride + token, mask=token < end, other=float("-inf"))
            cost = tl.where(token < end, _cost(values, top, scale), _FAR)
            counts += tl.histogram(tl.minimum(cost >> _BIN_BITS, BINS - 1), BINS)
            # entries outside the vocabulary were counted in the last bin
            counts -= tl.where(bins == BINS - 1, tl.maximum(start + TILE - end, 0), 0)
        tl.atomic_add(histogram + row * BINS + bins, counts, mask=counts > 0)


@jit(of_batch=("rows",))
def _bound(integers, reals, histogram, bounds, rows, vocab, BINS: tl.constexpr):
    """Fill bounds [rows, 4].

    They are the window's first cost and its last, how many logits cost less than the first, and the highest cost that may be kept.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(integers + 2 * rows + row), tl.load(reals + rows + row)
    cut = tl.load(integers + 3 * rows + row).to(tl.int32)  # the highest cost that may be kept
    first = cut + 1  # first cost of the window, which is empty so far and ends at `last`
    last = cut
    num_before = 0
    if (top_k < vocab) | (top_p < 1.0):
        bins = tl.arange(0, BINS)
        counts = tl.load(histogram + row * BINS + bins)
        cumulative = tl.cumsum(counts, axis=0)
        inside = cut + 1  # logits below this cost certainly count in top-p's total
        if top_k < vocab:
            bin_of_kth = tl.sum((cumulative < top_k).to(tl.int32), axis=0)
            inside = tl.minimum(inside, bin_of_kth * _BIN)
            cut = tl.minimum(cut, tl.where(bin_of_kth >= BINS - 1, _FAR, (bin_of_kth + 1) * _BIN - 1))
            first, last = inside, cut
        if top_p < 1.0:
            begin = bins * _BIN
            end = tl.where(bins == BINS - 1, _FAR, begin + _BIN)
            # The polynomial is within 5 units of 2**-24 of monotone: a margin of 2**-20 is safe.
            most = _weight(begin)
            most = tl.where(begin <= cut, (most + (most >> 20) + 1) * counts, 0)
            least = _weight(end)
            least = tl.where(end <= inside, tl.maximum(least - (least >> 20) - 1, 0) * counts, 0)
            most_before, least_before = tl.cumsum(most, axis=0), tl.cumsum(least, axis=0)
            most_total, least_total = tl.sum(most, axis=0), tl.sum(least, axis=0)
            # The nucleus ends in the first bin with which the kept weight reaches top_p of the total, or the remaining weight falls below 1 - top_p.
            # Each test has an error relative to its own size, so both are used: the first is sharp for a small top_p, the second for one near 1.
            wanted_least = (top_p * least_total.to(tl.float64) * 0.999999).to(tl.int64) - 1
            wanted_most = (top_p * most_total.to(tl.float64) * 1.000001).to(tl.int64) + 1
            rest_least = ((1.0 - top_p) * least_total.to(tl.float64) * 0.999999).to(tl.int64) - 1
            rest_most = ((1.0 - top_p) * most_total.to(tl.float64) * 1.000001).to(tl.int64) + 2
            too_early = (most_before < wanted_least) | (least_total - least_before > rest_most)
            surely_there = (least_before >= wanted_most) | (most_total - most_before <= rest_least)
            earliest = tl.sum(too_early.to(tl.int32), axis=0)
            latest = tl.sum(1 - surely_there.to(tl.int32), axis=0)
            first = tl.minimum(first, tl.minimum(earliest, BINS - 1) * _BIN)
            if top_k >= vocab:  # with top-k the total is unknown until the tokens up to the k-th are listed
                last = tl.minimum(cut, tl.where(latest >= BINS - 1, _FAR, (latest + 1) * _BIN - 1))
        num_before = tl.sum(tl.where((bins * _BIN) < first, counts, 0), axis=0)
    tl.store(bounds + row * 4, first)
    tl.store(bounds + row * 4 + 1, last)
    tl.store(bounds + row * 4 + 2, num_before)
    tl.store(bounds + row * 4 + 3, cut)


@jit
def _sum(
    logits, tops, reals, bounds, sums, num_listed, listed, row_stride, vocab, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fill sums [rows, chunks, 2] int64: the certainly kept weight, and the total that top-p refers to.

    The total does not apply if top-k truncates first.
    """
    row, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    top = _top_of(tops, row, chunks, CHUNKS)
    scale = tl.load(reals + row).to(tl.float32)
    first, last = tl.load(bounds + row * 4), tl.load(bounds + row * 4 + 1)
    cut = tl.load(bounds + row * 4 + 3)
    column = tl.arange(0, TILE)
    sure, whole = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    end = tl.minimum(chunk * CHUNK + CHUNK, vocab)
    for start in range(chunk * CHUNK, end, TILE):
        token = start + column
        values = tl.load(logits + row * row_stride + token, mask=token < end, other=float("-inf"))
        cost = tl.where(token < end, _cost(values, top, scale), _FAR)
        weight = _weight(cost)
        sure += tl.where((cost < first) & (cost <= cut), weight, 0)
        whole += tl.where(cost <= cut, weight, 0)
        is_listed = (token < end) & (cost >= first) & (cost <= last)
        num = tl.sum(is_listed.to(tl.int32), axis=0)
        if num > 0:
            place = tl.atomic_add(num_listed + row, num) + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
            tl.store(listed + row * vocab + place, token, mask=is_listed)
    at = (row * chunks + chunk) * 2
    tl.store(sums + at, tl.sum(sure, axis=0))
    tl.store(sums + at + 1, tl.sum(whole, axis=0))


@jit
def _listed_costs(logits, listed, start, count, top, scale, TILE: tl.constexpr):
    """Return the costs of listed tokens, and the tokens.

    Entries past the end get a cost above every floor.
    """
    index = start + tl.arange(0, TILE)
    token = tl.load(listed + index, mask=index < count, other=0)
    values = tl.load(logits + token, mask=index < count, other=float("-inf"))
    return tl.where(index < count, _cost(values, top, scale), 0x7FFFFFFF), token


@jit
def _weight_up_to(floor, cost):
    return tl.where(cost <= floor, _weight(tl.minimum(cost, _FAR)), 0)


@jit(of_batch=("rows",))
def _pick(
    logits, tops, integers, reals, sums, bounds, num_listed, listed, ids, highest, row_stride, rows, vocab, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    listed += row * vocab
    top = _top_of(tops, row, chunks, CHUNKS)
    wide_scale, top_p = tl.load(reals + row), tl.load(reals + rows + row)
    scale, top_k = wide_scale.to(tl.float32), tl.load(integers + 2 * rows + row)
    count = tl.load(num_listed + row)
    first, floor = tl.load(bounds + row * 4), tl.load(bounds + row * 4 + 1)
    # the first tile of the list, nearly always all of it, stays in registers
    cost, token = _listed_costs(logits, listed, 0, count, top, scale, TILE)
    weight = _weight(tl.minimum(cost, _FAR))
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < chunks
    sure = tl.load(sums + (row * chunks + chunk) * 2, mask=is_chunk, other=0)
    surely = tl.sum(sure, axis=0)
    total = tl.sum(tl.load(sums + (row * chunks + chunk) * 2 + 1, mask=is_chunk, other=0), axis=0)
    if top_k < vocab:
        num_before = tl.load(bounds + row * 4 + 2)
        low, high = first, floor
        while low < high:  # find the least cost up to which there are top_k tokens
            middle = low + (high - low) // 2
            num = num_before + tl.sum((cost <= middle).to(tl.int32), axis=0)
            for start in range(TILE, count, TILE):
                more, _ = _listed_costs(logits, listed, start, count, top, scale, TILE)
                num += tl.sum((more <= middle).to(tl.int32), axis=0)
            if num >= top_k:
                high = middle
            else:
                low = middle + 1
        floor = tl.minimum(floor, low)
        total = surely + tl.sum(tl.where(cost <= floor, weight, 0), axis=0)
        for start in range(TILE, count, TILE):
            more, _ = _listed_costs(logits, listed, start, count, top, scale, TILE)
            total += tl.sum(_weight_up_to(floor, more), axis=0)
    if top_p < 1.0:
        wanted = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)
        low, high = first, floor
        while low < high:  # find the least cost up to which the wanted weight is reached
            middle = low + (high - low) // 2
            reached = surely + tl.sum(tl.where(cost <= middle, weight, 0), axis=0)
            for start in range(TILE, count, TILE):
                more, _ = _listed_costs(logits, listed, start, count, top, scale, TILE)
                reached += tl.sum(_weight_up_to(middle, more), axis=0)
            if reached >= wanted:
                high = middle
            else:
                low = middle + 1
        floor = tl.minimum(floor, low)
    if count > 0:
        for i in range(0, chunks):
            kept = tl.sum(tl.where((cost <= floor) & (token // CHUNK == i), weight, 0), axis=0)
            for start in range(TILE, count, TILE):
                more, its = _listed_costs(logits, listed, start, count, top, scale, TILE)
                kept += tl.sum(tl.where(its // CHUNK == i, _weight_up_to(floor, more), 0), axis=0)
            sure += tl.where(chunk == i, kept, 0)
    seed, position = tl.load(integers + row).to(tl.uint64, bitcast=True), tl.load(integers + rows + row)
    word_0, word_1, _, _ = tl.philox(
        seed, (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32), 0, 0
    )
    # The factor is 2**-53.
    number = ((word_0.to(tl.int64) << 21) | (word_1.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16
    number = tl.where(wide_scale < _GREEDY, number, 0.0)  # target 0 takes the first of a greedy row's best
    ends = tl.cumsum(sure, axis=0)
    kept = tl.sum(sure, axis=0)
    target = tl.minimum((number * kept.to(tl.float64)).to(tl.int64), kept - 1)
    chosen = tl.minimum(tl.sum(((ends <= target) & is_chunk).to(tl.int32), axis=0), chunks - 1)
    before = tl.sum(tl.where(chunk < chosen, sure, 0), axis=0)
    column = tl.arange(0, TILE)
    picked = vocab - 1
    end = tl.minimum(chosen * CHUNK + CHUNK, vocab)
    for start in range(chosen * CHUNK, end, TILE):
        its = start + column
        values = tl.load(logits + its, mask=its < end, other=float("-inf"))
        weight = tl.where(its < end, _weight_up_to(floor, _cost(values, top, scale)), 0)
        beyond = before + tl.cumsum(weight, axis=0) > target
        picked = tl.minimum(picked, tl.min(tl.where(beyond, its, 0x7FFFFFFF), axis=0))
        before += tl.sum(weight, axis=0)
    tl.store(ids + row, picked.to(tl.int64))
    tl.store(highest + row, top)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, chunk: int = CHUNK, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sample of kernels/sampling/sample.py.

    A program takes `chunk` tokens of a row, and reads `tile` of them at a time.
    """
    rows, vocab = logits.shape
    device = logits.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    highest = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return ids, highest
    chunks = triton.cdiv(vocab, chunk)
    row_stride = logits.stride(0)
    tops = torch.empty(rows * chunks, dtype=torch.float32, device=device)
    # Each of these buffers starts at a multiple of 16 bytes; otherwise a kernel would be compiled again for unaligned ones.
    padded = [-(-rows * each // 4) * 4 for each in (chunks, BINS, 4, 1)]
    bests, histogram, bounds, num_listed = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)  # type: ignore[no-untyped-call]
    sizes = {"CHUNKS": triton.next_power_of_2(chunks), "CHUNK": chunk, "TILE": tile, "num_warps": 8, **_NO_FUSION}
    _tops[(rows * chunks,)](
        logits, tops, bests, histogram, num_listed, row_stride, vocab, chunks,
        BINS=BINS, CHUNK=chunk, TILE=tile, num_warps=8,
    )  # fmt: skip
    if not batch.drawn:
        _best[(rows,)](tops, bests, ids, highest, chunks, CHUNKS=sizes["CHUNKS"], num_warps=1)
        return ids, highest
    parameters = (batch.integers, batch.reals)
    if batch.truncates:
        _count[(rows * chunks,)](
            logits, tops, *parameters, histogram, row_stride, rows, vocab, chunks, BINS=BINS, **sizes
        )
    sums = torch.empty(rows * chunks * 2, dtype=torch.int64, device=device)
    listed = torch.empty(rows * vocab if batch.truncates else 0, dtype=torch.int32, device=device)
    _bound[(rows,)](*parameters, histogram, bounds, rows, vocab, BINS=BINS, num_warps=4)
    _sum[(rows * chunks,)](
        logits, tops, batch.reals, bounds, sums, num_listed, listed, row_stride, vocab, chunks, **sizes
    )
    _pick[(rows,)](
        logits, tops, *parameters, sums, bounds, num_listed, listed, ids, highest, row_stride, rows, vocab, chunks, **sizes
    )  # fmt: skip
    return ids, highest
