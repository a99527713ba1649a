"""One step's input: what the device is told of every chunk, and that nobody waits for the device meanwhile."""

from array import array
from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine import batch
from engine.batch import build_batch
from engine.plan import Chunk
from engine.protocol import SamplingParams
from engine.sequence import Sequence

CPU, FAKE = torch.device("cpu"), torch.device("meta")
BLOCK_SIZE = 4


def sequence(length: int, blocks: list[int]) -> Sequence:
    made = Sequence("s", [100 + i for i in range(length)], SamplingParams(1), b"")
    made.block_table = array("q", blocks)
    return made


DECODES = [Chunk(sequence(6, [7, 3]), 5, 1, True), Chunk(sequence(3, [4]), 2, 1, True)]
PROMPTS = [Chunk(sequence(9, [8, 1, 6]), 4, 3, False), Chunk(sequence(5, [2, 5]), 0, 5, True)]


class Copies(TorchFunctionMode):
    """To another device: of pageable memory, for which the device is waited for, and of pinned memory, as `to_device` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = [x for part in args for x in (part if isinstance(part, list | tuple) else [part])]
        if is_there(result) and not any(map(is_there, given)):
            self.made["pinned" if kwargs.get("non_blocking") else "pageable"] += 1
        return result


def is_there(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


@pytest.mark.parametrize(("chunks", "transfers"), [(DECODES, 1), (PROMPTS, 1), (DECODES + PROMPTS, 2)])
def test_no_part_of_a_step_is_copied_in_a_way_that_waits_for_the_device(
    chunks: list[Chunk], transfers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "to_device", lambda tensor, device: tensor.to(device, non_blocking=True))
    with Copies() as copies:
        build_batch(chunks, BLOCK_SIZE, FAKE)
    assert copies.made == {"pinned": transfers}


def test_every_chunk_is_described() -> None:
    made = build_batch(DECODES + PROMPTS, BLOCK_SIZE, CPU)
    assert made.token_ids.tolist() == [105, 102, 104, 105, 106, 100, 101, 102, 103, 104]
    assert made.positions.tolist() == [5, 2, 4, 5, 6, 0, 1, 2, 3, 4]
    assert made.slot_mapping.tolist() == [13, 18, 4, 5, 6, 8, 9, 10, 11, 20]
    assert made.num_decodes == 2
    assert made.decode is not None
    assert made.decode.block_tables.tolist() == [[7, 3], [4, 4]]
    assert made.decode.context_lens.tolist() == [6, 3]
    assert made.prefill is not None
    assert made.prefill.block_tables.tolist() == [[8, 1, 6], [2, 5, 2]]
    assert made.prefill.cu_seqlens_q.tolist() == [0, 3, 8]
    assert made.prefill.context_lens.tolist() == [7, 5]
    assert made.prefill.cu_seqlens_q.dtype == made.prefill.context_lens.dtype == torch.int32
    assert made.sampling_rows is not None
    assert made.sampling_rows.tolist() == [0, 1, 9]


def test_a_step_of_decodes_alone_chooses_for_every_row() -> None:
    assert build_batch(DECODES, BLOCK_SIZE, CPU).sampling_rows is None
    rest_of_a_prompt = Chunk(sequence(9, [8, 1, 6]), 4, 1, False)
    made = build_batch([rest_of_a_prompt, *DECODES], BLOCK_SIZE, CPU)
    assert made.sampling_rows is not None
    assert made.sampling_rows.tolist() == [1, 2]
