"""The runner of a model over its KV cache: a step's input in, tokens out.

This module is independent of sequences, of the receiver of tokens, and of what a block of the cache contains (../kv/pool/layout.py).
"""

import math
import time
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from pilotlight.engine.adapters.bank import AdapterBank
from pilotlight.engine.adapters.content import SlotContent
from pilotlight.engine.adapters.rows import AdapterRows
from pilotlight.engine.api.errors import StepError
from pilotlight.engine.core.chunk_steps import scratch_step
from pilotlight.engine.core.step import ChoiceRow, RunResult, StepInput
from pilotlight.engine.device.transfer import Mark, to_device, to_host
from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.decode_graphs import CudaRecorder, DecodeGraphs, Outputs, ReadyStep
from pilotlight.engine.execution.packed_step import build_batch
from pilotlight.engine.execution.pooling import TextPooling
from pilotlight.engine.execution.sampling import Choices, PromptLogprobs, choose_tokens, prompt_logprobs
from pilotlight.engine.execution.state_places import state_groups
from pilotlight.engine.execution.text_head import TextHead
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.decoder import Decoder, tower_of
from pilotlight.engine.models.model import DraftLayers, Model
from pilotlight.engine.vision.vision_memory import ImageMemory
from pilotlight.kernels.cpu.recording import ProgramRecorder
from pilotlight.kernels.matrices.blocks import BlockWeight

_MOST_PROGRAMS = 256  # most recordings of a model on a CPU, about 60 KB each
_MOST_RECORDED_LOGITS = (
    32  # limit of rows for logits in a recording: each CUDA graph keeps its own, 16 MiB with a vocabulary of 128k
)


class Forwarded(NamedTuple):
    """A step's forward pass, which may still run."""

    logits: torch.Tensor | None  # [rows, vocab], for the requested rows
    prompt_logprobs: dict[int, PromptLogprobs]  # by the chunk's index in the step
    embeddings: dict[int, torch.Tensor]  # by the chunk's index in the step, being copied to the host
    computed_s: float


