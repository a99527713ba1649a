"""Runs a model over its KV cache: a step's input in, tokens out.

Knows tensors; refuses to know sequences, where the tokens go, and what a block of the cache holds (kv/layout.py).
"""

import math
import time
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.adapters.bank import AdapterBank, AdapterRows
from engine.adapters.content import SlotContent
from engine.batch import Batch, build_batch
from engine.context import Context
from engine.decode_graphs import CudaRecorder, DecodeGraphs, Outputs, ReadyStep
from engine.errors import StepError
from engine.kv.layout import CacheLayout
from engine.models.decoder import Decoder
from engine.models.registry import Model
from engine.parallel.balancer import ExpertBalancer, sparse_parts_of
from engine.pooling import TextPooling
from engine.protocol import Pooling
from engine.results import RunResult
from engine.sampling import Choices, PromptLogprobs, choose_tokens, prompt_logprobs
from engine.step import ChoiceRow, StepInput, scratch_step
from engine.step_shares import StepShares
from engine.transfer import Mark, to_device, to_host
from engine.vision.memory import ImageMemory
from kernels.cpu.recording import ProgramRecorder

if TYPE_CHECKING:
    from engine.models.draft_layers import DraftLayers
    from engine.parallel.communicator import Communicator

_MOST_PROGRAMS = 256  # of a model on a CPU, some 60 KB each
_MOST_RECORDED_LOGITS = 32  # rows: every CUDA graph keeps those that it computes, 16 MiB of a vocabulary of 128k


class Forwarded(NamedTuple):
    """A step's forward pass, which may still run."""

    logits: torch.Tensor | None  # of the rows that were wanted
    prompt_logprobs: dict[int, PromptLogprobs]  # by the chunk's place in the step
    embeddings: dict[int, torch.Tensor]  # likewise, on their way to the host
    computed_s: float


class BegunStep(NamedTuple):
    """A step of which this rank's layers have been computed."""

    step: StepInput
    number: int  # among the steps of a pipeline
    hidden: torch.Tensor | None  # behind the last layer; None: other stages go on
    logit_rows: torch.Tensor | None  # tokens whose logits are wanted; None: all of them
    logits: torch.Tensor | None = None  # of every token, where they have been computed
    computed_s: float = 0.0
    shares: StepShares | None = (
        None  # of ranks that have sequences of their own: `hidden` has the wanted rows of this one alone
    )


