"""Applies the verdicts of scaling.py: wakes a busy model on one more device, or retires a replica.

If hosts have roles, a requested model is awake on a decode host and on a prefill host, as soon as there is room. If the site's file allows it, roles
follow the load, as roles.py decides. A further replica loads its weights from the first replica's copy in host memory, not from the checkpoint. No
model is put to sleep for it; a model that needs its memory later gets it before another model loses its only replica. A retiring replica takes no new
sequences, and sleeps after its last one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from weakref import WeakKeyDictionary

from pilotlight.runtime.dispatch.assignments import Assignments
from pilotlight.runtime.dispatch.roles import RolePolicy
from pilotlight.runtime.hosts.device_host import ChangeNotifier
from pilotlight.runtime.hosts.scaling import Heat
from pilotlight.runtime.models.device_budget import DeviceBudget
from pilotlight.runtime.models.model_state import ModelState, Replica
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.site import EngineConfig

log = logging.getLogger("pilotlight.models")

Observer = Callable[[str, str], None]  # arguments: the model, and "up" or "down"


class Autoscaler:
    def __init__(
        self,
        states: Collection[ModelState],
        budgets: Sequence[DeviceBudget],
        wake: Callable[[ModelState, Replica], None],
        changed: ChangeNotifier,
        config: EngineConfig,
        observe: Observer,
        assignments: Assignments,
        timings: SiteTimings,
    ) -> None:
        self._states = states  # a view, which may change
        self._assignments = assignments
        self._roles: RolePolicy | None = None
        if config.shift_roles:
            self._roles = RolePolicy(config.roles, config.scale_up_wait_s, timings.hot_for_s, config.scale_down_after_s)
        self._config = config
        self._timings = timings
        self._heats: WeakKeyDictionary[ModelState, Heat] = WeakKeyDictionary()
        self._budgets = budgets
        self._wake = wake
        self._changed = changed
        self._max_num_seqs = config.max_num_seqs
        self._has_roles = config.is_split
        self._observe = observe

    async def run(self) -> None:
        """Check all models periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._timings.scaling_s)
            try:
                for state in tuple(self._states):
                    await self._look(state, self._heat(state))
                self._shift_roles()
            except Exception:  # after any exception the site continues with its present replicas
                log.exception("checking whether a model needs more devices")

    async def _look(self, state: ModelState, heat: Heat) -> None:
        for replica in state.awake:
            if replica.is_retiring and not state.is_replica_busy(replica):
                await self._budgets[replica.host.index].put_to_sleep(state)
        self._complete(state)
        answering = [replica for replica in state.awake if replica.host.own_role != "prefill"]
        taking = [replica for replica in answering if replica.is_live and not replica.is_retiring]
        match heat.judge(time.monotonic(), [replica.load for replica in taking], self._max_num_seqs):
            case "more":
                self._add(state)
            case "less":
                self._retire(taking)

    def _heat(self, state: ModelState) -> Heat:
        if (heat := self._heats.get(state)) is None:
            heat = self._heats[state] = Heat(
                self._config.scale_up_wait_s, self._timings.hot_for_s, self._config.scale_down_after_s
            )
        return heat

    def _shift_roles(self) -> None:
        if self._roles is None or not self._states:
            return
        replicas = next(iter(self._states)).replicas  # any model will do, because only the hosts matter
        waits = [self._assignments.waits(each) if each.host.why_down is None else None for each in replicas]
        shift = self._roles.judge(time.monotonic(), waits)
        if shift is not None:
            host = replicas[shift.host].host
            log.info("engine %d changes its role from %s to %s", host.index, host.role, shift.role)
            host.role = shift.role

    def _add(self, state: ModelState) -> None:
        if retiring := [replica for replica in state.awake if replica.is_retiring]:
            retiring[0].is_retiring = False  # this replica is still awake, and its prefix cache is filled
            self._changed.notify_all()
            return
        answering = [replica for replica in state.replicas if replica.host.own_role != "prefill"]
        most = state.config.max_devices
        if most is not None and sum(replica.is_awake or replica.task is not None for replica in answering) >= most:
            return
        replica = self._with_room(state, answering)
        if replica is None:
            return
        log.info("model %s is overloaded and wakes on %s as well", state.name, replica.host.device)
        self._observe(state.name, "up")
        self._wake(state, replica)

    def _complete(self, state: ModelState) -> None:
        """Wake a requested model on a host of each role in which it is not awake yet."""
        if not self._has_roles or not state.awake or not (state.demand.is_open or state.config.residency == "device"):
            return
        for role in ("decode", "prefill"):
            able = [replica for replica in state.replicas if replica.host.role in (role, "both")]
            if any(replica.is_live or replica.task is not None for replica in able):
                continue
            replica = self._with_room(state, able)
            if replica is not None:
                log.info("model %s wakes on %s for its role, %s", state.name, replica.host.device, role)
                self._wake(state, replica)

    def _with_room(self, state: ModelState, replicas: Sequence[Replica]) -> Replica | None:
        """Return the model's replica on the device with most room; None if it fits on none of them.

        It fits if no other model has to sleep for it. Also None while the model wakes anywhere, or after a recent failure.
        """
        budgets = [
            self._budgets[replica.host.index]
            for replica in replicas
            if not replica.is_awake and replica.task is None and replica.host.why_down is None
        ]
        fits = [found for budget in budgets if (found := budget.suitability(state)).crowding == 0]
        if not fits or state.waking or state.history.has_failed_lately:
            return None
        return state.replicas[min(fits).device_index]

    def _retire(self, replicas: Sequence[Replica]) -> None:
        """Retire the replica with the fewest sequences, and among equals the one that woke last."""
        replica = min(replicas, key=lambda replica: (replica.work.sequences, -replica.awake_since))
        log.info("model %s needs one replica less: the one on %s retires", replica.model, replica.host.device)
        self._observe(replica.model, "down")
        replica.is_retiring = True
