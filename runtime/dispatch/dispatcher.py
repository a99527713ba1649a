"""Dispatch: choose the host that answers a sequence, and the host that computes its prompt.

A sequence is answered where it would end soonest. Its prompt is computed where the predicted cost is least: on the same host, or on another host of
the site. The cost is the prompt's time, the delay of sequences in progress, and the part of the blocks' transfer that does not overlap with
computation. Predictions use measured rates (assignments.py) and are sent in a response header.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import Submit
from pilotlight.runtime.dispatch.assignments import Assignments, Prompt
from pilotlight.runtime.hosts.fleet import Fleet
from pilotlight.runtime.models.model_state import ModelState, ModelStates, Replica
from pilotlight.sites.site import Role
from pilotlight.support.estimates import HAND_OVER_S, exposed_s

SHORT_TOKENS = 64  # prompts with fewer uncached tokens are computed on the answering host
# The answering host waits PATIENCE * predicted seconds + PATIENCE_S for the blocks, and then computes the prompt itself.
PATIENCE, PATIENCE_S = 4.0, 5.0


class Placement(NamedTuple):
    """The hosts that a sequence is assigned to."""

    replica: Replica  # host that answers
    prefill: Replica | None = None  # host that computes the prompt; None if `replica` does
    predicted_s: float = 0.0  # predicted seconds until the blocks of `prefill` have arrived
    why: str = ""  # reason with predicted milliseconds; "" if there was no choice

    @property
    def explained(self) -> str:
        """The decision as a header: `prompt=engine 0; here=480.0; there=120.5`; "" if there was no choice."""
        where = "here" if self.prefill is None else _name(self.prefill)
        return f"prompt={where}; {self.why}" if self.why else ""

    @property
    def within_s(self) -> float:
        """Return the seconds after which `replica` computes blocks that have not arrived."""
        return PATIENCE_S + PATIENCE * self.predicted_s

    def without_prefill(self) -> "Placement":
        """Return the placement to use after the chosen host has declined to compute the prompt."""
        assert self.prefill is not None
        return Placement(self.replica, why=f"{self.why}; {_name(self.prefill)} declined")


class _PrefillOption(NamedTuple):
    """A host that could compute a prompt, and its cost."""

    cost_s: float
    prefill: Replica | None  # None for the answering host
    why: str


class Dispatch:
    def __init__(
        self,
        states: ModelStates,
        fleet: Fleet,
        assignments: Assignments,
        until_awake: Callable[[ModelState], Awaitable[object]],
    ) -> None:
        """`until_awake` wakes a model and waits for it; it raises ApiError if the wake fails."""
        self.states = states
        self.assignments = assignments
        self._fleet = fleet
        self._until_awake = until_awake

    async def place(self, submit: Submit) -> Placement:
        """Return the hosts for a sequence of a model in use; wait until the model is awake.

        The caller assigns the sequence to the replica (`assignments.assigned`) before its next await."""
        state = self.states[submit.model]
        while True:
            live = [replica for replica in state.awake if replica.is_live]
            if live:
                taking = [replica for replica in live if not (replica.is_retiring or replica.is_yielding)]
                return self.choose(submit, taking or live)
            if self._fleet.is_ending:
                reason = self._fleet.why_down or "the site is ending"
                raise EngineError("overloaded", f"{reason}; try again in a moment")
            if awake := state.awake:  # its host has died, which its supervisor is about to notice
                await awake[0].host.changed.wait()
            else:
                await self._until_awake(state)

    def expected_restart_s(self, model: str) -> float:
        """Return the seconds until a new engine host has the model, by the slowest start and the latest load."""
        return self._fleet.start_s + self.states[model].expected_wake_s

    def choose(self, submit: Submit, replicas: Sequence[Replica]) -> Placement:
        """Choose the replica that answers a sequence, and the host that computes its prompt.

        `replicas` are live. The answering host is chosen first, so that blocks can be copied there while the prompt is computed elsewhere.
        """
        if len(replicas) == 1 and replicas[0].host.role == "both":  # there is no choice
            return Placement(replicas[0])
        prompt = Prompt.of(submit, is_known=self.assignments.has_choice)
        computing, answering = with_role(replicas, "prefill"), with_role(replicas, "decode")
        if submit.pooling is not None:
            return Placement(self.assignments.least_loaded(submit, prompt, computing or replicas))
        replica = self.assignments.least_loaded(submit, prompt, answering or replicas)
        has_roles = not len(computing) == len(answering) == len(replicas)
        if not has_roles or not can_hand_over(submit):
            return Placement(replica)
        if prompt.num_uncached(replica) < SHORT_TOKENS:
            return Placement(replica, why="reason=short")
        others = [each for each in computing if each is not replica and each.takes_prompts]
        if not others:
            return Placement(replica, why="reason=no other host for prompts is up")
        here = self._here(prompt, replica)
        there = self._there(prompt, self.assignments.least_loaded(submit, prompt, others), replica)
        best = min(here, there, key=lambda option: option.cost_s)
        return Placement(replica, best.prefill, best.cost_s, f"{here.why}; {there.why}")

    def _here(self, prompt: Prompt, replica: Replica) -> _PrefillOption:
        """Predict a prompt's cost on the answering host.
        It is the wait for earlier prompts, the prompt's own time, and that time again for each open sequence, which it delays."""
        compute_s = prompt.num_uncached(replica) / self.assignments.prompt_rate(replica)
        cost_s = self.assignments.prompts_s(replica) + compute_s * (1 + self.assignments.num_open(replica))
        return _PrefillOption(cost_s, None, f"here={1e3 * cost_s:.1f}")

    def _there(self, prompt: Prompt, prefill: Replica, replica: Replica) -> _PrefillOption:
        """Predict a prompt's cost on another host of the site."""
        compute_s = prompt.num_uncached(prefill) / self.assignments.prompt_rate(prefill)
        moved_s = exposed_s(prompt.num_uncached(replica), prefill.load.handed_over_tokens_per_s, compute_s)
        cost_s = self.assignments.prompts_s(prefill) + compute_s + HAND_OVER_S + moved_s
        return _PrefillOption(cost_s, prefill, f"there={1e3 * cost_s:.1f}")


def _name(replica: Replica) -> str:
    return f"engine {replica.host.index}"


def with_role(replicas: Sequence[Replica], role: Role) -> list[Replica]:
    return [replica for replica in replicas if replica.host.role in (role, "both")]


def can_hand_over(submit: Submit) -> bool:
    """Tell whether another host can compute the prompt.

    It cannot if the request needs results of prompt tokens, which blocks do not contain, or if another choice of the request computes the prompt.
    """
    return submit.pooling is None and not submit.sampling.prompt_logprobs and submit.leader is None
