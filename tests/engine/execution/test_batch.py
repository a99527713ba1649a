"""The input of one step: the data of all chunks is copied to the device in one transfer, without waiting for the device."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.chunk_steps import step_of
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.execution.packed_step import PackedStep, build_batch
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk

CPU, FAKE = torch.device("cpu"), torch.device("meta")
BLOCK_SIZE = 4


def sequence(length: int, blocks: list[int]) -> Sequence:
    made = Sequence("s", [100 + i for i in range(length)], SamplingParams(1), b"")
    made.tables = [BlockTable(blocks)]
    return made


DECODES = [Chunk(sequence(6, [7, 3]), 5, 6, True), Chunk(sequence(3, [4]), 2, 3, True)]
VERIFIES = [Chunk(sequence(4, [9, 10]), 3, 4, True, drafts=(7, 8)), Chunk(sequence(2, [11]), 1, 2, True, drafts=(6,))]
PROMPTS = [Chunk(sequence(9, [8, 1, 6]), 4, 7, False), Chunk(sequence(5, [2, 5]), 0, 5, True)]


class Copies(TorchFunctionMode):
    """A counter of copies to another device: from pageable memory, which waits for the device, and from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.pin_memory:
            return args[0]  # without a GPU no memory can be pinned
        result = function(*args, **kwargs)
        given = [x for part in args for x in (part if isinstance(part, list | tuple) else [part])]
        if is_there(result) and not any(map(is_there, given)):
            self.made["pinned" if kwargs.get("non_blocking") else "pageable"] += 1
        return result


def is_there(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


def build(chunks: list[Chunk]) -> Batch:
    return build_batch(step_of(chunks, BLOCK_SIZE), CPU)


def padded(*tables: list[int]) -> list[list[int]]:
    """Pad each table to 32 blocks with its first block."""
    return [table + table[:1] * (32 - len(table)) for table in tables]


@pytest.mark.parametrize("chunks", [DECODES, PROMPTS, DECODES + PROMPTS, DECODES + VERIFIES + PROMPTS])
def test_a_step_is_copied_at_once_in_a_way_that_waits_for_no_device(chunks: list[Chunk]) -> None:
    with Copies() as copies:
        build_batch(step_of(chunks, BLOCK_SIZE), FAKE)
    assert copies.made == {"pinned": 1}


def test_every_chunk_is_described() -> None:
    made = build(DECODES + VERIFIES + PROMPTS)
    assert made.token_ids.tolist() == [105, 102, 103, 7, 8, 101, 6, 104, 105, 106, 100, 101, 102, 103, 104]
    assert made.positions.tolist() == [5, 2, 3, 4, 5, 1, 2, 4, 5, 6, 0, 1, 2, 3, 4]
    assert made.num_decoded == 7
    (group,) = made.groups
    assert group.slot_mapping.tolist() == [13, 18, 39, 40, 41, 45, 46, 4, 5, 6, 8, 9, 10, 11, 20]
    assert group.decode is None
    assert group.verify is not None
    assert group.verify.block_tables.tolist() == padded([7, 3], [4], [9, 10], [11])
    assert group.verify.cu_seqlens_q.tolist() == [0, 1, 2, 5, 7]
    assert group.verify.context_lens.tolist() == [6, 3, 6, 3]
    assert group.verify.cu_seqlens_q.dtype == group.verify.context_lens.dtype == torch.int32
    assert group.verify[3:] == ((1, 1, 3, 2), (6, 3, 6, 3), None)
    assert group.prefill is not None
    assert group.prefill.block_tables.tolist() == [[8, 1, 6], [2, 5, 2]]
    assert group.prefill.cu_seqlens_q.tolist() == [0, 3, 8]
    assert group.prefill.context_lens.tolist() == [7, 5]
    assert group.prefill.cu_seqlens_q.dtype == group.prefill.context_lens.dtype == torch.int32
    assert made.logit_rows is not None
    assert made.logit_rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 14]


def test_tensors_that_a_kernel_reads_begin_where_16_bytes_do() -> None:
    for chunks in (DECODES, DECODES[:1], PROMPTS, DECODES[:1] + VERIFIES + PROMPTS):
        (group,) = build(chunks).groups
        for varlen in (group.verify, group.prefill):
            assert varlen is None or all(tensor.data_ptr() % 16 == 0 for tensor in varlen[:3])
        assert group.decode is None or group.decode.block_tables.data_ptr() % 16 == 0


def test_decodes_alone_are_described_without_lengths_and_all_have_logits() -> None:
    made = build(DECODES)
    assert made.logit_rows is None
    (group,) = made.groups
    assert group.verify is None
    assert group.prefill is None
    assert group.decode is not None
    assert group.decode.block_tables.tolist() == padded([7, 3], [4])
    assert group.decode.context_lens.tolist() == [6, 3]
    assert group.decode.max_context_len == 6
    rest_of_a_prompt = Chunk(sequence(9, [8, 1, 6]), 4, 5, False)
    made = build([rest_of_a_prompt, *DECODES])
    assert made.logit_rows is not None
    assert made.logit_rows.tolist() == [1, 2]


def test_tables_are_as_wide_as_a_power_of_two() -> None:
    long = Chunk(sequence(4 * 33, list(range(33))), 4 * 33 - 1, 4 * 33, True)
    assert step_of([*DECODES, long], BLOCK_SIZE).table_width == 64


def test_a_token_that_the_device_alone_knows_is_fed_from_its_row() -> None:
    decode, other, verified = sequence(6, [7, 3]), sequence(3, [4]), sequence(5, [1, 2])
    decode.token_ids[-1] = verified.token_ids[-1] = PENDING
    chunks = [Chunk(other, 2, 3, True), Chunk(decode, 5, 6, True), Chunk(verified, 4, 5, True, drafts=(1, 2))]
    step = step_of([*chunks, *PROMPTS], BLOCK_SIZE, {decode: 3, verified: 0})
    made = build_batch(step, CPU, chosen=torch.tensor([50, 51, 52, 53]))
    assert made.token_ids.tolist()[:5] == [102, 53, 50, 1, 2]


def test_a_step_that_is_padded_writes_nothing_else_and_nowhere_else() -> None:
    """Padding repeats the first sequence of the step, including the token that the previous step chose for it."""
    decode, other = sequence(6, [7, 3]), sequence(3, [4, 5])
    decode.token_ids[-1] = PENDING
    for drafts in ((), (8, 9)):
        chunks = [Chunk(decode, 5, 6, True, drafts=drafts), Chunk(other, 2, 3, True, drafts=drafts)]
        step = step_of(chunks, BLOCK_SIZE, {decode: 1, other: 0})
        many = step_of([*chunks, *chunks[:1] * 2], BLOCK_SIZE, {decode: 1, other: 0})
        assert step.repeated(2)._replace(logit_rows=None) == many
        chosen = torch.tensor([50, 51])
        assert build_batch(step.repeated(2), CPU, chosen).token_ids.tolist() == [51, *drafts, 102, *drafts] + 2 * [
            51,
            *drafts,
        ]
        assert len(PackedStep.of(step.repeated(2)).numbers) == len(PackedStep.of(many).numbers)
