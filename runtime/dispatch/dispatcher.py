"""Which host answers a sequence, and which one computes its prompt: each where that is predicted to cost least, in seconds.

A sequence is answered where it would end soonest. Its prompt is computed there, on another host of the site, or on one that another site lends,
whichever costs less: the prompt's own time, that of every sequence which it would hold up, and what of the blocks' transfer nothing hides. All by
measured rates (assignments.py, lenders.py), and each prediction stands in the answer's head. Knows no waking and no failures.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pilotlight.engine.api.protocol import Submit
from pilotlight.engine.planning.hand_over import exposed_s
from pilotlight.runtime.dispatch.assignments import Assignments, Prompt
from pilotlight.runtime.dispatch.hand_over import OwnHost, PromptHost, can_hand_over
from pilotlight.runtime.models.model_state import Replica
from pilotlight.sites.site import Role

if TYPE_CHECKING:
    from pilotlight.runtime.dispatch.lenders import Lender

# Of a hand-over, besides its bytes: a greeting, a sequence more, and the last chunk's blocks, which nothing hides
HAND_OVER_S = 0.02
# Of a prompt that are not cached where it is answered: fewer are computed there, whatever the predictions
SHORT_TOKENS = 64
# What a prediction may be wrong by, before the host that waits computes by itself
PATIENCE, PATIENCE_S = 4.0, 5.0


class Placement(NamedTuple):
    """Where a sequence is computed."""

    replica: Replica  # that answers
    prefill: PromptHost | None = None  # that computes the prompt for it; None: it does so itself
    within_s: float = 0.0  # after which it computes what has not come
    why: str = ""  # the reason, with predicted milliseconds; "" where there was no choice

    @property
    def explained(self) -> str:
        """The decision in a header, such as `prompt=engine 0; here=480.0; there=120.5`; "" where there was none to be made."""
        where = "here" if self.prefill is None else self.prefill.name
        return f"prompt={where}; {self.why}" if self.why else ""

    def without_prefill(self) -> "Placement":
        """Return the same for a host that was asked and does not compute the prompt."""
        assert self.prefill is not None
        return Placement(self.replica, why=f"{self.why}; {self.prefill.name} declined")


class _PrefillOption(NamedTuple):
    """One way to have a prompt computed."""

    cost_s: float
    host: PromptHost | None  # None: where it is answered
    why: str


class Dispatch:
    def __init__(self, assignments: Assignments) -> None:
        self._open = assignments

    def place(
        self, submit: Submit, replicas: Sequence[Replica], lenders: "Sequence[Lender]" = (), why_none: str = ""
    ) -> Placement:
        """Return where to compute a sequence, of the replicas, which all live, and of the sites that may lend; `why_none`: of those that may not.

        Where it is answered is known before its prompt begins elsewhere, so that blocks flow while that computes."""
        if len(replicas) == 1 and replicas[0].host.role == "both" and not (lenders or why_none):  # there is no choice
            return Placement(replicas[0])
        prompt = Prompt.of(submit, is_known=self._open.has_choice)
        computing, answering = with_role(replicas, "prefill"), with_role(replicas, "decode")
        if submit.pooling is not None:
            return Placement(self._open.least_loaded(submit, prompt, computing or replicas))
        replica = self._open.least_loaded(submit, prompt, answering or replicas)
        has_roles = not len(computing) == len(answering) == len(replicas)
        if not (has_roles or lenders or why_none) or not can_hand_over(submit):
            return Placement(replica)
        if prompt.num_uncached(replica) < SHORT_TOKENS:
            return Placement(replica, why="reason=short")
        ways = [self._here(prompt, replica)]
        if has_roles and (others := [each for each in computing if each is not replica and each.takes_prompts]):
            ways.append(self._there(prompt, self._open.least_loaded(submit, prompt, others), replica))
        elif has_roles:
            ways[0] = ways[0]._replace(why="reason=no other host for prompts is up")
        ways += [self._borrowed(submit, prompt, lender, replica) for lender in lenders]
        best = min(ways, key=lambda way: way.cost_s)
        why = "; ".join([way.why for way in ways] + ([why_none] if why_none else []))
        return Placement(replica, best.host, 0.0 if best.host is None else PATIENCE_S + PATIENCE * best.cost_s, why)

    def _here(self, prompt: Prompt, replica: Replica) -> _PrefillOption:
        """Predict what a prompt costs where it is answered: its time, once more for each sequence that it holds up."""
        compute_s = prompt.num_uncached(replica) / self._open.prompt_rate(replica)
        cost_s = self._open.prompts_s(replica) + compute_s * (1 + self._open.num_open(replica))
        return _PrefillOption(cost_s, None, f"here={1e3 * cost_s:.1f}")

    def _there(self, prompt: Prompt, prefill: Replica, replica: Replica) -> _PrefillOption:
        """Predict the same where another host of the site computes it."""
        compute_s = prompt.num_uncached(prefill) / self._open.prompt_rate(prefill)
        moved_s = exposed_s(prompt.num_uncached(replica), prefill.load.handed_over_tokens_per_s, compute_s)
        cost_s = self._open.prompts_s(prefill) + compute_s + HAND_OVER_S + moved_s
        return _PrefillOption(cost_s, OwnHost(prefill, self._open.assigned), f"there={1e3 * cost_s:.1f}")

    def _borrowed(self, submit: Submit, prompt: Prompt, lender: "Lender", replica: Replica) -> _PrefillOption:
        """Predict the same where another site computes it, which has none of it cached as far as is known."""
        info = self._open.info_of(replica)
        offer = lender.offer(submit, prompt.num_uncached(replica), info, self._open.prompt_rate(replica))
        return _PrefillOption(offer.cost_s + HAND_OVER_S, lender, f"{lender.name}={offer.why}")


def with_role(replicas: Sequence[Replica], role: Role) -> list[Replica]:
    return [replica for replica in replicas if replica.host.role in (role, "both")]
