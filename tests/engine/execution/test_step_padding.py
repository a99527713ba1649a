"""Steps that are padded to the shape of a recording: each repeated token has the position, context and block table of its original."""

import random
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.chunk_steps import step_of
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.core.step import StepInput
from pilotlight.engine.execution.decode_graphs import CudaRecorder
from pilotlight.engine.execution.step_padding import MOST_TOKENS, PromptShape, padded
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk
from tests.checkpoints import write_llama
from tests.cpu_kernels import skip_where_lengths_are_read_on_the_host
from tests.engine.driver import Heard, drain, load_engine, random_prompt, submit
from tests.engine.execution.test_decode_graphs import StandIn, with_graphs
from tests.engine.families import SEVERAL_TABLES, write_family

BLOCK_SIZE = 4


def chunk(start: int, end: int, seed: int, samples: bool = True) -> Chunk:
    made = Sequence("s", [1000 * seed + i for i in range(end)], SamplingParams(1), b"", num_computed_tokens=start)
    made.tables = [BlockTable([100 * seed + i for i in range(-(-end // BLOCK_SIZE))])]
    return Chunk(made, start, end, samples)


def sequences_of(step: StepInput) -> list[tuple[tuple[int, ...], ...]]:
    """Return for each chunk its token ids, positions, slots, and the blocks of its context."""
    (group,), found = step.groups, []
    for i, (first, length, context) in enumerate(
        zip(accumulate(step.lengths, initial=0), step.lengths, step.context_lens, strict=False)
    ):
        of_decodes = i < step.num_decodes
        blocks, width = group.decodes if of_decodes else group.prompts
        row = i if of_decodes else i - step.num_decodes
        table = blocks[row * width : (row + 1) * width]
        parts = [tuple(numbers[first : first + length]) for numbers in (step.token_ids, step.positions, group.slots)]
        found.append((*parts, tuple(table[: -(-context // BLOCK_SIZE)])))
    return found


def test_every_step_is_padded_with_what_it_holds() -> None:
    draw, shapes = random.Random(3), 0
    for _ in range(300):
        decodes = [chunk(at := draw.randrange(1, 60), at + 1, 1 + i) for i in range(draw.randrange(0, 12))]
        starts = [draw.choice((0, draw.randrange(40))) for _ in range(draw.randrange(1, 5))]
        prompts = [chunk(at, at + draw.randrange(2, 40), 50 + i, draw.random() < 0.7) for i, at in enumerate(starts)]
        step = step_of([*decodes, *prompts], BLOCK_SIZE)
        shape = PromptShape.of(step)
        if shape is None:
            continue
        shapes += 1
        num_decodes = len(decodes) + draw.randrange(3) if decodes else 0
        made = padded(step, num_decodes, shape)
        before, after = sequences_of(step), sequences_of(made)
        assert len(after) == num_decodes + shape.chunks
        assert len(made.token_ids) == sum(made.lengths) == num_decodes + shape.tokens <= num_decodes + MOST_TOKENS
        assert after[: len(decodes)] == before[: len(decodes)]
        assert after[num_decodes : num_decodes + len(prompts)] == before[len(decodes) :]
        known = {place for one in before for place in zip(*one[:3], strict=True)}
        for one, length, context in zip(after, made.lengths, made.context_lens, strict=True):
            assert set(zip(*one[:3], strict=True)) <= known, "repeated rows must be equal"
            assert one[1] == tuple(range(context - length, context)), "queries must be at the end of the context"
        wanted = step.logit_rows if step.logit_rows is not None else range(len(step.token_ids))
        assert [made.token_ids[row] for row in made.logit_rows or ()] == [step.token_ids[row] for row in wanted]
    assert shapes > 200


def test_a_token_that_only_the_device_knows_is_fed_to_its_copies_too() -> None:
    first, other = chunk(5, 6, 1), chunk(3, 4, 2)
    first.sequence.token_ids[-1] = PENDING
    step = step_of([first, other, chunk(0, 9, 3)], BLOCK_SIZE, {first.sequence: 7})
    shape = PromptShape.of(step)
    assert shape is not None
    assert padded(step, 4, shape).feeds == ((0, 7), (2, 7), (3, 7))


@pytest.mark.parametrize("lengths", [(MOST_TOKENS + 1,), (700,), (2,) * 5])
def test_large_steps_and_those_of_many_prompts_are_not_recorded(lengths: tuple[int, ...]) -> None:
    assert PromptShape.of(step_of([chunk(0, n, 1 + i) for i, n in enumerate(lengths)], BLOCK_SIZE)) is None


@pytest.mark.parametrize(("length", "tokens"), [(5, 8), (200, 256), (300, 384), (511, 640)])
def test_few_tokens_are_padded_to_powers_of_two_and_many_by_a_step(length: int, tokens: int) -> None:
    shape = PromptShape.of(step_of([chunk(0, length, 1)], BLOCK_SIZE))
    assert shape is not None
    assert shape.tokens == tokens


@pytest.mark.parametrize(
    ("lengths", "is_padded"), [((512,), False), ((128, 256), False), ((64, 64, 64, 64), False), ((100, 28, 128), True)]
)
def test_what_is_of_a_size_is_not_padded(lengths: tuple[int, ...], is_padded: bool) -> None:
    step = step_of([chunk(0, n, 1 + i) for i, n in enumerate(lengths)], BLOCK_SIZE)
    shape = PromptShape.of(step)
    assert shape is not None
    assert (shape.tokens > sum(lengths)) is is_padded
    if not is_padded:
        assert sequences_of(padded(step, 0, shape)) == sequences_of(step)


def arriving(engine: Engine) -> dict[str, Heard]:
    """Run prompts that arrive one after another while earlier ones are decoded; some share cached blocks."""
    heard: dict[str, Heard] = {}
    shared = random_prompt(40, seed=99)
    for i in range(40):
        prompt = shared[: 20 * (i % 3)] + random_prompt(9 + i % 4, seed=i)
        more = {} if i % 2 else {"temperature": 0.8, "seed": i}
        engine.submit(submit(f"{i}", prompt, max_tokens=6 + i % 5, **more))
        for _ in range(2):
            engine.step()
            for output in engine.sequences.take_outputs():
                heard.setdefault(output.sequence_id, Heard()).hear(output)
    return drain(engine, [], heard=heard)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("model") for name in ("llama", SEVERAL_TABLES[0])}
    write_llama(found["llama"])
    write_family(found[SEVERAL_TABLES[0]], SEVERAL_TABLES[0])
    return found


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama", SEVERAL_TABLES[0]])
@pytest.mark.parametrize("depth", [1, 2])
def test_replayed_steps_with_prompts_choose_the_same_tokens(
    checkpoints: dict[str, Path], model: str, depth: int
) -> None:
    skip_where_lengths_are_read_on_the_host()
    expected = arriving(load_engine(checkpoints[model]))
    engine = load_engine(checkpoints[model], depth=depth)
    graphs = with_graphs(engine, CudaRecorder() if torch.cuda.is_available() else StandIn())
    heard = arriving(engine)
    assert {name: one.token_ids for name, one in heard.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    assert sum(shape.prompts is not None for shape in graphs.recorded) >= 2, "steps with prompts were recorded"
