"""The open work of each replica, in tokens to compute and in seconds at measured rates.

A sequence counts with the uncached part of its prompt until its first token, and with the rest of its answer, which is assumed to be as long as the
model's average answer. Seconds are summed over the models of a host. dispatcher.py decides by these numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pilotlight.engine.api.protocol import Submit
from pilotlight.runtime.dispatch.prefixes import Chain, chain_of, root_of
from pilotlight.runtime.dispatch.roles import HostWaits
from pilotlight.runtime.models.model_state import ModelState, Replica

# Rates that are assumed before any replica of the model has been measured. While all replicas have these rates, only the numbers of tokens matter.
PREFILL_TOKENS_PER_S = 2000.0
DECODE_TOKENS_PER_S = 50.0
# Share by which one more sequence lengthens a step (also in the router's cost model). The measured rate already includes the open sequences.
NEIGHBOUR_SHARE = 0.02


class Assignment:
    """A sequence that is open on a replica, and the work that it still needs."""

    def __init__(self, replica: Replica, prefill_tokens: int, decode_tokens: int) -> None:
        self.replica = replica
        self.output: list[int] = []
        self._prefill_tokens = prefill_tokens
        self._decode_tokens = decode_tokens
        self._count(1, prefill_tokens, decode_tokens)

    def note(self, token_ids: Sequence[int]) -> None:
        """Count tokens that the engine has produced, and subtract their work."""
        if not token_ids:
            return
        self.output += token_ids
        self._count(0, -self._prefill_tokens, -min(len(token_ids), self._decode_tokens))
        self._prefill_tokens, self._decode_tokens = 0, max(0, self._decode_tokens - len(token_ids))

    def end(self) -> None:
        self._count(-1, -self._prefill_tokens, -self._decode_tokens)

    def _count(self, sequences: int, prefill_tokens: int, decode_tokens: int) -> None:
        work = self.replica.work
        work.sequences += sequences
        work.prefill_tokens += prefill_tokens
        work.decode_tokens += decode_tokens


class Prompt(NamedTuple):
    """A prompt with its digests, so that these are computed only once."""

    num_tokens: int
    chain: Chain

    @classmethod
    def of(cls, submit: Submit, *, is_known: bool) -> "Prompt":
        """Return a sequence's prompt.
        `is_known` is False if the caller needs no digests, because it has no choice of hosts; then `chain` is empty."""
        prompt = submit.prompt_token_ids
        return cls(len(prompt), chain_of(root_of(submit), prompt) if is_known else ())

    def num_uncached(self, replica: Replica) -> int:
        return max(1, self.num_tokens - replica.prefixes.held_tokens(self.chain))


class Assignments:
    def __init__(self, states: Mapping[str, ModelState], *, has_choice: bool) -> None:
        """Start without work.

        `states` is a view of the models by name. `has_choice` is True if prompts may be computed in several places, so that cached prefixes
        matter.
        """
        self.has_choice = has_choice
        self._states = states
        self._open: dict[str, Assignment] = {}  # sequence id -> assignment

    @contextmanager
    def assigned(self, submit: Submit, replica: Replica) -> Iterator[Assignment]:
        """Open a scope in which the sequence counts as this replica's work."""
        prompt, held = submit.prompt_token_ids, 0
        if self.has_choice:
            chain = chain_of(root_of(submit), prompt)
            held = replica.prefixes.held_tokens(chain)
            replica.prefixes.remember(chain, self._capacity(replica))
        decode = (
            0
            if submit.pooling or submit.hands_over
            else min(submit.sampling.max_tokens, round(self._states[submit.model].demand.answer_tokens))
        )
        prefill = 1 if submit.fetch_from is not None else max(1, len(prompt) - held)
        assignment = Assignment(replica, prefill, decode)
        self._open[submit.sequence_id] = assignment
        try:
            yield assignment
        finally:
            assignment.end()
            del self._open[submit.sequence_id]
            if assignment.output and not submit.hands_over:
                self._learn(submit, assignment)

    def least_loaded(self, submit: Submit, prompt: Prompt, replicas: Sequence[Replica]) -> Replica:
        """Return the replica where a sequence would end soonest.

        A request's other choices go to the replica of its first choice, which computes their common prompt."""
        if (leader := self._open.get(submit.leader or "")) is not None and leader.replica in replicas:
            return leader.replica

        def cost_s(replica: Replica) -> float:
            return self.backlog_s(replica) + prompt.num_uncached(replica) / self._rates(replica)[0]

        return min(replicas, key=lambda replica: (cost_s(replica), replica.host.index))

    def waits(self, replica: Replica) -> HostWaits:
        """Return the seconds that open prompts and answers on the replica's host would cost a new sequence."""
        return HostWaits(self.prompts_s(replica), sum(map(self._answers_s, self._on_host(replica))))

    def backlog_s(self, replica: Replica) -> float:
        """Return the seconds by which the host's open sequences, of all its models, would delay a new one."""
        return sum(self._work_s(each) for each in self._on_host(replica))

    def prompts_s(self, replica: Replica) -> float:
        """Return the seconds that the replica's host needs for its open prompts."""
        return sum(each.work.prefill_tokens / self.prompt_rate(each) for each in self._on_host(replica))

    def prompt_rate(self, replica: Replica) -> float:
        """Return the rate of long prompts in tokens/s: the best rate measured on the same kind of device.

        A decode host's own rate is too low: it computes only short prompts, each at the cost of a whole step."""
        kind = replica.host.device.partition(":")[0]
        alike = [other for other in self._states[replica.model].replicas if other.host.device.partition(":")[0] == kind]
        return max(other.load.prefill_tokens_per_s for other in alike) or self._rates(replica)[0]

    def num_open(self, replica: Replica) -> int:
        """Return the number of open sequences on the replica's host, over all models."""
        return sum(each.work.sequences for each in self._on_host(replica))

    def _on_host(self, replica: Replica) -> list[Replica]:
        """Return the replicas of all models on the host of `replica`."""
        return [state.replicas[replica.host.index] for state in self._states.values()]

    def _work_s(self, replica: Replica) -> float:
        work = replica.work
        return work.prefill_tokens / self._rates(replica)[0] + self._answers_s(replica) if work.sequences else 0.0

    def _answers_s(self, replica: Replica) -> float:
        """Return the seconds by which a replica's open answers delay a new sequence in the same steps."""
        tokens = replica.work.decode_tokens
        return NEIGHBOUR_SHARE * tokens / self._rates(replica)[1] if tokens else 0.0

    def _rates(self, replica: Replica) -> tuple[float, float]:
        """Return tokens/s of a prompt and of each answer: measured on this replica, else on another one."""
        loads = [replica.load, *(other.load for other in self._states[replica.model].replicas if other is not replica)]
        prefill = next((load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s), PREFILL_TOKENS_PER_S)
        decode = next((load.decode_tokens_per_s for load in loads if load.decode_tokens_per_s), DECODE_TOKENS_PER_S)
        return prefill, decode

    def _learn(self, submit: Submit, assignment: Assignment) -> None:
        replica, output = assignment.replica, assignment.output
        if self.has_choice and replica.is_awake:  # the next turn of the conversation will start with this turn
            chain = chain_of(root_of(submit), (*submit.prompt_token_ids, *output))
            replica.prefixes.remember(chain, self._capacity(replica))

    def _capacity(self, replica: Replica) -> int:
        info = self._states[replica.model].info
        return info.total_blocks * info.block_size if info is not None else 0
