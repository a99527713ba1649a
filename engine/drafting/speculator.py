"""A model's speculation: collects drafts, chooses those that pay off, learns from verified ones.

Drafters may continue each other's drafts: first forced tokens of a grammar, then a copied name, then forced tokens again. A drafter that raises,
proposes invalid or too many tokens, or takes longer than the steps that it should save, is not used again for that sequence.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from math import log2
from operator import mul

from pilotlight.engine.api.errors import RankLostError
from pilotlight.engine.api.protocol import DraftCounts
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.drafting.budget import allot, num_worth_guessing
from pilotlight.engine.drafting.costs import StepCosts
from pilotlight.engine.drafting.drafter import Draft, Drafter, DrafterError, known_tokens
from pilotlight.engine.drafting.gain import AcceptanceRates, MeasuredGain
from pilotlight.engine.drafting.model_drafter import ModelDrafter
from pilotlight.engine.scheduling.plan import Chunk, StepCount, StepPlan, most_drafts

log = logging.getLogger(__name__)

MOST_DRAFTS = 15  # limit of drafts for one sequence in one step
MOST_LOOKED_FOR = 256  # limit of the drafts to search for in a batch, divided equally among its sequences
_MOST_ROUNDS = 4  # rounds in which drafters continue each other's drafts
_LOOKING_SHARE = 0.005  # share of a step's time that the search for drafts may take while none are found
# After a search without drafts worth verifying, one step without a search follows for each group of this many sequences in the batch.
_LARGE_BATCH = 8
# Time that a drafter may take for a sequence beyond the time of its steps, because the first search reads the whole prompt.
_GRACE_S = 0.25


@dataclass(slots=True)
class _State:
    """The statistics of one sequence's drafts."""

    rates: AcceptanceRates = field(default_factory=lambda: AcceptanceRates(weight=3.0, kept=0.9, kept_untried=0.99))
    failed: set[str] = field(default_factory=set)  # names of drafters that are not used any more
    spent_s: dict[str, float] = field(
        default_factory=dict
    )  # by drafter: time of its searches that exceeds the time of the steps
    kinds: tuple[str, ...] = ()  # kinds of the drafts that are being verified
    expected: float = 0.0  # expected number of right drafts among those
    # duration of a search for drafts: a moving average without the first search, which reads the prompt
    looking_s: float | None = None
    # right drafts per search
    looks: AcceptanceRates = field(default_factory=lambda: AcceptanceRates(weight=3.0, kept=0.95, kept_untried=1.0))
    num_vain: int = 0  # consecutive searches without a draft worth verifying
    rest: int = 0  # steps before the next search


# a token, the kind of its draft, and the probability that it is right if the tokens before it are
_Guess = tuple[int, str, float]


