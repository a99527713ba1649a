"""Steps recorded once and replayed, on a GPU as CUDA graphs and on a CPU as programs of its C library.

One launch replaces hundreds. Sequences take one token each, or a few to be verified; on a GPU, where a host takes longer to launch a few hundred
tokens than the device to compute them, short prompts may be included (step_padding.py). A graph has fixed shapes, so batches are padded to the next
of a few sizes. A size is recorded after it was needed a few times, so serving has already started and the most common sizes come first; the least
recently used one is evicted. If a size cannot be recorded, because memory is short or torch computes part of it, its steps run without a graph, and
it is tried again when it has been needed eight times as often. This module is independent of models.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from pilotlight.engine.core.step import StepInput
from pilotlight.engine.device.transfer import copy_to_device
from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.execution.packed_step import PackedStep
from pilotlight.engine.execution.state_places import StateGroups
from pilotlight.engine.execution.step_padding import PromptShape, one_by_one, padded, power_of_two
from pilotlight.kernels.state.state_batch import NO_BLOCK

log = logging.getLogger(__name__)

WANTED_TIMES = 4  # uses after which a size is recorded: recording costs about as much as ten steps
AGAIN = 8  # a failed recording is tried again after this many times as many uses, so that attempts take little time
# Limit of context tokens that a step may read twice because drafts differ in number: for an 8B model 16 GiB, about 5 ms of an H100. Without a
# recording a step takes 12 ms more (estimated, not measured).
_MOST_READ_AGAIN = 128 * 1024
_MAX_PADDING = 8  # most added rows: sizes are powers of two up to twice this number, then its multiples

# Hidden states, and logits if the recording includes them; one row per token.
Outputs = tuple[torch.Tensor, ...]
Forward = Callable[[Batch], Outputs]


class Recorder(Protocol):
    def takes(self, rows: int) -> bool:
        """True if steps of this number of rows can be recorded now."""

    def record(self, forward: Callable[[], Outputs]) -> "StepRecording":
        """Record the computation of `forward`. Raises RuntimeError if it cannot be recorded."""


class StepRecording(Protocol):
    @property
    def output(self) -> Outputs: ...

    def replay(self) -> None:
        """Compute `output` again from the inputs' present values."""


class GraphShape(NamedTuple):
    sequences: int
    rows: int  # tokens
    longest: int  # most tokens of one sequence
    blocks: int  # blocks per table of a decode
    prompts: PromptShape | None = None
    has_adapters: bool = False

    @classmethod
    def of(cls, step: StepInput, pads: bool, has_states: bool = False) -> "GraphShape | None":
        """Return the shape in which a step is computed, or None if it is not recorded.

        Steps with prompts are recorded only if `pads` is set and their prompts are short. Decodes with different numbers of drafts are not recorded
        if padding would read too much context twice. Neither are recorded if layers keep states, and nothing is padded then: tokens update a state
        in order, and once.
        """
        sequences, rows, has_adapters = len(step.lengths), len(step.token_ids), step.adapter_slots is not None
        if step.num_decodes < sequences:
            prompts = PromptShape.of(step) if pads and not has_states else None
            if prompts is None:
                return None
            decodes = _padded_rows(step.num_decodes) if step.num_decodes else 0
            sequences, rows = decodes + prompts.chunks, decodes + prompts.tokens
            return cls(sequences, rows, 1, step.table_width, prompts, has_adapters)
        longest = max(step.lengths) if step.checks_drafts else 1
        if pads:
            if rows != sequences * longest:
                again = sum([context * (n - 1) for context, n in zip(step.context_lens, step.lengths, strict=True)])
                if again > _MOST_READ_AGAIN or has_states:
                    return None
                sequences, longest = rows, 1
            if not has_states:
                sequences = _padded_rows(sequences)
            rows = sequences * longest
        return cls(sequences, rows, longest, step.table_width, None, has_adapters)

    def pad(self, step: StepInput) -> StepInput:
        """Return the step padded to the shape's number of sequences."""
        if self.prompts is None:
            is_even = (
                self.rows == self.sequences * self.longest
            )  # false if steps are not padded and drafts differ in number
            if is_even and len(step.token_ids) != len(step.lengths) * self.longest:
                step = one_by_one(step)
            return step.repeated(self.sequences - len(step.lengths))
        return padded(step, self.sequences - self.prompts.chunks, self.prompts)


class ReadyStep(NamedTuple):
    """A step whose input is on the device."""

    compute: Callable[[], Outputs]  # valid until the next step
    logit_rows: torch.Tensor | None  # tokens whose logits are needed; None for all


