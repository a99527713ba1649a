"""The policy of replicas: when a model gets one more device, and when one less.

A model is overloaded ("hot") if its next request would have waited longer than scale_up_wait_s on every replica, for hot_for_s without a pause. A
shorter burst, or one long prompt, would be over before another replica has woken and filled its prefix cache. A model is cool if, with one replica
less, the wait would have stayed below a quarter of scale_up_wait_s for scale_down_after_s. With a higher share, the next fluctuation would wake the
replica again. With a duration shorter than a pause in a conversation, its prefix cache would be lost too often. Two thresholds and two durations
prevent oscillation. A pure function of loads and time; autoscaler.py applies it.
"""

from collections.abc import Sequence
from typing import Literal

from pilotlight.engine.api.protocol import ModelLoad

COOL_SHARE = 0.25  # a model is cool below this share of the wait at which it is hot
_DECODE_TOKENS = 64  # tokens that a running sequence is assumed to produce until it ends

Verdict = Literal["more", "less", "stay"]


def wait_s(load: ModelLoad, max_num_seqs: int) -> float:
    """Return the seconds that the next request would wait on a replica.

    It waits for all earlier prompts. If max_num_seqs sequences run, one of them must also end for each waiting request, and one for this request.
    """
    queued_s = load.waiting_tokens / load.prefill_tokens_per_s if load.prefill_tokens_per_s else 0.0
    if load.running < max_num_seqs or not load.decode_tokens_per_s:
        return queued_s
    ends_per_s = load.running * load.decode_tokens_per_s / _DECODE_TOKENS
    return queued_s + (load.waiting + 1) / ends_per_s


def wait_with_one_less_s(loads: Sequence[ModelLoad], max_num_seqs: int) -> float:
    """Return the next request's wait in seconds if one replica slept and the others had its work."""
    others = len(loads) - 1
    assert others > 0, "the last replica does not sleep because of a low load"
    running, waiting = (sum(getattr(load, name) for load in loads) for name in ("running", "waiting"))
    return wait_s(
        ModelLoad(
            running=min(max_num_seqs, -(-running // others)),
            waiting=-(-waiting // others) + max(0, -(-running // others) - max_num_seqs),
            waiting_tokens=-(-sum(load.waiting_tokens for load in loads) // others),
            prefill_tokens_per_s=max(load.prefill_tokens_per_s for load in loads),
            decode_tokens_per_s=max(load.decode_tokens_per_s for load in loads),
        ),
        max_num_seqs,
    )


class Heat:
    """The verdicts on one model over time."""

    def __init__(self, hot_wait_s: float, hot_for_s: float, cool_for_s: float) -> None:
        self._hot_wait_s = hot_wait_s
        self._hot_for_s = hot_for_s
        self._cool_for_s = cool_for_s
        self._hot_since: float | None = None
        self._cool_since: float | None = None

    def judge(self, now: float, loads: Sequence[ModelLoad], max_num_seqs: int) -> Verdict:
        """Return the verdict on the loads of the replicas that take requests. Call it periodically.

        A verdict other than "stay" restarts both durations.
        """
        if not loads or not self._hot_wait_s:
            self._hot_since = self._cool_since = None
            return "stay"
        is_hot = min(wait_s(load, max_num_seqs) for load in loads) > self._hot_wait_s
        is_cool = len(loads) > 1 and wait_with_one_less_s(loads, max_num_seqs) < COOL_SHARE * self._hot_wait_s
        self._hot_since = held_since(self._hot_since, is_hot, now)
        self._cool_since = held_since(self._cool_since, is_cool, now)
        if self._hot_since is not None and now - self._hot_since >= self._hot_for_s:
            self._hot_since = self._cool_since = None
            return "more"
        if self._cool_since is not None and now - self._cool_since >= self._cool_for_s:
            self._hot_since = self._cool_since = None
            return "less"
        return "stay"


def held_since(since: float | None, holds: bool, now: float) -> float | None:
    return (now if since is None else since) if holds else None
