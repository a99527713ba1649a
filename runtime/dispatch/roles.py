"""When a host does for a while both sides of the work, though the site's file gives it one: where prompts wait, or answers do, and it could help.

A side whose next sequence would lose more than `hot_wait_s` on each of its hosts, for HOT_FOR_S on end, is lent the host of the other side that has
least to do; that one does both from then on. When no side would lose a quarter of that for `cool_for_s`, even without it, a host goes back to its own
role. Two thresholds and two durations keep it from going to and fro, as in scaling.py. A host that does both already has nothing to lend. A pure
policy with the time given; autoscaler.py carries it out.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pilotlight.runtime.hosts.scaling import COOL_SHARE, HOT_FOR_S, held_since
from pilotlight.sites.site import Role

Side = Literal["prefill", "decode"]
_SIDES: tuple[Side, Side] = ("prefill", "decode")


class HostWaits(NamedTuple):
    """The seconds that the next sequence would lose on a host."""

    prefill: float  # to prompts that are to be computed before its own
    decode: float  # to answers beside its own


class RoleShift(NamedTuple):
    """A host's role from now on."""

    host: int
    role: Role


class RolePolicy:
    def __init__(self, roles: Sequence[Role], hot_wait_s: float, cool_for_s: float) -> None:
        """`roles`: of each host, as the site's file has them."""
        self._own = tuple(roles)
        self._roles = list(roles)
        self._hot_wait_s = hot_wait_s
        self._cool_for_s = cool_for_s
        self._hot_since: dict[Side, float | None] = dict.fromkeys(_SIDES)
        self._cool_since: float | None = None

    def judge(self, now: float, waits: Sequence[HostWaits | None]) -> RoleShift | None:
        """Judge what each host's next sequence would lose, every now and then; None: that host is not up.

        A shift starts all clocks anew."""
        least = {side: min(self._waits(side, waits), default=0.0) for side in _SIDES}
        for side in _SIDES:
            self._hot_since[side] = held_since(self._hot_since[side], least[side] > self._hot_wait_s, now)
        back = self._give_back(waits) if max(least.values()) < COOL_SHARE * self._hot_wait_s else None
        self._cool_since = held_since(self._cool_since, back is not None, now)
        shift = None
        for side in _SIDES:
            since = self._hot_since[side]
            if since is not None and now - since >= HOT_FOR_S:
                shift = shift or self._lend_to(side, waits)
        if self._cool_since is not None and now - self._cool_since >= self._cool_for_s:
            shift = back
        if shift is not None:
            self._roles[shift.host] = shift.role
            self._hot_since, self._cool_since = dict.fromkeys(_SIDES), None
        return shift

    def _lend_to(self, side: Side, waits: Sequence[HostWaits | None]) -> RoleShift | None:
        """Return the shift of the other side's host that has least to do."""
        found = [
            (sum(wait), host)
            for host, (role, wait) in enumerate(zip(self._roles, waits, strict=True))
            if wait is not None and role not in (side, "both")
        ]
        return RoleShift(min(found)[1], "both") if found else None

    def _give_back(self, waits: Sequence[HostWaits | None]) -> RoleShift | None:
        """Return the shift of a host to its own role, if the side that it leaves stays cool without it."""
        for host, (role, own) in enumerate(zip(self._roles, self._own, strict=True)):
            if role == own:
                continue
            left = self._waits("decode" if own == "prefill" else "prefill", waits)
            others = len(left) - (waits[host] is not None)
            if others and sum(left) / others < COOL_SHARE * self._hot_wait_s:
                return RoleShift(host, own)
        return None

    def _waits(self, side: Side, waits: Sequence[HostWaits | None]) -> list[float]:
        """Return the waits on the hosts of a side that are up."""
        of_hosts = zip(self._roles, waits, strict=True)
        return [getattr(wait, side) for role, wait in of_hosts if wait is not None and role in (side, "both")]