class DecodeGraphs:
    def __init__(
        self,
        forward: Forward,
        block_size: int,
        recorder: Recorder,
        device: torch.device,
        state_groups: StateGroups = MappingProxyType({}),
        pads: bool = True,
        most: int = 48,
    ) -> None:
        """`pads`: whether steps are padded to few sizes, as some more rows cost the device no time.

        `most`: most graphs to keep, because each takes memory.
        """
        self._forward = forward
        self._block_size = block_size
        self._recorder = recorder
        self._device = device
        self._state_groups = state_groups
        self._pads = pads
        self._most = most
        self.recorded: dict[GraphShape, _Graph] = {}
        self._wanted: Counter[GraphShape] = Counter()  # uses of shapes without a graph
        self._record_at: dict[GraphShape, int] = {}  # uses after which a shape is recorded, if not after WANTED_TIMES
        self.num_failures = 0

    @property
    def num_graphs(self) -> int:
        return len(self.recorded)

    def ready(self, step: StepInput, chosen: torch.Tensor | None = None) -> ReadyStep | None:
        """Copy a step's input to its recording, made now if the shape is common; None without a recording.

        `chosen`: the tokens that the previous step chose.
        """
        shape = GraphShape.of(step, self._pads, bool(self._state_groups))
        if shape is None or not self._recorder.takes(shape.rows):
            return None
        graph = self.recorded.pop(shape, None)
        if graph is None and not self._is_wanted(shape):
            return None
        packed = PackedStep.of(shape.pad(step), self._state_groups)
        graph = graph or self._record(shape, packed)
        if graph is None:
            return None
        self.recorded[shape] = graph  # last, as the most recently used
        return graph.ready(packed, chosen, len(step.token_ids) if shape.prompts is None else shape.rows)

    def _is_wanted(self, shape: GraphShape) -> bool:
        """Count one more use of a shape; return True if it should be recorded now."""
        self._wanted[shape] += 1
        if self._wanted[shape] < self._record_at.get(shape, WANTED_TIMES):
            return False
        self._record_at[shape] = AGAIN * self._wanted[shape]
        return True

    def _record(self, shape: GraphShape, packed: PackedStep) -> "_Graph | None":
        if len(self.recorded) >= self._most:
            del self.recorded[next(iter(self.recorded))]
        try:
            return _Graph.record(packed, shape.blocks * self._block_size, self._forward, self._device, self._recorder)
        except RuntimeError as error:
            level = logging.DEBUG if self.num_failures else logging.INFO
            self.num_failures += 1
            message = "steps of %d rows cannot be recorded now and run without a recording: %s"
            log.log(level, message, shape.rows, error)
            return None


class _Graph(NamedTuple):
    inputs: torch.Tensor  # the numbers of a step, with space for feeds and rows of logits
    recording: StepRecording

    @classmethod
    def record(
        cls, example: PackedStep, longest: int, forward: Forward, device: torch.device, recorder: Recorder
    ) -> "_Graph":
        """`longest`: the longest context that steps of the shape may have."""
        tokens, size = len(example.step.token_ids), example.feeds.start
        inputs = torch.zeros(size + 2 * (tokens + 1) + tokens, dtype=torch.int64, device=device)
        copy_to_device(torch.frombuffer(example.numbers[:size], dtype=torch.int64), inputs[:size])
        inputs[:tokens].clamp_(min=0)  # replaces PENDING, which is no token id
        for states in example.states.values():  # otherwise recording would advance them, and the replay once more
            inputs[states.before] = inputs[states.after] = NO_BLOCK
        batch = replace(example.batch(inputs, longest), logit_rows=None)
        return cls(inputs, recorder.record(lambda: forward(batch)))

    def ready(self, packed: PackedStep, chosen: torch.Tensor | None, tokens: int) -> ReadyStep:
        """Copy a step's input to the graph. `tokens`: number of output rows without padding."""
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
    """A recorder of CUDA graphs; they share memory, a stream and workspaces, because one runs at a time."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._pool = cuda.graph_pool_handle()
        self._stream = cuda.Stream()

    def takes(self, rows: int) -> bool:
        return True

    def record(self, forward: Callable[[], Outputs]) -> "_CudaRecording":
        """Record without torch.cuda.graph, which waits for the device and frees cached and pinned memory.

        Other threads load models and copy blocks during a recording: their calls must neither fail nor end it.
        """
        serving, graph = self._cuda.current_stream(), self._cuda.CUDAGraph()
        self._stream.wait_stream(serving)
        try:
            with self._cuda.stream(self._stream):
                # a run without recording: libraries allocate and load at their first call, which is forbidden in a recording
                forward()
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
