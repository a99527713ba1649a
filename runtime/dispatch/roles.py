"""The policy of role shifts: when a host with one role takes on the other one for a while.

A role is overloaded ("hot") if the next sequence would lose more than `hot_wait_s` on each of its hosts, for `hot_for_s` without a pause. The least
busy host of the other role then does both. The host returns to its own role when, for `cool_for_s`, the next sequence would have lost less than a
quarter of `hot_wait_s` in either role, even without this host's help. Two thresholds and two durations prevent oscillation, as in scaling.py. A pure
function of loads and time; autoscaler.py applies it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pilotlight.runtime.hosts.scaling import COOL_SHARE, held_since
from pilotlight.sites.site import Role

Side = Literal["prefill", "decode"]
_SIDES: tuple[Side, Side] = ("prefill", "decode")


class HostWaits(NamedTuple):
    """The seconds that a new sequence would lose on a host."""

    prefill: float  # seconds lost to prompts that are computed before its own
    decode: float  # seconds lost to answers in the same steps


class RoleShift(NamedTuple):
    """A new role of a host."""

    host: int
    role: Role


class RolePolicy:
    def __init__(self, roles: Sequence[Role], hot_wait_s: float, hot_for_s: float, cool_for_s: float) -> None:
        """Start without shifts; `roles` are the hosts' roles in the site's file."""
        self._own = tuple(roles)
        self._roles = list(roles)
        self._hot_wait_s = hot_wait_s
        self._hot_for_s = hot_for_s
        self._cool_for_s = cool_for_s
        self._hot_since: dict[Side, float | None] = dict.fromkeys(_SIDES)
        self._cool_since: float | None = None

    def judge(self, now: float, waits: Sequence[HostWaits | None]) -> RoleShift | None:
        """Return the shift to make now, if any. Call it periodically.

        `waits` has an entry for each host: None if the host is not up. A shift restarts all durations.
        """
        least = {side: min(self._waits(side, waits), default=0.0) for side in _SIDES}
        for side in _SIDES:
            self._hot_since[side] = held_since(self._hot_since[side], least[side] > self._hot_wait_s, now)
        back = self._give_back(waits) if max(least.values()) < COOL_SHARE * self._hot_wait_s else None
        self._cool_since = held_since(self._cool_since, back is not None, now)
        shift = None
        for side in _SIDES:
            since = self._hot_since[side]
            if since is not None and now - since >= self._hot_for_s:
                shift = shift or self._lend_to(side, waits)
        if self._cool_since is not None and now - self._cool_since >= self._cool_for_s:
            shift = back
        if shift is not None:
            self._roles[shift.host] = shift.role
            self._hot_since, self._cool_since = dict.fromkeys(_SIDES), None
        return shift

    def _lend_to(self, side: Side, waits: Sequence[HostWaits | None]) -> RoleShift | None:
        """Return the shift that gives `side` the least busy host of the other role; None if there is none."""
        found = [
            (sum(wait), host)
            for host, (role, wait) in enumerate(zip(self._roles, waits, strict=True))
            if wait is not None and role not in (side, "both")
        ]
        return RoleShift(min(found)[1], "both") if found else None

    def _give_back(self, waits: Sequence[HostWaits | None]) -> RoleShift | None:
        """Return the shift of a host back to its own role, if the other role is cool without it; else None."""
        for host, (role, own) in enumerate(zip(self._roles, self._own, strict=True)):
            if role == own:
                continue
            left = self._waits("decode" if own == "prefill" else "prefill", waits)
            others = len(left) - (waits[host] is not None)
            if others and sum(left) / others < COOL_SHARE * self._hot_wait_s:
                return RoleShift(host, own)
        return None

    def _waits(self, side: Side, waits: Sequence[HostWaits | None]) -> list[float]:
        """Return the seconds that a new sequence would lose on each host that is up and has the role `side`."""
        of_hosts = zip(self._roles, waits, strict=True)
        return [getattr(wait, side) for role, wait in of_hosts if wait is not None and role in (side, "both")]