class ModelRunner:
    def __init__(
        self,
        model: Model,
        layout: CacheLayout,
        kv_cache: torch.Tensor,
        head: TextHead | None = None,
        adapters: AdapterBank | None = None,
        drafts: DraftLayers | None = None,
    ) -> None:
        """Prepare to run a model.

        `kv_cache`: [num_blocks, block_bytes] uint8, blocks of `layout`; `head`: for a model that embeds or classifies texts; `adapters`: slots of
        adapters, None if the model has none; `drafts`: layers that draft for the model.
        """
        self.model = model
        self._drafts = drafts
        self.pooling = None if head is None else head.recipe.pooling
        self._head = head
        self.kv_cache = kv_cache
        self.depth = 2 if kv_cache.is_cuda else 1
        self.layout = layout
        self._layers = layout.views(kv_cache)
        self._state_groups = state_groups(self._layers)
        self.adapters = adapters
        self.graphs: DecodeGraphs | None = self._new_graphs()
        self._earlier_failures = 0  # failed recordings of graphs that have been replaced
        self._texts = TextPooling(self._vectors)
        self.images = ImageMemory()
        self.chosen: torch.Tensor | None = None  # token ids of the last step that chose any

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Forwarded:
        ready = self._ready(step)
        began = time.perf_counter()
        hidden, *logits = ready.compute()
        return self._forwarded(step, hidden, ready.logit_rows, *logits, began=began)

    @torch.inference_mode()
    def choose(self, forwarded: Forwarded, rows: SequenceOf[ChoiceRow]) -> "LaunchedStep":
        began, device = time.perf_counter(), self.kv_cache.device
        choices: Choices | None = None
        if rows:
            logits = forwarded.logits
            assert logits is not None, "a row chooses a token, but the step has no logits"
            if len(rows) < logits.shape[0]:
                logits = logits.index_select(0, to_device(torch.tensor([row.row for row in rows]), device))
            choices = choose_tokens(logits, rows)
            self.chosen = choices.token_ids
        computed_s = forwarded.computed_s + self._since(began)
        return LaunchedStep(choices, forwarded.prompt_logprobs, forwarded.embeddings, Mark(device), computed_s)

    def _ready(self, step: StepInput) -> ReadyStep:
        if self.graphs is not None and not step.images:
            recorded = self.graphs.ready(step, self.chosen)
            if recorded is not None:
                return recorded
        context = self._context(step, self.chosen)
        return ReadyStep(lambda: (hidden_states(self.model, self._drafts, context),), context.batch.logit_rows)

    def _context(self, step: StepInput, chosen: torch.Tensor | None) -> Context:
        """Return the context of a step for the layers. `chosen`: the tokens that the previous step chose."""
        device = self.kv_cache.device
        batch = build_batch(step, device, chosen, self._state_groups)
        images = self.images.rows(step.images, device)
        return Context(batch, self._layers, adapters=adapter_rows(self.adapters, batch), images=images)

    def _forwarded(
        self,
        step: StepInput,
        hidden: torch.Tensor,
        wanted: torch.Tensor | None,
        logits: torch.Tensor | None = None,
        *,
        began: float,
    ) -> Forwarded:
        """Compute the results that a step requests from the last layer's hidden states.

        `wanted`: tokens whose logits are needed, None for all. `logits`: logits of all tokens, if a recording has computed them.
        """
        prompts = {
            asked.chunk: prompt_logprobs(
                self._logits_of, hidden[asked.row : asked.row + len(asked.token_ids)], asked.token_ids, asked.num_top
            )
            for asked in step.prompt_logprobs
        }
        embeddings = {}
        if step.pooling:
            embeddings = {chunk: to_host(vector) for chunk, vector in self._texts.add(step, hidden).items()}
        return Forwarded(self._logits(wanted, hidden, logits), prompts, embeddings, self._since(began))

    def _logits(
        self, wanted: torch.Tensor | None, hidden: torch.Tensor, logits: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self.pooling is not None or (wanted is not None and not len(wanted)):
            return None
        rows = hidden if logits is None else logits
        if wanted is not None:
            rows = rows.index_select(0, wanted)
        return self._logits_of(rows) if logits is None else rows

    def _vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "a model that generates pools no texts"
        return self._head(pooled, self._logits_of, self.layout.dtype)

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)

    def _since(self, began: float) -> float:
        """Return the seconds since `began` if the CPU computes, else 0."""
        return time.perf_counter() - began if self.depth == 1 else 0.0

    @property
    def num_graphs(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_graphs

    @property
    def graph_failures(self) -> int:
        return self._earlier_failures + (0 if self.graphs is None else self.graphs.num_failures)

    def _renew_graphs(self) -> None:
        self._earlier_failures = self.graph_failures
        self.graphs = self._new_graphs()

    def _new_graphs(self) -> DecodeGraphs | None:
        """Return new graphs for the model at its present memory addresses."""
        model, drafts, layers = self.model, self._drafts, self._layers
        device, adapters = self.kv_cache.device, self.adapters
        most_logits = _MOST_RECORDED_LOGITS if self.kv_cache.is_cuda else math.inf

        def forward(batch: Batch) -> Outputs:
            hidden = hidden_states(model, drafts, Context(batch, layers, adapters=adapter_rows(adapters, batch)))
            return (hidden, model.logits(hidden)) if hidden.shape[0] <= most_logits else (hidden,)

        if self.kv_cache.is_cuda:
            return DecodeGraphs(forward, self.layout.block_size, CudaRecorder(), device, self._state_groups)
        head = model.head if isinstance(model, Decoder) else None
        in_blocks = head is not None and isinstance(head.weight, BlockWeight)  # the other matrices have the same format
        recorder = ProgramRecorder(self.layout.dtype, in_blocks)
        return DecodeGraphs(
            forward, self.layout.block_size, recorder, device, self._state_groups, pads=False, most=_MOST_PROGRAMS
        )

    @torch.inference_mode()
    def encode_image(self, name: bytes, piece: torch.Tensor) -> None:
        """Encode the next piece of an image for the following steps; later pipeline stages ignore it."""
        if (tower := tower_of(self.model)) is not None:
            patches = to_device(piece, self.kv_cache.device).to(self.layout.dtype)
            self.images.add(name, tower.encode(patches))

    def place_adapter(self, slot: int, content: SlotContent) -> None:
        """Put an adapter into a slot. Raises AdapterError."""
        assert self.adapters is not None
        if not self.adapters.fits(content):
            self.adapters.grow(content.rank)
            self._renew_graphs()  # existing recordings use the old addresses of the slots
        self.adapters.place(slot, content)

    def replace_model(self, model: Model) -> None:
        """Replace the model by the same one at other addresses, from any thread: a step may use either."""
        self.model = model
        self._renew_graphs()

    @torch.inference_mode()
    def scrub(self, blocks: SequenceOf[int]) -> None:
        """Zero blocks that may contain NaN or infinity."""
        self.kv_cache[list(blocks)] = 0

    @torch.inference_mode()
    def reset(self) -> None:
        self.kv_cache.zero_()

    def warm_up(self, prompt: SequenceOf[int], *, with_decode: bool = True) -> None:
        """Compute a short prompt and one more token, in blocks that no sequence holds yet.

        So the first request does not wait for lazy initialisation, and a model whose results are not finite does not become ready. `with_decode`:
        False computes only the prompt, which suffices if only memory can be cold.
        """
        tokens = list(prompt)
        for start in (0, len(tokens)) if with_decode and self.pooling is None else (0,):
            step, rows = self._scratch_step(tokens, start)
            result = self.choose(self.forward(step), rows).collect()
            if not all([math.isfinite(x) for vector in result.embeddings.values() for x in vector]):
                raise StepError(
                    "its hidden states are not finite; the weights do not fit config.json or the chosen dtype"
                )
            if not all([token.is_finite for token in result.tokens]):
                raise StepError("its logits are not finite; the weights do not fit config.json or the chosen dtype")
            # A rank that chooses no tokens continues with any token: the test is as good.
            tokens.append(result.tokens[0].token_id if result.tokens else tokens[-1])

    def _scratch_step(self, tokens: list[int], start: int) -> tuple[StepInput, list[ChoiceRow]]:
        return scratch_step(tokens, start, self.layout.block_size, len(self.layout.groups), self.pooling)


def hidden_states(model: Model, drafts: DraftLayers | None, context: Context) -> torch.Tensor:
    return model.forward(context) if drafts is None else drafts.follow(model, context)


def adapter_rows(bank: AdapterBank | None, batch: Batch) -> AdapterRows | None:
    if batch.adapter_slots is None:
        return None
    assert bank is not None, "a sequence has an adapter, but the model has no slots"
    return bank.rows(batch.adapter_slots)


class LaunchedStep(NamedTuple):
    choices: Choices | None
    prompt_logprobs: dict[int, PromptLogprobs]
    embeddings: dict[int, torch.Tensor]
    mark: Mark
    computed_s: float

    def collect(self) -> RunResult:
        began = time.perf_counter()
        self.mark.wait()
        tokens = self.choices.read() if self.choices is not None else []
        prompts = {chunk: part.read() for chunk, part in self.prompt_logprobs.items()}
        embeddings = {chunk: tuple(vector.tolist()) for chunk, vector in self.embeddings.items()}
        return RunResult(tokens, prompts, embeddings, self.computed_s + time.perf_counter() - began)
