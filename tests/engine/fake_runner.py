"""A runner without a model: the next token is a function of the tokens before it, and the cache is checked rather than filled."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.engine import Engine
from engine.kv.tiers import EngineTiers
from engine.protocol import ModelInfo
from engine.results import ChunkResult, RunResult, SampledToken
from engine.scheduler import Chunk, Limits
from engine.sequence import Sequence

VOCAB = 1000


def next_token(token_ids: SequenceOf[int]) -> int:
    return (sum(token_ids[-3:]) * 31 + len(token_ids)) % VOCAB


class FakeRunner:
    """Remembers what each slot was last written with, and fails when a chunk would read anything but its own prefix."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, ...] | None] = [None] * (num_blocks * block_size)
        self.scrubbed: list[int] = []
        self.bad_sequences: set[str] = set()
        self.explode = False
        self.batch_tokens: list[int] = []

    def run(self, chunks: SequenceOf[Chunk]) -> RunResult:
        if self.explode:
            raise RuntimeError("the device is on fire")
        assert len({chunk.sequence for chunk in chunks}) == len(chunks), "a sequence was scheduled twice"
        self.batch_tokens.append(sum(chunk.length for chunk in chunks))
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                self.slots[self._slot(chunk.sequence, position)] = tuple(chunk.sequence.token_ids[: position + 1])
        for chunk in chunks:  # after all writes: no sequence may have written into another's blocks
            for position in range(chunk.end):
                content = self.slots[self._slot(chunk.sequence, position)]
                assert content == tuple(chunk.sequence.token_ids[: position + 1]), "foreign or stale cache content"
        return RunResult([ChunkResult(self._sample(chunk) if chunk.samples else None) for chunk in chunks], 0.0)

    def scrub(self, blocks: SequenceOf[int]) -> None:
        self.scrubbed += blocks

    def reset(self) -> None:
        self.slots = [None] * len(self.slots)

    def _sample(self, chunk: Chunk) -> SampledToken:
        return SampledToken(next_token(chunk.sequence.token_ids), chunk.sequence.sequence_id not in self.bad_sequences)

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size


def fake_engine(
    num_blocks: int = 32,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_waiting: int = 100,
    eos_token_ids: tuple[int, ...] = (),
    make_tiers: Callable[[FakeRunner], EngineTiers] | None = None,
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_blocks, block_size)
    info = ModelInfo(
        name="tiny",
        context_length=num_blocks * block_size,
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
        dtype="float32",
        block_size=block_size,
        total_blocks=num_blocks,
        weights_bytes=0,
        load_s=0.0,
    )
    limits = Limits(block_size, max_num_batched_tokens, max_num_seqs, max_waiting)
    return Engine(info, runner, limits, tiers=make_tiers(runner) if make_tiers else None), runner
