"""How long a site may be silent before another one is asked: many times what its own published pace explains.

A link that loses packets, or an engine that has frozen, keeps answering probes while its streams stand still.
"""

from collections.abc import Callable

from edge_router.backend import Backend
from edge_router.policy import Preference, RouteRequest
from edge_router.proxied import ProxiedRequest
from edge_router.request import ValidRequest
from edge_router.retries import RetryBudget
from sites.network import RelayConfig
from wire.continuation import ContinuationError
from wire.status import ModelStatus

INTERVALS = (
    50  # decode steps that a site may take for one token: others' prompts come between, and a sequence may be preempted
)
TIMES = 4.0  # the predicted wait for a first token: predictions are averages

Rank = Callable[[ValidRequest], tuple[RouteRequest, list[Preference]]]


def stall_limit_s(model: ModelStatus | None, stall_s: float) -> float:
    """Between two tokens."""
    if model is None:
        return stall_s
    if model.decode_tokens_per_s > 0:
        stall_s = max(stall_s, INTERVALS / model.decode_tokens_per_s)
    if model.prefill_tokens_per_s > 0:
        stall_s += model.queued_tokens / model.prefill_tokens_per_s
    return stall_s


def first_token_limit_s(preference: Preference, name: str | None, stall_s: float) -> float:
    """Before the first one; without bound where nobody has measured, or the model must wake first."""
    model = preference.backend.model(name) if name is not None else None
    if model is None or model.residency != "device" or model.prefill_tokens_per_s <= 0:
        return float("inf")
    expected_ms = sum(
        [preference.terms.get(term, 0.0) for term in ("rtt", "queue_ahead", "prefill", "decode_crowding")]
    )
    return max(stall_s, TIMES * expected_ms / 1000)


class AttemptPace:
    """Whether one request had better leave one site."""

    def __init__(
        self, proxied: ProxiedRequest, backend: Backend, config: RelayConfig, rank: Rank, retries: RetryBudget
    ) -> None:
        self._proxied = proxied
        self._backend = backend
        self._config = config
        self._rank = rank
        self._retries = retries

    def is_frozen(self) -> bool:
        return self._backend.is_frozen

    def is_stalled(self, silent_s: float) -> bool:
        """Its stream has stood still for longer than the site's own pace explains, and can be moved."""
        proxied, model = self._proxied, self._proxied.request.model
        if silent_s < self._config.stall_s or model is None or not proxied.recovery.may_move:
            return False
        if silent_s < stall_limit_s(self._backend.view().model(model), proxied.recovery.stall_s):
            return False
        try:
            proxied.log.delivery()
        except ContinuationError:
            return False
        return self._has_other({self._backend.name})

    def first_stall_s(self, preference: Preference) -> float:
        request = self._proxied.request
        if request.is_generated_whole or request.head.is_for_function:
            return float("inf")
        return first_token_limit_s(preference, request.model, self._proxied.first_stall_s)

    def may_leave(self) -> bool:
        """Before its first token. The try that follows is paid for now: a request must not be left without one."""
        proxied, tries = self._proxied, self._proxied.tries
        if proxied.recovery.lost is not None:
            return True
        if len(tries.failures) + 1 >= self._config.max_tries or not proxied.request.head.may_be_repeated:
            return False
        if self._has_other(tries.excluded | {self._backend.name}) and self._retries.withdraw():
            tries.is_paid = True
        return tries.is_paid

    def _has_other(self, than: set[str]) -> bool:
        request = self._proxied.request
        others = [each for each in self._rank(request)[1] if each.backend.name not in than]
        return any(each.backend.state == "healthy" and each.serves(request.model) for each in others)