class ModelRunner:
    def __init__(
        self,
        model: Model,
        layout: CacheLayout,
        kv_cache: torch.Tensor,
        pooling: Pooling | None = None,
        is_normalized: bool = False,
        ranks: "Communicator | None" = None,
        adapters: AdapterBank | None = None,
        hidden_size: int = 0,
        drafts: "DraftLayers | None" = None,
    ) -> None:
        """`kv_cache`: blocks of that layout, [num_blocks, block_bytes] uint8; `pooling`: of an embedding model; `is_normalized`: its
        embeddings have length 1. `ranks`: that have the other parts of the model, and compute every step at the same time; `hidden_size`: of what
        goes from stage to stage among them. `adapters`: their slots; None: it has none. `drafts`: computed beside it, to draft for it."""
        self.model = model
        self._drafts = drafts
        self._ranks = ranks
        self._pipe = None if ranks is None else ranks.pipe
        self._hidden_size = hidden_size
        self.balancer = None if ranks is None else ExpertBalancer(ranks)
        self.pooling = pooling
        self.kv_cache = kv_cache
        self.num_blocks = kv_cache.shape[0]
        self.block_size = layout.block_size
        self.depth = 2 if kv_cache.is_cuda else 1
        self.layout = layout
        self._layers = layout.views(kv_cache)
        self.adapters = adapters
        self.graphs: DecodeGraphs | None = self._new_graphs()
        self._texts = TextPooling(is_normalized)
        self.images = ImageMemory()
        self._chosen: torch.Tensor | None = None  # token ids, in the step that has chosen last

    @property
    def is_pipelined(self) -> bool:
        """Tell whether this is a rank of the first stage, whose steps other stages go on with."""
        return self._pipe is not None and self._pipe.is_first

    @property
    def _copies(self) -> int:
        """Ranks of a stage that have sequences of their own."""
        return 1 if self._ranks is None else self._ranks.copies

    @property
    def _has_logits(self) -> bool:
        """Tell whether the hidden states behind the last layer come to this rank."""
        is_first_stage = self._pipe is None or self._pipe.is_first
        return is_first_stage and (self._ranks is None or self._ranks.copies == 1 or self._ranks.is_first)

    def forward(self, step: StepInput) -> Forwarded:
        return self.finish(self.begin(step))

    @torch.inference_mode()
    def begin(self, step: StepInput) -> BegunStep:
        """Compute this stage's layers of a step; a later stage is done then, and has sent what the next one goes on from."""
        pipe, number = self._pipe, 0
        if self.balancer is not None and isinstance(self.model, Decoder):
            self.balancer.before_step(self.model, len(step.token_ids))
        if self._copies > 1:
            return self._begin_share(step)
        if pipe is None:
            ready = self._ready(step)
            began = time.perf_counter()
            hidden, *logits = ready.compute()
            return BegunStep(step, number, hidden, ready.logit_rows, logits[0] if logits else None, self._since(began))
        number = pipe.next_step()
        incoming = None if pipe.is_first else self._received(len(step.token_ids), number)
        began = time.perf_counter()
        context = self._context(step, None, incoming)
        hidden, logit_rows = self.model.forward(context), context.batch.logit_rows
        computed_s = time.perf_counter() - began
        if pipe.is_last and not _wants_every_row(step, self.pooling) and logit_rows is not None:
            hidden = hidden.index_select(0, logit_rows)
        if len(hidden):
            pipe.send(hidden, number)
        return BegunStep(step, number, None, logit_rows, computed_s=computed_s)

    def _begin_share(self, step: StepInput) -> BegunStep:
        """Compute this rank's share of a step beside the other ranks, which have sequences of their own, be it none but the experts that are here. Of
        the hidden states the wanted ones stay."""
        ranks, pipe, device = self._ranks, self._pipe, self.kv_cache.device
        assert ranks is not None
        every_row = _wants_every_row(step, self.pooling)
        shares = StepShares(step, ranks.copies, self.block_size, every_row)
        own, number = shares.of(ranks.rank), 0 if pipe is None else pipe.next_step()
        chosen, incoming = self._chosen_for(step), None
        if pipe is not None and not pipe.is_first:
            incoming = self._received(0 if own is None else len(own.token_ids), number)
        began = time.perf_counter()
        hidden = self._serve() if own is None else self.model.forward(self._context(own, chosen, incoming))
        computed_s = self._since(began)
        if pipe is None or pipe.is_last:
            hidden = hidden.index_select(0, _rows_on(shares.wanted_of(ranks.rank), device))
        logit_rows = _rows_on(step.logit_rows, device) if every_row and step.logit_rows is not None else None
        if pipe is None:
            return BegunStep(step, number, hidden, logit_rows, None, computed_s, shares)
        if len(hidden):
            pipe.send(hidden, number)
        return BegunStep(step, number, None, logit_rows, None, computed_s, shares)

    @torch.inference_mode()
    def finish(self, begun: BegunStep) -> Forwarded:
        """Compute what the hidden states behind the last layer are wanted for."""
        step, hidden, logit_rows = begun.step, begun.hidden, begun.logit_rows
        if begun.shares is not None:
            hidden = self._joined(begun, begun.shares)
            if hidden is None:
                return Forwarded(None, {}, {}, begun.computed_s)
        elif hidden is None:
            if not self.is_pipelined:
                return Forwarded(None, {}, {}, begun.computed_s)
            num_rows = len(step.token_ids)
            if not _wants_every_row(step, self.pooling) and logit_rows is not None:
                num_rows, logit_rows = len(logit_rows), None
            if not num_rows:
                return Forwarded(None, {}, {}, begun.computed_s)
            hidden = self._received(num_rows, begun.number)
        began = time.perf_counter()
        prompts = {
            asked.chunk: prompt_logprobs(
                self._logits_of, hidden[asked.row : asked.row + len(asked.token_ids)], asked.token_ids, asked.num_top
            )
            for asked in step.prompt_logprobs
        }
        embeddings = {}
        if step.pooling:
            embeddings = {chunk: to_host(vector) for chunk, vector in self._texts.add(step, hidden).items()}
        logits = self._logits(logit_rows, hidden, begun.logits)
        return Forwarded(logits, prompts, embeddings, begun.computed_s + self._since(began))

    @torch.inference_mode()
    def choose(self, forwarded: Forwarded, rows: SequenceOf[ChoiceRow]) -> "LaunchedStep":
        began, device = time.perf_counter(), self.kv_cache.device
        choices: Choices | None = None
        if rows:
            logits = forwarded.logits
            assert logits is not None, "a row is to choose, and the step has no logits"
            if len(rows) < logits.shape[0]:
                logits = logits.index_select(0, to_device(torch.tensor([row.row for row in rows]), device))
            choices = choose_tokens(logits, rows)
            self._chosen = choices.token_ids
        computed_s = forwarded.computed_s + self._since(began)
        return LaunchedStep(choices, forwarded.prompt_logprobs, forwarded.embeddings, Mark(device), computed_s)

    def _ready(self, step: StepInput) -> ReadyStep:
        recorded = None
        if self.graphs is not None and not step.images:
            recorded = self.graphs.ready(step, self._chosen)
        if recorded is not None:
            return recorded
        context = self._context(step, self._chosen_for(step))
        return ReadyStep(lambda: (_hidden(self.model, self._drafts, context),), context.batch.logit_rows)

    def _context(self, step: StepInput, chosen: torch.Tensor | None, incoming: torch.Tensor | None = None) -> Context:
        """Return what the layers see of a step. `chosen`: the tokens of the step before; `incoming`: what the stage before has made of it."""
        device = self.kv_cache.device
        batch = build_batch(step, device, chosen)
        adapters = _adapter_rows(self.adapters, batch)
        images = self.images.rows(step.images, device) if incoming is None else None
        return Context(batch, self._layers, ranks=self._ranks, incoming=incoming, adapters=adapters, images=images)

    def _serve(self) -> torch.Tensor:
        """Compute this rank's experts for the tokens of the others, where it has none itself. Return no hidden states, [0, hidden]."""
        assert self._ranks is not None
        assert isinstance(self.model, Decoder)
        none = torch.empty(0, self._hidden_size, dtype=self.layout.dtype, device=self.kv_cache.device)
        for part in sparse_parts_of(self.model):
            part.serve(none, self._ranks)
        return none

    def _joined(self, begun: BegunStep, shares: StepShares) -> torch.Tensor | None:
        """Return the wanted hidden states of all ranks in the step's order, on the first one; None: there are none, or they are not this one's."""
        assert self._ranks is not None
        counts, own = shares.num_wanted, begun.hidden
        if own is None:
            if not self.is_pipelined:
                return None
            own = self._received(counts[self._ranks.rank], begun.number)
        if not any(counts):
            return None
        rows = self._ranks.to_first(own, counts)
        return rows.index_select(0, _rows_on(shares.order, rows.device)) if self._ranks.is_first else None

    def _logits(
        self, wanted: torch.Tensor | None, hidden: torch.Tensor, logits: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the logits of the `wanted` tokens, None: of all. `logits`: where they have been computed of every token."""
        if self.pooling is not None or (wanted is not None and not len(wanted)):
            return None
        rows = hidden if logits is None else logits
        if wanted is not None:
            rows = rows.index_select(0, wanted)
        return self._logits_of(rows) if logits is None else rows

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden) if self._ranks is None else self.model.logits(hidden, self._ranks)

    def _chosen_for(self, step: StepInput) -> torch.Tensor | None:
        """Return the tokens of the step before, as far as they are fed into this one: the first of several ranks alone has drawn them."""
        if self._ranks is None or not step.feeds:
            return self._chosen
        num_rows = 1 + max(row for _, row in step.feeds)
        if not self._ranks.is_first:
            return self._ranks.from_rank(0, torch.empty(num_rows, dtype=torch.int64, device=self.kv_cache.device))
        assert self._chosen is not None, "a token is pending and no step has chosen it"
        return self._ranks.from_rank(0, self._chosen[:num_rows])

    def _received(self, num_rows: int, number: int) -> torch.Tensor:
        assert self._pipe is not None
        into = torch.empty(num_rows, self._hidden_size, dtype=self.layout.dtype, device=self.kv_cache.device)
        return self._pipe.receive(into, number) if num_rows else into

    def _since(self, began: float) -> float:
        """Return for how long the device has computed, where that is the host itself."""
        return time.perf_counter() - began if self.depth == 1 else 0.0

    def _new_graphs(self) -> DecodeGraphs | None:
        """Return the graphs of the model as it lies in memory now. Ranks do without: one that fails to record would leave the others waiting."""
        model, drafts, layers = self.model, self._drafts, self._layers
        device, adapters = self.kv_cache.device, self.adapters
        if self._ranks is not None:
            return None
        most_logits = _MOST_RECORDED_LOGITS if self.kv_cache.is_cuda else math.inf

        def forward(batch: Batch) -> Outputs:
            hidden = _hidden(model, drafts, Context(batch, layers, adapters=_adapter_rows(adapters, batch)))
            return (hidden, model.logits(hidden)) if hidden.shape[0] <= most_logits else (hidden,)

        if self.kv_cache.is_cuda:
            return DecodeGraphs(forward, self.block_size, CudaRecorder(), device)
        recorder = ProgramRecorder(self.layout.dtype)
        return DecodeGraphs(forward, self.block_size, recorder, device, pads=False, most=_MOST_PROGRAMS)

    @torch.inference_mode()
    def encode_image(self, name: bytes, piece: torch.Tensor) -> None:
        """Encode the next piece of an image for the steps that follow; a later stage has no use for it."""
        if isinstance(self.model, Decoder) and self.model.vision is not None:
            patches = to_device(piece, self.kv_cache.device).to(self.layout.dtype)
            self.images.add(name, self.model.vision.encode(patches))

    def place_adapter(self, slot: int, content: SlotContent) -> None:
        """Put an adapter into a slot. Raises AdapterError."""
        assert self.adapters is not None
        if not self.adapters.fits(content):
            self.adapters.grow(content.rank)
            self.graphs = self._new_graphs()  # what was recorded reads the slots where they were
        self.adapters.place(slot, content)

    def replace_model(self, model: Model) -> None:
        """Replace the model by the same one in other memory; from any thread, since it does not matter which of the two a step runs through."""
        self.model = model
        self.graphs = self._new_graphs()
        if self.balancer is not None:
            self.balancer.may_write = True

    @torch.inference_mode()
    def scrub(self, blocks: SequenceOf[int]) -> None:
        """Zero blocks, whose content may be NaN or infinity: those of them that this rank has."""
        copies, rank = self._copies, 0 if self._copies == 1 or self._ranks is None else self._ranks.rank
        self.kv_cache[[block // copies for block in blocks if block % copies == rank]] = 0

    @torch.inference_mode()
    def reset(self) -> None:
        self.kv_cache.zero_()

    def warm_up(self, prompt: SequenceOf[int], *, with_decode: bool = True) -> None:
        """Compute a short prompt and one more token, in blocks that no sequence holds yet: the first request should not pay for lazy
        initialisation, and a model that yields no numbers should not seem ready. One pass, without the token, suffices
        where nothing but memory can be cold."""
        tokens, num_groups, copies = list(prompt), len(self.layout.groups), self._copies
        if self.pooling is not None:
            step, rows = scratch_step(tokens, 0, self.block_size, num_groups, self.pooling, copies)
            if not self._has_logits:
                self.forward(step)
                return
            embedding = self.choose(self.forward(step), rows).collect().embeddings[0]
            if not all(map(math.isfinite, embedding)):
                raise StepError(
                    "its hidden states are not finite; the weights do not fit config.json or the chosen dtype"
                )
            return
        for start in (0, len(tokens)) if with_decode else (0,):
            step, rows = scratch_step(tokens, start, self.block_size, num_groups, copies=copies)
            if not self._has_logits:
                self.forward(step)
                tokens.append(tokens[-1])  # whatever it is: it proves as much
                continue
            chosen = self.choose(self.forward(step), rows).collect().tokens
            if not all([token.is_finite for token in chosen]):
                raise StepError("its logits are not finite; the weights do not fit config.json or the chosen dtype")
            tokens.append(chosen[0].token_id)


def _rows_on(rows: SequenceOf[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(list(rows), dtype=torch.int64), device)


def _hidden(model: Model, drafts: "DraftLayers | None", context: Context) -> torch.Tensor:
    return model.forward(context) if drafts is None else drafts.follow(model, context)


def _adapter_rows(bank: AdapterBank | None, batch: Batch) -> AdapterRows | None:
    if batch.adapter_slots is None:
        return None
    assert bank is not None, "a sequence has an adapter, and the model no slots"
    return bank.rows(batch.adapter_slots)


def _wants_every_row(step: StepInput, pooling: Pooling | None) -> bool:
    """Tell whether a step's hidden states are wanted of other tokens than those whose logits are."""
    return bool(step.prompt_logprobs) or pooling is not None


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
