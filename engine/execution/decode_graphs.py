"""Steps recorded once and replayed, on a GPU as CUDA graphs and on a CPU as programs of its C library: one launch for hundreds.

Sequences take a token each, or a few that are to be verified; on a GPU, where a host takes longer to launch a few hundred tokens than the device to
compute them, short prompts may be among them (step_padding.py). A graph has fixed shapes, so batches are padded to the next of a few sizes. Each size
is recorded when it has been wanted a few times, hence after serving has begun and the commonest first; the one unused for longest makes room. A size
that cannot be recorded, for want of memory or because torch computes a part of it, goes on without, and is tried again when it has been wanted eight
times as often. Knows batches and how to pad them; refuses to know models, and (through its recorder) devices.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from pilotlight.engine.core.step import StepInput
from pilotlight.engine.device.transfer import copy_to_device
from pilotlight.engine.execution.batch import Batch, PackedStep
from pilotlight.engine.execution.step_padding import PromptShape, one_by_one, padded, power_of_two

log = logging.getLogger(__name__)

WANTED_TIMES = 4  # recording costs about as much as ten steps do
AGAIN = 8  # times as often wanted before the next attempt: all that fail take no longer than a share of the steps
# Tokens of contexts that drafts of different numbers may read beyond what they read together: of an 8B model 16 GiB, some 5 ms of an H100, where a
# step that is not recorded takes 12 ms more (estimated from the records of both; not measured).
_MOST_READ_AGAIN = 128 * 1024
_MAX_PADDING = 8  # rows: above it, sizes are multiples of 8 and no powers of two

# Each with a row per token: hidden states, and logits where the recording goes so far.
Outputs = tuple[torch.Tensor, ...]
Forward = Callable[[Batch], Outputs]


class Recorder(Protocol):
    def takes(self, rows: int) -> bool:
        """Tell whether steps of so many rows can be recorded now."""

    def record(self, forward: Callable[[], Outputs]) -> "StepRecording":
        """Record what `forward` computes. Raises RuntimeError when it cannot be recorded."""


class StepRecording(Protocol):
    @property
    def output(self) -> Outputs: ...

    def replay(self) -> None:
        """Compute `output` again from what the inputs hold now."""


class GraphShape(NamedTuple):
    sequences: int
    rows: int  # tokens
    longest: int  # the most tokens of one sequence
    blocks: int  # of a decode's table
    prompts: PromptShape | None = None
    has_adapters: bool = False

    @classmethod
    def of(cls, step: StepInput, pads: bool) -> "GraphShape | None":
        """Return the shape that a step is computed in. None for many tokens of prompts, and where sequences of different numbers of tokens would
        read too much of their contexts again."""
        sequences, rows, has_adapters = len(step.lengths), len(step.token_ids), step.adapter_slots is not None
        if step.num_decodes < sequences:
            prompts = PromptShape.of(step) if pads else None
            if prompts is None:
                return None
            decodes = _padded_rows(step.num_decodes) if step.num_decodes else 0
            sequences, rows = decodes + prompts.chunks, decodes + prompts.tokens
            return cls(sequences, rows, 1, step.table_width, prompts, has_adapters)
        longest = max(step.lengths) if step.checks_drafts else 1
        if pads:
            if rows != sequences * longest:
                again = sum([context * (n - 1) for context, n in zip(step.context_lens, step.lengths, strict=True)])
                if again > _MOST_READ_AGAIN:
                    return None
                sequences, longest = rows, 1
            sequences = _padded_rows(sequences)
            rows = sequences * longest
        return cls(sequences, rows, longest, step.table_width, None, has_adapters)

    def pad(self, step: StepInput) -> StepInput:
        """Return the step with as many sequences as the shape has."""
        if self.prompts is None:
            is_even = (
                self.rows == self.sequences * self.longest
            )  # which a shape is not where nothing is padded and drafts differ
            if is_even and len(step.token_ids) != len(step.lengths) * self.longest:
                step = one_by_one(step)
            return step.repeated(self.sequences - len(step.lengths))
        return padded(step, self.sequences - self.prompts.chunks, self.prompts)


class ReadyStep(NamedTuple):
    """A step whose input is on the device."""

    compute: Callable[[], Outputs]  # valid until the next step
    logit_rows: torch.Tensor | None  # tokens whose logits are wanted; None: all of them


class DecodeGraphs:
    def __init__(
        self,
        forward: Forward,
        block_size: int,
        recorder: Recorder,
        device: torch.device,
        pads: bool = True,
        most: int = 48,
    ) -> None:
        """`pads`: rows are padded, where a few more take a device no longer. `most`: graphs, for what each takes of memory."""
        self._forward = forward
        self._block_size = block_size
        self._recorder = recorder
        self._device = device
        self._pads = pads
        self._most = most
        self._graphs: dict[GraphShape, _Graph] = {}
        self._wanted: Counter[GraphShape] = Counter()  # while there was none of it
        self._record_at: dict[GraphShape, int] = {}  # times wanted; else WANTED_TIMES
        self.num_failures = 0

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def ready(self, step: StepInput, chosen: torch.Tensor | None = None) -> ReadyStep | None:
        """Prepare to compute a step as `forward` would; None where there is no recording. `chosen`: the tokens of the step before."""
        shape = GraphShape.of(step, self._pads)
        if shape is None or not self._recorder.takes(shape.rows):
            return None
        graph = self._graphs.pop(shape, None)
        if graph is None and not self._is_wanted(shape):
            return None
        packed = PackedStep.of(shape.pad(step))
        graph = graph or self._record(shape, packed)
        if graph is None:
            return None
        self._graphs[shape] = graph  # behind all that were used before
        return graph.ready(packed, chosen, len(step.token_ids) if shape.prompts is None else shape.rows)

    def _is_wanted(self, shape: GraphShape) -> bool:
        """Tell whether to record a shape that is wanted once more."""
        self._wanted[shape] += 1
        if self._wanted[shape] < self._record_at.get(shape, WANTED_TIMES):
            return False
        self._record_at[shape] = AGAIN * self._wanted[shape]
        return True

    def _record(self, shape: GraphShape, packed: PackedStep) -> "_Graph | None":
        if len(self._graphs) >= self._most:
            del self._graphs[next(iter(self._graphs))]
        try:
            return _Graph.record(packed, shape.blocks * self._block_size, self._forward, self._device, self._recorder)
        except RuntimeError as error:
            level = logging.DEBUG if self.num_failures else logging.INFO
            self.num_failures += 1
            message = "steps of %d rows cannot be recorded now, and go on one operation after another: %s"
            log.log(level, message, shape.rows, error)
            return None


class _Graph(NamedTuple):
    inputs: torch.Tensor  # the numbers of a step, and room for feeds and rows of logits
    recording: StepRecording

    @classmethod
    def record(
        cls, example: PackedStep, longest: int, forward: Forward, device: torch.device, recorder: Recorder
    ) -> "_Graph":
        """`longest`: context that the steps of the shape may have."""
        tokens, size = len(example.step.token_ids), example.feeds.start
        inputs = torch.zeros(size + 2 * (tokens + 1) + tokens, dtype=torch.int64, device=device)
        copy_to_device(torch.frombuffer(example.numbers[:size], dtype=torch.int64), inputs[:size])
        inputs[:tokens].clamp_(min=0)  # tokens that are not known yet
        batch = replace(example.batch(inputs, longest), logit_rows=None)
        return cls(inputs, recorder.record(lambda: forward(batch)))

    def ready(self, packed: PackedStep, chosen: torch.Tensor | None, tokens: int) -> ReadyStep:
        """`tokens`: of the step before decodes were repeated behind it."""
        there = self.inputs[: len(packed.numbers)]
        copy_to_device(torch.frombuffer(packed.numbers, dtype=torch.int64), there)
        packed.feed(there, chosen)
        return ReadyStep(partial(self._replay, tokens), packed.logit_rows_in(there))

    def _replay(self, tokens: int) -> Outputs:
        self.recording.replay()
        output = self.recording.output
        return output if tokens == output[0].shape[0] else tuple([part[:tokens] for part in output])


def _padded_rows(rows: int) -> int:
    return power_of_two(rows) if rows <= 2 * _MAX_PADDING else -(-rows // _MAX_PADDING) * _MAX_PADDING


class CudaRecorder:
    """Graphs of one model share their memory and their stream, with its workspaces: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def takes(self, rows: int) -> bool:
        return True

    def record(self, forward: Callable[[], Outputs]) -> "_CudaRecording":
        """Record without torch.cuda.graph, which waits for the device and gives all free memory back, pinned memory too. Other threads load models
        and move blocks meanwhile: their calls must neither fail nor end the recording."""
        serving, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._stream.wait_stream(serving)
        try:
            with torch.cuda.stream(self._stream):
                forward()  # for real: libraries allocate and load at their first call, which a recording forbids
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = forward()
                finally:
                    graph.capture_end()
        finally:
            serving.wait_stream(self._stream)
        return _CudaRecording(graph, output)


class _CudaRecording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Outputs

    def replay(self) -> None:
        self.graph.replay()
