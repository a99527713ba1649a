"""Triton forms beyond the catalogue, and their shared parts: FP8, tanh, splits, the numbering of tiles."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from load_tests.catalogue import attention as catalogue
from load_tests.catalogue.operation import Arguments, Case, Operation, copied, in_double
from pilotlight.kernels.triton.attention import hopper_mla, split_kv
from pilotlight.kernels.triton.attention.paged_tiles import tanh
from pilotlight.kernels.triton.attention.varlen import sequence_of
from pilotlight.kernels.triton.elementwise.qkv import rotate_and_cache
from pilotlight.kernels.triton.matrices.fp8_codes import BY_BITS, conversion, decode_fp8, encode_fp8
from tests.closeness import assert_close
from tests.kernels.conftest import DEVICE

CONVERSIONS = sorted({BY_BITS, conversion(torch.ones(1, device=DEVICE))})


@triton.jit
def _encode(x, out, BLOCK: tl.constexpr, FP8: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, encode_fp8(tl.load(x + i), FP8))


@triton.jit
def _decode(x, out, FP8: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, decode_fp8(tl.load(x + i), FP8))


@triton.jit
def _tanh(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tanh(tl.load(x + i)))


@triton.jit
def _number(starts, seqs, out, out_tile, rows_per_token, ROWS: tl.constexpr):
    seq, tile = sequence_of(tl.program_id(0), starts, seqs, rows_per_token, tl.arange(0, 128), ROWS)
    tl.store(out + tl.program_id(0), seq)
    tl.store(out_tile + tl.program_id(0), tile)


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_every_half_becomes_the_nearest_fp8(conversion: int) -> None:
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16).float()
    # also numbers between two fp16 values, on both sides of every tie
    x = torch.cat((halves, halves * (1 + 2.0**-20), halves * (1 - 2.0**-20)))
    out = torch.empty(x.shape, dtype=torch.uint8)
    _encode[(x.numel() // 4096,)](x, out, BLOCK=4096, FP8=conversion)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out.view(torch.float8_e4m3fn).isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(out[known], expected.view(torch.uint8)[known])


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_every_fp8_is_read_exactly(conversion: int) -> None:
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    _decode[(1,)](codes, out, FP8=conversion)
    expected = codes.view(torch.float8_e4m3fn).half()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_tanh_is_precise_relative_to_itself() -> None:
    x = torch.cat((torch.logspace(-12, 1.5, 2000), -torch.logspace(-12, 1.5, 2000), torch.zeros(96)))
    out = torch.empty_like(x)
    _tanh[(1,)](x, out, BLOCK=4096)
    exact = x.double().tanh()
    error = ((out.double() - exact) / torch.where(exact == 0, 1.0, exact)).abs().max()
    assert float(error) <= 4 * 2.0**-24


@pytest.mark.parametrize("rows_per_token", [1, 5])
@pytest.mark.parametrize("lens", [[1], [16], [0, 40, 0, 1, 15, 17], [3] * 70])
def test_every_tile_of_a_batch_is_numbered_once(lens: list[int], rows_per_token: int) -> None:
    rows = 16
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    number = sum(lens) * rows_per_token // rows + len(lens)
    seqs, tiles = torch.empty(number, dtype=torch.int32), torch.empty(number, dtype=torch.int32)
    _number[(number,)](starts, len(lens), seqs, tiles, rows_per_token, ROWS=rows)
    found = list(zip(seqs.tolist(), tiles.tolist(), strict=True))
    wanted = [(seq, tile) for seq, n in enumerate(lens) for tile in range(-(-n * rows_per_token // rows))]
    assert [pair for pair in found if pair[1] * rows < lens[pair[0]] * rows_per_token] == wanted


ATTENTIONS = [
    pytest.param(operation, id=operation.name)
    for operation in (
        catalogue.DECODE_ATTENTION,
        catalogue.VERIFY_ATTENTION,
        catalogue.PREFILL_ATTENTION,
        catalogue.MLA_DECODE,
        catalogue.MLA_PREFILL,
    )
]


def poisoned(given: Arguments) -> Arguments:
    """Return the same call, with NaN in all memory that it must not read: after contexts, and in blocks before windows."""
    made, rule, batch = copied(given), given.get("rule"), given.get("batch")
    if (rule is not None and rule.kv_scales is not None) or given.get("cache_scale") is not None:
        return made
    for name in ("k_cache", "v_cache", "cache"):
        if name in made:  # memory after contexts has this number; NaN would remain visible even with a weight of zero
            made[name][made[name] == 300.0] = torch.nan
    if rule is None or rule.window is None:
        return made
    tables = given["block_tables"] if batch is None else batch.block_tables
    lens = given["context_lens"].tolist() if batch is None else batch.host_context_lens
    q_lens = [1] * len(lens) if batch is None else batch.host_q_lens
    for table, length, queries in zip(tables, lens, q_lens, strict=True):
        position = length - queries
        first = position // rule.window * rule.window if rule.is_chunked else max(0, position - rule.window + 1)
        unseen = table[: first // given["k_cache"].shape[1]]
        made["k_cache"][unseen] = made["v_cache"][unseen] = torch.nan
    return made


def has_poison_before_a_window(given: Arguments) -> bool:
    if given["rule"].window is None or given["rule"].kv_scales is not None:
        return False
    return bool((poisoned(given)["k_cache"].isnan() & (given["k_cache"] != 300.0)).any())


@pytest.mark.long
@pytest.mark.parametrize(
    "operation", [catalogue.PREFILL_ATTENTION, catalogue.MLA_PREFILL], ids=lambda operation: operation.name
)
def test_a_prompt_reads_nothing_beyond_its_context_or_before_its_window(operation: Operation) -> None:
    """The tests below cover decodes, in every case and split."""
    cases = [(case, case.make(torch.float32)) for case in operation.cases]
    windowed = [each for each in cases if "rule" in each[1] and has_poison_before_a_window(each[1])]
    assert windowed or operation is catalogue.MLA_PREFILL
    for case, given in (*cases[1:4], *windowed[:3]):  # without the first case, which has no queries
        expected = operation.reference(**in_double(given))
        assert_close(case.name, expected, operation.triton_form()(**poisoned(given)), 10 * 2.0**-24)


SPLITS = [(1, 1), (2, 1), (5, 1), (3, 20), (4, 256)]  # number of splits, and fewest keys of a used one


@pytest.mark.long
@pytest.mark.parametrize("operation", [p for p in ATTENTIONS if "prefill" not in str(p.id)])
@pytest.mark.parametrize(
    "turns", [(0, 2), pytest.param((1, 3, 4), marks=pytest.mark.slow)], ids=["two of each case", "the others"]
)
def test_a_split_context_gives_what_a_whole_one_gives(
    operation: Operation, turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, case in enumerate(operation.cases):
        given = case.make(torch.float32)
        lens = given["context_lens"] if "context_lens" in given else given["batch"].context_lens
        if not len(lens):
            continue
        expected = operation.reference(**in_double(given))
        for number, least in (SPLITS[(i + turn) % len(SPLITS)] for turn in turns):
            monkeypatch.setattr(split_kv, "num_splits", lambda *_, number=number: number)
            if DEVICE == "cpu":  # on a GPU compiled kernels keep the constant that they were compiled with
                monkeypatch.setattr(split_kv, "_LEAST", tl.constexpr(least))
            name = f"{case.name}, {number} splits"
            assert_close(name, expected, operation.triton_form()(**poisoned(given)), 10 * 2.0**-24)


@pytest.mark.long
@pytest.mark.parametrize("case", catalogue.MLA_DECODE.cases[5:7], ids=lambda case: case.name)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_hoppers_form_of_latent_attention_gives_the_same_in_splits(
    case: Case, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case.make(torch.float16)
    assert hopper_mla.takes(given["q_latent"], given["q_rotary"], given["cache"]) or DEVICE != "cpu"
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: number)
    expected = catalogue.MLA_DECODE.reference(**in_double(given))
    assert_close("decoded", expected, catalogue.MLA_DECODE.triton_form()(**given), 1e-3)


def test_splits_are_enough_for_every_processor_and_none_is_tiny() -> None:
    def splits(programs: int, keys: int) -> int:
        return split_kv.num_splits(programs, keys, torch.device("cpu"))  # as on eight processors

    assert splits(1, 100) == 1
    assert splits(1, 8192) == 16, "two programs for each processor"
    assert splits(1, 1 << 20) == 64, "eight rounds of long splits"
    assert splits(1000, 1 << 20) == 1, "there are enough programs"
    assert splits(4, 512) == 2, "no split has fewer than 256 keys"


def test_programs_with_a_processor_each_are_split_into_two_rounds_and_fill_the_last() -> None:
    def splits(programs: int, keys: int) -> int:
        return split_kv.num_splits(programs, keys, torch.device("cpu"), is_alone=True)  # as on eight processors

    assert splits(8, 8192) == 2
    assert splits(2, 8192) == 8
    assert splits(2, 600) == 3, "no split has fewer than 256 keys"
    assert splits(9, 8192) == 5, "45 programs in six short rounds, not 18 in three longer ones"
    assert splits(1000, 1 << 20) == 1, "there are enough programs"
    assert splits(1, 0) == 1


@pytest.mark.parametrize("make", [torch.zeros, torch.ones])
def test_another_layer_of_the_arena_stays_as_it_was(make: Callable[..., torch.Tensor]) -> None:
    arena = make(5, 2, 2, 4, 2, 8)
    angles: Arguments = {"cos": torch.rand(6, 4), "sin": torch.rand(6, 4)}
    rotate_and_cache(
        torch.randn(6, 7, 8),
        None,
        0.0,
        **angles,
        k_cache=arena[:, 1, 0],
        v_cache=arena[:, 1, 1],
        slot_mapping=torch.randperm(20)[:6],
    )
    assert torch.equal(arena[:, 0], make(5, 2, 4, 2, 8))
