"""Runs a rank's part of a model, together with the other ranks, which compute the same steps.

A stage sends the hidden states after its layers to the next stage; the last stage sends them to the first stage, which chooses tokens. If ranks have
separate sequences, each computes its share of a step, and the first rank gets the needed rows of all. This module is independent of which orders
start a step here (follower.py, ranks.py).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pilotlight.engine.adapters.bank import AdapterBank
from pilotlight.engine.core.chunk_steps import scratch_step
from pilotlight.engine.core.step import ChoiceRow, StepInput
from pilotlight.engine.core.step_shares import StepShares
from pilotlight.engine.device.transfer import to_device
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.runner import Forwarded, ModelRunner, hidden_states
from pilotlight.engine.execution.text_head import TextHead
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.model import DraftLayers, Model
from pilotlight.engine.parallel.balancer import ExpertBalancer, sparse_parts_of

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class ForwardedPart(NamedTuple):
    """A step for which this rank has computed its layers."""

    step: StepInput
    number: int  # number of the step in the pipeline
    hidden: torch.Tensor | None  # after the last layer; None if other stages continue
    logit_rows: torch.Tensor | None  # tokens whose logits are needed; None for all
    computed_s: float
    # the ranks' shares of the step, if ranks have separate sequences; `hidden` then has only the needed rows of this rank
    shares: StepShares | None = None


class PartRunner(ModelRunner):
    def __init__(
        self,
        model: Model,
        layout: CacheLayout,
        kv_cache: torch.Tensor,
        ranks: "Communicator",
        hidden_size: int = 0,
        head: TextHead | None = None,
        adapters: AdapterBank | None = None,
        drafts: DraftLayers | None = None,
    ) -> None:
        """Prepare to run a part.

        `ranks`: links to the ranks with other parts of the model; `hidden_size`: width of the tensors between stages. Other arguments as for a
        ModelRunner.
        """
        super().__init__(model, layout, kv_cache, head, adapters, drafts)
        self.balancer = ExpertBalancer(ranks)
        self._ranks = ranks
        self._pipe = ranks.pipe
        self._hidden_size = hidden_size

    @property
    def is_pipelined(self) -> bool:
        """True if this is a rank of the first of several stages."""
        return self._pipe is not None and self._pipe.is_first

    def forward(self, step: StepInput) -> Forwarded:
        return self.finish(self.begin(step))

    @torch.inference_mode()
    def begin(self, step: StepInput) -> ForwardedPart:
        """Compute this stage's layers of a step; a later stage also sends the result to the next stage."""
        pipe = self._pipe
        if isinstance(self.model, Decoder):
            self.balancer.before_step(self.model, len(step.token_ids))
        if self._ranks.copies > 1:
            return self._begin_share(step)
        number = 0 if pipe is None else pipe.next_step()
        incoming = None if pipe is None or pipe.is_first else self._received(len(step.token_ids), number)
        chosen = self._chosen_for(step)
        began = time.perf_counter()
        context = self._context(step, chosen, incoming)
        hidden, logit_rows = hidden_states(self.model, self._drafts, context), context.batch.logit_rows
        computed_s = self._since(began)
        if pipe is None:
            return ForwardedPart(step, number, hidden, logit_rows, computed_s)
        if pipe.is_last and not self._wants_every_row(step) and logit_rows is not None:
            hidden = hidden.index_select(0, logit_rows)
        if len(hidden):
            pipe.send(hidden, number)
        return ForwardedPart(step, number, None, logit_rows, computed_s)

    def _begin_share(self, step: StepInput) -> ForwardedPart:
        """Compute this rank's share of a step beside other ranks with separate sequences.

        Keep the needed hidden states. If this rank has no share, it only computes its experts for other ranks' tokens.
        """
        ranks, pipe, device = self._ranks, self._pipe, self.kv_cache.device
        every_row = self._wants_every_row(step)
        shares = StepShares(step, ranks.copies, self.layout.block_size, every_row)
        own, number = shares.of(ranks.copy), 0 if pipe is None else pipe.next_step()
        chosen, incoming = self._chosen_for(step), None
        if pipe is not None and not pipe.is_first:
            incoming = self._received(0 if own is None else len(own.token_ids), number)
        began = time.perf_counter()
        hidden = self._serve() if own is None else self.model.forward(self._context(own, chosen, incoming))
        computed_s = self._since(began)
        if pipe is None or pipe.is_last:
            hidden = hidden.index_select(0, _rows_on(shares.wanted_of(ranks.copy), device))
        logit_rows = _rows_on(step.logit_rows, device) if every_row and step.logit_rows is not None else None
        if pipe is None:
            return ForwardedPart(step, number, hidden, logit_rows, computed_s, shares)
        if len(hidden):
            pipe.send(hidden, number)
        return ForwardedPart(step, number, None, logit_rows, computed_s, shares)

    @torch.inference_mode()
    def finish(self, started: ForwardedPart) -> Forwarded:
        """Return a step's results; they are empty if this rank does not get the last layer's hidden states."""
        step, hidden, wanted = started.step, started.hidden, started.logit_rows
        if started.shares is not None:
            hidden = self._joined(started, started.shares)
        elif hidden is None and self.is_pipelined:
            num_rows = len(step.token_ids)
            if not self._wants_every_row(step) and wanted is not None:
                num_rows, wanted = len(wanted), None
            hidden = self._received(num_rows, started.number) if num_rows else None
        if hidden is None:
            return Forwarded(None, {}, {}, started.computed_s)
        forwarded = self._forwarded(step, hidden, wanted, began=time.perf_counter())
        return forwarded._replace(computed_s=started.computed_s + forwarded.computed_s)

    def replace_model(self, model: Model) -> None:
        super().replace_model(model)
        self.balancer.may_write = True

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero the blocks that belong to this rank."""
        copies = self._ranks.copies
        super().scrub([b // copies for b in blocks if b % copies == self._ranks.copy])

    def _new_graphs(self) -> None:
        """Return None, for no graphs: if one rank failed to record, the other ranks would wait forever."""

    def _scratch_step(self, tokens: list[int], start: int) -> tuple[StepInput, list[ChoiceRow]]:
        ranks, groups = self._ranks, len(self.layout.groups)
        step, rows = scratch_step(tokens, start, self.layout.block_size, groups, self.pooling, ranks.copies)
        is_first_stage = self._pipe is None or self._pipe.is_first
        return step, rows if is_first_stage and ranks.copy == 0 else []

    def _context(self, step: StepInput, chosen: torch.Tensor | None, incoming: torch.Tensor | None = None) -> Context:
        """`incoming`: the previous stage's output for the step, which includes images."""
        return replace(super()._context(step, chosen), ranks=self._ranks, incoming=incoming)

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden, self._ranks)

    def _wants_every_row(self, step: StepInput) -> bool:
        """True if a step needs the hidden states of all its tokens, and not only of those with logits."""
        return bool(step.prompt_logprobs) or self.pooling is not None

    def _serve(self) -> torch.Tensor:
        """Compute this rank's experts for other ranks' tokens while it has no tokens; return [0, hidden]."""
        assert isinstance(self.model, Decoder)
        none = torch.empty(0, self._hidden_size, dtype=self.layout.dtype, device=self.kv_cache.device)
        for part in sparse_parts_of(self.model):
            part.serve(none, self._ranks)
        return none

    def _joined(self, started: ForwardedPart, shares: StepShares) -> torch.Tensor | None:
        """Return the needed hidden states of all ranks in the step's order, on the ranks of the first copy.

        Only these ranks compute logits. Returns None on other ranks, on later stages, or if no row is needed.
        """
        counts, own = shares.num_wanted, started.hidden
        if own is None:
            if not self.is_pipelined:
                return None
            own = self._received(counts[self._ranks.copy], started.number)
        if not any(counts):
            return None
        rows = self._ranks.to_first(own, counts)
        return rows.index_select(0, _rows_on(shares.order, rows.device)) if self._ranks.copy == 0 else None

    def _chosen_for(self, step: StepInput) -> torch.Tensor | None:
        """Return the previous step's tokens that this step uses; the first rank, which chose them, sends them."""
        if not step.feeds:
            return None
        num_rows = 1 + max(row for _, row in step.feeds)
        if not self._ranks.is_first:
            return self._ranks.from_rank(0, torch.empty(num_rows, dtype=torch.int64, device=self.kv_cache.device))
        assert self.chosen is not None, "a token is pending, but no step has chosen it"
        return self._ranks.from_rank(0, self.chosen[:num_rows])

    def _received(self, num_rows: int, number: int) -> torch.Tensor:
        assert self._pipe is not None
        into = torch.empty(num_rows, self._hidden_size, dtype=self.layout.dtype, device=self.kv_cache.device)
        return self._pipe.receive(into, number) if num_rows else into


def _rows_on(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(list(rows), dtype=torch.int64), device)