class Speculator:
    def __init__(
        self,
        drafters: SequenceOf[Drafter],
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        is_overlapped: bool = False,
        model: ModelDrafter | None = None,
    ) -> None:
        """Prepare to speculate.

        `drafters`: in order of preference; the first with a draft is used. `is_overlapped`: a step is launched while the previous one runs, so that a
        sequence whose drafts are being verified misses that step. `model`: guesses for all sequences for which `drafters` have no draft.
        """
        self.drafters = drafters
        self._vocab_size = vocab_size
        self._clock = clock
        self._is_overlapped = is_overlapped
        self.model = model
        self._states: dict[Sequence, _State] = {}
        self.rates = AcceptanceRates(weight=8.0, kept=0.99, kept_untried=0.9995)  # acceptance rates of all sequences
        self._bias = AcceptanceRates(weight=8.0, kept=0.98, kept_untried=0.99)  # ratio of right drafts to expected ones
        self._looks = AcceptanceRates(
            weight=1.0, kept=0.95, kept_untried=1.0
        )  # expected number of right drafts per search
        self._looking_s = 0.0  # time that the newest step spent searching
        self._rest_steps = 0  # steps before the next search for any sequence
        self.costs = StepCosts()
        self.gain = MeasuredGain()
        self.counts = DraftCounts()

    def drafts(self, plan: StepPlan) -> dict[Sequence, tuple[int, ...]]:
        """Return each sequence's drafts that are worth verifying; sequences without such drafts are left out."""
        decoding, self._looking_s = plan.decoding, 0.0
        if not (self.gain.may_draft(len(decoding)) and self.costs.is_known):
            return {}
        began = self._clock()
        chosen = self._worth_checking(decoding, plan)
        self._looking_s = self._clock() - began
        return chosen

    def _worth_checking(self, decoding: list[Sequence], plan: StepPlan) -> dict[Sequence, tuple[int, ...]]:
        proposed: dict[Sequence, list[_Guess]] = {}
        if self._rest_steps:
            self._rest_steps -= 1
        else:
            proposed = self._look_for(decoding, plan)
        found = {sequence: guesses for sequence, guesses in proposed.items() if guesses}
        if self.model is not None:
            found |= self._guess([sequence for sequence in decoding if sequence not in found], plan, self.model)
        chosen = self._choose(found, len(decoding), plan)
        for sequence in proposed:
            state = self._states[sequence]
            for looks in (state.looks, self._looks):
                looks.add("", state.expected if sequence in chosen else 0.0)
        for sequence in proposed.keys() - chosen.keys():
            self._leave_alone(sequence, proposed[sequence], len(decoding), plan.num_rows)
        if proposed and not chosen:
            self._rest_steps = len(decoding) // _LARGE_BATCH
        return chosen

    def _look_for(self, decoding: list[Sequence], plan: StepPlan) -> dict[Sequence, list[_Guess]]:
        """Return drafts for the sequences that are due for a search."""
        proposed: dict[Sequence, list[_Guess]] = {}
        num_rows, share = plan.num_rows, max(1, MOST_LOOKED_FOR // max(1, len(decoding)))
        enough = min(plan.budget, MOST_DRAFTS, share)
        for sequence in decoding:
            state = self._state_of(sequence)
            if state.rest:
                state.rest -= 1
            elif (most := min(most_drafts(sequence), enough)) > 0:
                proposed[sequence] = self._look(sequence, state, most, num_rows)
        return proposed

    def _guess(self, sequences: list[Sequence], plan: StepPlan, model: ModelDrafter) -> dict[Sequence, list[_Guess]]:
        """Return the drafting model's guesses for these sequences, as many tokens as pay off."""
        able = [s for s in sequences if most_drafts(s) > 0 and model.name not in self._state_of(s).failed]
        if not able:
            return {}
        expected, num_decodes = self.rates.rate(model.name, model.prior), len(plan.decoding)
        chances = [self._states[sequence].rates.rate(model.name, expected) for sequence in able]
        length = num_worth_guessing(
            chances,
            model.predict_s(len(able)),
            self.costs,
            num_decodes,
            plan.num_rows,
            min(1.0, self._bias.rate("", 1.0)),
            float(self._is_overlapped and num_decodes > 1),
        )
        length = min(length, plan.budget // len(able))
        if not length:
            for sequence in able:
                self._states[sequence].rates.fade(model.name)
            self.rates.fade(model.name)
            return {}
        num_tokens = length + any([sequence.is_pending for sequence in able])
        chance_of = {
            sequence: chance
            for sequence, chance in zip(able, chances, strict=True)
            if plan.reserve(sequence, known_tokens(sequence) + num_tokens - 1)
        }
        found = {}
        for sequence, tokens in self._guessed(list(chance_of), num_tokens, model).items():
            guesses = [(token, model.name, chance_of[sequence]) for token in tokens]
            if sequence.matcher is not None:
                del guesses[sequence.matcher.num_allowed(tokens) :]
            if guesses := guesses[int(sequence.is_pending) :][: min(length, most_drafts(sequence))]:
                found[sequence] = guesses
        return found

    def _guessed(self, sequences: list[Sequence], num_tokens: int, model: ModelDrafter) -> dict[Sequence, list[int]]:
        """Return the tokens that the model guesses; after an error it is not used again for these sequences."""
        if not sequences:
            return {}
        try:
            guessed = model.propose(sequences, num_tokens)
            for tokens in guessed:
                self._check(Draft(tokens, model.name, model.prior), num_tokens)
        except RankLostError:
            raise  # the model cannot continue without that rank
        except Exception as error:  # any other error only ends drafts of these sequences
            log.warning("%d sequences continue without %s drafts: %s", len(sequences), model.name, error)
            for sequence in sequences:
                self._states[sequence].failed.add(model.name)
            self.counts = self.counts.with_failure()
            return {}
        return dict(zip(sequences, guessed, strict=True))

    def _choose(
        self, found: dict[Sequence, list[_Guess]], num_decodes: int, plan: StepPlan
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return the first guesses of each sequence, as many as pay off."""
        chosen: dict[Sequence, tuple[int, ...]] = {}
        if not found:
            return chosen
        bias, budget = min(1.0, self._bias.rate("", 1.0)), plan.budget
        chances = [[chance for _, _, chance in guesses] for guesses in found.values()]
        turn_lost = float(self._is_overlapped and num_decodes > 1)
        counts = allot(chances, self.costs, num_decodes, plan.num_rows, bias, turn_lost)
        for (sequence, guesses), count in zip(found.items(), counts, strict=True):
            taken = guesses[: min(count, budget)]
            if taken:
                budget -= len(taken)
                state = self._states[sequence]
                state.kinds, state.num_vain = tuple([kind for _, kind, _ in taken]), 0
                state.expected = sum(accumulate([chance for _, _, chance in taken], mul))
                chosen[sequence] = tuple([token_id for token_id, _, _ in taken])
        if not chosen:
            self._bias.fade("")
        return chosen

    def note(self, chunk: Chunk, num_accepted: int) -> None:
        """Learn from a verified chunk: each draft up to the first wrong one counts for its kind."""
        state = self._states.get(chunk.sequence)
        if state is None:
            return
        self.counts = self.counts.with_chunk(len(chunk.drafts), num_accepted)
        if len(chunk.drafts) == len(state.kinds):
            self._bias.add("", num_accepted, state.expected)
        for i, kind in enumerate(state.kinds[: min(num_accepted + 1, len(chunk.drafts))]):
            for rates in (state.rates, self.rates):
                rates.add(kind, i < num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """Drop the data of a sequence that has ended or moved to another engine."""
        if self._states.pop(sequence, None) is not None:
            for drafter in self.drafters:
                drafter.forget(sequence)

    def count_step(self, step: StepCount) -> None:
        counted, is_small = step, step.num_rows <= MOST_DRAFTS + 1
        if step.num_drafts and is_small and self.costs.is_trial(step.num_rows, step.num_drafts):
            # A small step takes several times as long until it is recorded.
            counted = step._replace(step_s=min(step.step_s, self.costs.predict_s(step.num_rows, step.num_drafts)))
        self.costs.count(step.num_rows, step.step_s, step.num_drafts)
        if step.num_rows == step.num_decodes + step.num_drafts:
            self.gain.count(counted, self._looking_s)

    def _state_of(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _State(num_vain=max(0, int(-log2(self._looks.rate("", 1.0)))))
        return state

    def _look(self, sequence: Sequence, state: _State, most: int, num_rows: int) -> list[_Guess]:
        """Return guesses of the tokens that follow the newest one, which itself may have to be guessed first."""
        began = self._clock()
        num_unknown = int(sequence.is_pending)
        ahead: list[int] = []
        guesses: list[_Guess] = []
        for _ in range(_MOST_ROUNDS):
            draft = self._ask(sequence, state, ahead, most + num_unknown - len(ahead), num_rows)
            if draft is None:
                break
            expected = self.rates.rate(draft.kind, draft.prior)
            ahead += draft.token_ids
            guesses += zip(draft.token_ids, repeat(draft.kind), repeat(state.rates.rate(draft.kind, expected)))
            if len(ahead) >= most + num_unknown:
                break
        if sequence.matcher is not None:
            del guesses[sequence.matcher.num_allowed(ahead) :]
        looking_s = self._clock() - began
        state.looking_s = 0.0 if state.looking_s is None else state.looking_s + 0.1 * (looking_s - state.looking_s)
        return guesses[num_unknown:]

    def _ask(self, sequence: Sequence, state: _State, ahead: SequenceOf[int], most: int, num_rows: int) -> Draft | None:
        """Return the draft of the first drafter that has one."""
        for drafter in self.drafters:
            if drafter.name in state.failed:
                continue
            began = self._clock()
            try:
                draft = drafter.propose(sequence, ahead, most)
                if draft is not None:
                    self._check(draft, most)
                spent_s = state.spent_s.get(drafter.name, 0.0) + self._clock() - began
                state.spent_s[drafter.name] = max(0.0, spent_s - self.costs.predict_s(num_rows))
                if spent_s > _GRACE_S:
                    raise DrafterError(f"it takes longer than the steps: {spent_s:.3f} s so far")
            except Exception as error:  # after any error the sequence continues without this drafter
                log.warning("sequence %s continues without %s drafts: %s", sequence.sequence_id, drafter.name, error)
                state.failed.add(drafter.name)
                self.counts = self.counts.with_failure()
                continue
            if draft is not None:
                return draft
        return None

    def _check(self, draft: Draft, most: int) -> None:
        if not 0 < len(draft.token_ids) <= most:
            raise DrafterError(f"it returned {len(draft.token_ids)} drafts; 1 to {most} were requested")
        for token_id in draft.token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise DrafterError(f"{token_id} is not one of {self._vocab_size} tokens")

    def _leave_alone(self, sequence: Sequence, guesses: list[_Guess], num_decodes: int, num_rows: int) -> None:
        """Search less often if no draft is worth verifying, down to a small share of the steps' time.

        The search continues in every step if its drafts save more time than it takes, as in a document with some forced parts.
        """
        state, step_s = self._states[sequence], self.costs.predict_s(num_rows)
        looking_s = (state.looking_s or 0.0) * num_decodes
        if state.looks.rate("", self._looks.rate("", 1.0)) * step_s < looking_s:
            state.rest = min((1 << min(state.num_vain, 8)) - 1, int(looking_s / (_LOOKING_SHARE * step_s)))
        state.num_vain += 1
        for kind in {kind for _, kind, _ in guesses}:
            for rates in (state.rates, self.rates):
                rates.fade(kind)
