"""Which device's replica of a model computes a sequence: the one where its prompt is computed soonest and its neighbours slow it down least.

Every open sequence counts with the tokens that are probably still to be computed for it: the part of its prompt that is not cached, until its
first token is here, and what is left of an answer as long as the model's last ones. Divided by measured rates they are seconds, which add up over
the models of a host. A conversation stays where its prefix lies for as long as computing it anew elsewhere would take longer. Knows no waking and no
failures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from engine.protocol import LAST_CHUNK_TOKENS, Submit
from runtime.engines.hand_over import can_hand_over
from runtime.engines.model_state import ModelState, Replica
from runtime.engines.prefixes import Chain, chain_of, root_of
from runtime.engines.roles import HostWaits
from sites.site import Role

# Where there is no measurement: neither this replica nor a sibling has computed anything. As long as they are equal everywhere, only tokens count.
PREFILL_TOKENS_PER_S = 2000.0
DECODE_TOKENS_PER_S = 50.0
# By which a sequence lengthens its neighbours' steps, as the router assumes as well; how crowded a host already is, its measured rate says.
NEIGHBOUR_SHARE = 0.02
OUTPUT_TOKENS = 64.0  # of a model's first answers
OUTPUT_WEIGHT = 0.1  # of the newest answer in the moving average of their lengths
# Of a hand-over, besides its bytes: a greeting, a sequence more, and the last chunk's blocks, which nothing hides
HAND_OVER_S = 0.02
SHORT_TOKENS = (
    64  # of a prompt that are not cached where it is answered: fewer are computed there, whatever the predictions
)
# What a prediction may be wrong by, before the host that waits computes by itself
PATIENCE, PATIENCE_S = 4.0, 5.0


class Assignment:
    """A sequence on a replica, as long as it is open there."""

    def __init__(self, replica: Replica, prefill_tokens: int, decode_tokens: int) -> None:
        self.replica = replica
        self.output: list[int] = []
        self._prefill_tokens = prefill_tokens
        self._decode_tokens = decode_tokens
        self._count(1, prefill_tokens, decode_tokens)

    def note(self, token_ids: Sequence[int]) -> None:
        """Count tokens that the engine has produced."""
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


class Placement(NamedTuple):
    """Where a sequence is computed."""

    replica: Replica  # that answers
    prefill: Replica | None = None  # that computes the prompt for it; None: it does so itself
    within_s: float = 0.0  # after which it computes what has not come
    why: str = ""  # the reason, with predicted milliseconds; "" where there was no choice

    @property
    def explained(self) -> str:
        """The decision in a header, such as `prompt=engine 0; here=480.0; there=120.5`; "" where there was none to be made."""
        where = "here" if self.prefill is None else f"engine {self.prefill.host.index}"
        return f"prompt={where}; {self.why}" if self.why else ""


class Dispatch:
    def __init__(self, states: Sequence[ModelState], num_devices: int) -> None:
        self._states = {state.name: state for state in states}
        self._has_choice = num_devices > 1
        self._output_tokens = {state.name: OUTPUT_TOKENS for state in states}
        self._assignments: dict[str, Assignment] = {}  # by sequence

    def place(self, submit: Submit, replicas: Sequence[Replica]) -> Placement:
        """Return where to compute a sequence, of the replicas, which all live: where it is answered, and whether another one computes its prompt.

        It does where that is predicted to cost less: the prompt's own time, and that of every sequence which it would hold up where it is answered.
        The first is known before the other begins, so that blocks flow while it computes."""
        prompt = _Prompt.of(submit, known=len(replicas) > 1)
        computing, answering = _with_role(replicas, "prefill"), _with_role(replicas, "decode")
        if submit.pooling is not None:
            return Placement(self._choose(submit, prompt, computing or replicas))
        replica = self._choose(submit, prompt, answering or replicas)
        others = [other for other in computing if other is not replica and other.takes_prompts]
        if len(computing) == len(answering) == len(replicas) or not can_hand_over(submit):
            return Placement(replica)
        if prompt.num_uncached(replica) < SHORT_TOKENS:
            return Placement(replica, why="reason=short")
        if not others:
            return Placement(replica, why="reason=no other host for prompts is up")
        prefill = self._choose(submit, prompt, others)
        here_s, there_s = self._prefill_s(prompt, replica), self._hand_over_s(prompt, prefill, replica)
        why = f"here={1e3 * here_s:.1f}; there={1e3 * there_s:.1f}"
        if here_s <= there_s:
            return Placement(replica, why=why)
        return Placement(replica, prefill, PATIENCE_S + PATIENCE * there_s, why)

    def _prefill_s(self, prompt: "_Prompt", replica: Replica) -> float:
        """Predict what a prompt costs where it is answered: its time, once more for each sequence that it holds up."""
        compute_s = prompt.num_uncached(replica) / self._long_prompt_rate(replica)
        return self._prompts_s(replica) + compute_s * (1 + self._num_open(replica))

    def _hand_over_s(self, prompt: "_Prompt", prefill: Replica, replica: Replica) -> float:
        """Predict the same where another one computes it: what of the transfer is not hidden behind that comes on top."""
        compute_s = prompt.num_uncached(prefill) / self._long_prompt_rate(prefill)
        missing, rate = prompt.num_uncached(replica), prefill.load.handed_over_tokens_per_s
        transfer_s = missing / rate if rate else 0.0  # unmeasured ways are tried
        last_s = min(missing, LAST_CHUNK_TOKENS) / rate if rate else 0.0
        return self._prompts_s(prefill) + compute_s + HAND_OVER_S + max(last_s, transfer_s - compute_s)

    def _choose(self, submit: Submit, prompt: "_Prompt", replicas: Sequence[Replica]) -> Replica:
        """Return the best of the replicas. Choices of one request follow the first, which computes their prompt."""
        if len(replicas) == 1:
            return replicas[0]
        if (leader := self._assignments.get(submit.leader or "")) is not None and leader.replica in replicas:
            return leader.replica

        def cost_s(replica: Replica) -> float:
            return self.backlog_s(replica) + prompt.num_uncached(replica) / self._rates(replica)[0]

        return min(replicas, key=lambda replica: (cost_s(replica), replica.host.index))

    @contextmanager
    def assigned(self, submit: Submit, replica: Replica) -> Iterator[Assignment]:
        """Open a scope in which the sequence counts as this replica's work."""
        name, prompt = submit.model, submit.prompt_token_ids
        held = 0
        if self._has_choice:
            chain = chain_of(root_of(submit), prompt)
            held = replica.prefixes.held_tokens(chain)
            replica.prefixes.remember(chain, self._capacity(replica))
        decode = (
            0
            if submit.pooling or submit.hands_over
            else min(submit.sampling.max_tokens, round(self._output_tokens[name]))
        )
        prefill = 1 if submit.fetch_from is not None else max(1, len(prompt) - held)
        assignment = Assignment(replica, prefill, decode)
        self._assignments[submit.sequence_id] = assignment
        try:
            yield assignment
        finally:
            assignment.end()
            del self._assignments[submit.sequence_id]
            if assignment.output and not submit.hands_over:
                self._learn(submit, assignment)

    def waits(self, replica: Replica) -> HostWaits:
        """Return what the next sequence would lose on the replica's host, to prompts and to answers of all its models."""
        return HostWaits(self._prompts_s(replica), sum(map(self._answers_s, self._on_host(replica))))

    def backlog_s(self, replica: Replica) -> float:
        """Return what a new sequence would lose to everything that is open on the replica's host, of all its models."""
        return sum(self._work_s(each) for each in self._on_host(replica))

    def _on_host(self, replica: Replica) -> list[Replica]:
        """Return the replicas of all models on a replica's host."""
        return [state.replicas[replica.host.index] for state in self._states.values()]

    def _prompts_s(self, replica: Replica) -> float:
        """Return what a prompt waits for those before it."""
        return sum(each.work.prefill_tokens / self._long_prompt_rate(each) for each in self._on_host(replica))

    def _long_prompt_rate(self, replica: Replica) -> float:
        """Return tokens per second of a long prompt: the best that a host of this kind of device was measured at. One that only answers has computed
        short ones, each at the price of a step."""
        kind = replica.host.device.partition(":")[0]
        alike = [other for other in self._states[replica.model].replicas if other.host.device.partition(":")[0] == kind]
        return max(other.load.prefill_tokens_per_s for other in alike) or self._rates(replica)[0]

    def _num_open(self, replica: Replica) -> int:
        return sum(each.work.sequences for each in self._on_host(replica))

    def _work_s(self, replica: Replica) -> float:
        work = replica.work
        return work.prefill_tokens / self._rates(replica)[0] + self._answers_s(replica) if work.sequences else 0.0

    def _answers_s(self, replica: Replica) -> float:
        """Return what a sequence loses to a model's answers that are open beside it."""
        tokens = replica.work.decode_tokens
        return NEIGHBOUR_SHARE * tokens / self._rates(replica)[1] if tokens else 0.0

    def _rates(self, replica: Replica) -> tuple[float, float]:
        """Return tokens per second: of a prompt, and of each answer. As measured here, else on a sibling."""
        loads = [replica.load, *(other.load for other in self._states[replica.model].replicas if other is not replica)]
        prefill = next((load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s), PREFILL_TOKENS_PER_S)
        decode = next((load.decode_tokens_per_s for load in loads if load.decode_tokens_per_s), DECODE_TOKENS_PER_S)
        return prefill, decode

    def _learn(self, submit: Submit, assignment: Assignment) -> None:
        name, replica, output = submit.model, assignment.replica, assignment.output
        self._output_tokens[name] += OUTPUT_WEIGHT * (len(output) - self._output_tokens[name])
        if self._has_choice and replica.is_awake:  # the conversation's next turn begins with this one
            chain = chain_of(root_of(submit), (*submit.prompt_token_ids, *output))
            replica.prefixes.remember(chain, self._capacity(replica))

    def _capacity(self, replica: Replica) -> int:
        info = self._states[replica.model].info
        return info.total_blocks * info.block_size if info is not None else 0


class _Prompt(NamedTuple):
    """A prompt, and its digests, which are made once."""

    num_tokens: int
    chain: Chain

    @classmethod
    def of(cls, submit: Submit, *, known: bool) -> "_Prompt":
        """`known`: False where there is nothing to be chosen, and no digest is wanted."""
        prompt = submit.prompt_token_ids
        return cls(len(prompt), chain_of(root_of(submit), prompt) if known else ())

    def num_uncached(self, replica: Replica) -> int:
        return max(1, self.num_tokens - replica.prefixes.held_tokens(self.chain))


def _with_role(replicas: Sequence[Replica], role: Role) -> list[Replica]:
    return [replica for replica in replicas if replica.host.role in (role, "both")]
