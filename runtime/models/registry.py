"""The site's models: gives a request an awake model.

A model wakes at the site's start, for its first request, or shortly before one is expected; requests that arrive meanwhile share the wake. A model in
use stays awake on a device. This module combines the parts that decide: wake_queue.py (waiting requests), device_budget.py and residency.py
(eviction), wakes.py (the wake itself), prewaking.py and autoscaler.py (changes without a request). Independent of HTTP and torch.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from pilotlight.runtime.dispatch.assignments import Assignments
from pilotlight.runtime.dispatch.dispatcher import Dispatch
from pilotlight.runtime.fetching.short_names import PREFIX
from pilotlight.runtime.generation.rendering import expect_conversation
from pilotlight.runtime.hosts.autoscaler import Autoscaler
from pilotlight.runtime.hosts.device_host import ChangeNotifier, HostHandle
from pilotlight.runtime.hosts.fleet import Fleet
from pilotlight.runtime.hosts.prewaking import Foresight
from pilotlight.runtime.models.adapters import AdapterRegistry
from pilotlight.runtime.models.device_budget import DeviceBudget
from pilotlight.runtime.models.finetunes import FinetuneStore
from pilotlight.runtime.models.host_memory import HostMemory
from pilotlight.runtime.models.model_state import AwakeModel, ModelState, ModelStates
from pilotlight.runtime.models.model_view import ModelRegistry
from pilotlight.runtime.models.wake_history import Wake
from pilotlight.runtime.models.wake_queue import WakeQueue
from pilotlight.runtime.models.wakes import Waker
from pilotlight.runtime.models.weights_tier import WeightsTier
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.site import ModelConfig, SiteConfig
from pilotlight.support import background
from pilotlight.wire.errors import ApiError


class Models:
    def __init__(
        self,
        site: SiteConfig,
        fleet: Fleet,
        tier: WeightsTier | None = None,
        *,
        on_wake: Callable[[Wake], None] = lambda wake: None,
        on_eviction: Callable[[str, str], None] = lambda model, where: None,
        on_scaling: Callable[[str, str], None] = lambda model, direction: None,
        on_lost: Callable[[str], None] = lambda model: None,
        finetunes: FinetuneStore | None = None,
        timings: SiteTimings = SiteTimings(),  # noqa: B008 - frozen
    ) -> None:
        """Create the models, all asleep.

        `on_eviction` is called with the model and where its weights are then, `on_scaling` with the model and "up" or "down", `on_lost` with a model
        that has left its last device and lost its cached blocks."""
        self._fleet = fleet
        self._clock = timings.clock
        self._new_state = partial(ModelState, hosts=fleet.hosts, tier=tier, on_lost=on_lost)
        self.states = ModelStates({config.name: self._new_state(config) for config in site.models})
        states = self.states.values()  # a view, because models are added and removed while the site runs
        self._changed = ChangeNotifier()  # a request has ended, or a model has woken or fallen asleep
        self._memory = memory = HostMemory(states, tier, timings.clock)
        self._budgets = budgets = tuple(
            DeviceBudget(self.states, host, standby, site.engine, self._changed, on_eviction, timings)
            for host, standby in zip(fleet.hosts, fleet.standbys, strict=True)
        )
        self._waker = Waker(budgets, memory, self._changed, site.engine, on_wake, timings)
        self._queue = WakeQueue(self._waker.begin, self._changed, site.limits.max_waking)
        self.adapters = AdapterRegistry(site.models, finetunes)
        self.registry = ModelRegistry(self.states)
        assignments = Assignments(self.states, has_choice=len(fleet.hosts) > 1)
        self.dispatch = Dispatch(self.states, fleet, assignments, self._queue.until_awake)
        self._foresight = Foresight(states, budgets, self._queue, self._waker.begin, timings)
        self._autoscaler = Autoscaler(
            states, budgets, self._waker.begin_on, self._changed, site.engine, on_scaling, assignments, timings
        )
        self._tasks: list[asyncio.Task[None]] = []
        for host in fleet.hosts:
            host.on_change(self._note_up, self._note_down)

    def start(self) -> None:
        """Start to wake the pinned models, and the periodic tasks."""
        for state in tuple(self.states.values()):
            if state.config.residency == "device":
                self._waker.begin(state)
        self._tasks.append(background.start(self._foresight.run, "waking models ahead of their use"))
        if len(self._fleet.hosts) > 1:
            self._tasks.append(background.start(self._autoscaler.run, "moving models between devices"))

    def drain(self) -> None:
        """Refuse the requests that wait for a model."""
        self._queue.drain()

    async def stop(self) -> None:
        replicas = [replica for state in self.states.values() for replica in state.replicas]
        wakes_and_sleeps = [task for replica in replicas for task in (replica.task, replica.falling_asleep)]
        running = [task for task in (*wakes_and_sleeps, *self._waker.checks, *self._tasks) if task is not None]
        await background.stop(*running)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[AwakeModel]:
        """Open a request's scope, in which the model stays awake. Raises ApiError if it cannot be loaded."""
        state = self.states[name]
        demand = state.demand
        demand.arrivals.note(self._clock())
        loaded = None if state.is_yielding else state.loaded
        loaded = loaded or await self._queue.until_available(state)
        demand.users += 1
        try:
            yield loaded
        finally:
            demand.users -= 1
            demand.used_at = time.monotonic()
            self._changed.notify_all()

    def expect_conversation(self, name: str) -> None:
        """Prepare to render a conversation while its model is still asleep."""
        if self.states[name].text is None:
            expect_conversation(is_trusted=self.states[name].config.source.startswith(PREFIX))

    def wake(self, name: str) -> None:
        """Start to wake the model if it sleeps, even after failed wakes, because an operator asks for it."""
        if (state := self.states[name]).is_asleep:
            self._waker.begin(state)

    def hint(self, name: str) -> None:
        """Start to wake a sleeping model for an expected request.

        The wake waits for memory like any other.
        """
        state = self.states[name]
        if state.is_asleep and not state.history.is_given_up:
            state.demand.arrivals.note(self._clock())
            self._waker.begin(state)

    async def put_to_sleep(self, name: str) -> None:
        """Put the model to sleep on every device. Raises ApiError if requests use it or it is waking."""
        state = self.states[name]
        if state.demand.users or state.waking:
            raise ApiError("conflict", f"{name} is in use: it sleeps when its requests have ended")
        replicas = zip(self._budgets, state.replicas, strict=True)
        await asyncio.gather(*(budget.put_to_sleep(state) for budget, replica in replicas if replica.is_awake))
        unloading = [task for replica in state.replicas if (task := replica.falling_asleep) is not None]
        await asyncio.gather(*map(asyncio.shield, unloading))

    def add(self, config: ModelConfig) -> None:
        """Serve a further model, which is asleep at first.

        Raises ApiError if its name is taken, or if the site has no engine host."""
        if not self._fleet.hosts:
            sentence = "this site was started without models and has no engine host: name one under [[models]] of its file, and restart it"
            raise ApiError("conflict", sentence)
        for name in (config.name, *config.aliases):
            if self.registry.resolve(name) is not None:
                sentence = f"this site serves a model named {name[:200]!r} already: give another name"
                raise ApiError("conflict", sentence, param="model")
        self.states[config.name] = self._new_state(config, is_added=True)
        self.adapters.add(config)
        self.registry.refresh()

    async def remove(self, name: str) -> None:
        """Stop serving a model that `add` added; its files stay.

        Raises ApiError if it is in the site's file, requests use it, or its weights are being loaded."""
        state = self.states[name]
        if not state.is_added:
            raise ApiError("conflict", f"{name} is in the site's file: remove it there, and restart the site")
        if state.demand.waiters:
            raise ApiError("conflict", f"requests wait for {name}: remove it when they have ended")
        self.registry.refresh(hidden=name)  # no further request gets the model
        try:
            if state.directory is None:  # the model's files are still being fetched
                await background.stop(*(replica.task for replica in state.waking if replica.task is not None))
            await self.put_to_sleep(name)
            if not state.is_asleep:  # a request may have looked up the model just before
                raise ApiError("conflict", f"{name} is in use: remove it when its requests have ended")
        except ApiError:
            self.registry.refresh()
            raise
        del self.states[name]
        self.adapters.remove(name)
        self._memory.remove(name)
        self.registry.refresh()

    def _note_down(self, host: HostHandle, reason: str) -> None:
        """Record that the host has lost its models, and wake those that are needed.

        Of the models that are on no other device, those in use wake first, and then the pinned ones."""
        budget = self._budgets[host.index]
        lost = [state for state in self.states.values() if state.replicas[host.index].is_awake]
        for state in sorted(lost, key=lambda state: state.demand.users == 0):
            replica = state.replicas[host.index]
            state.lose(replica)
            if state.awake or state.waking:
                budget.release(state)
                continue
            state.history.is_cut = True
            if state.demand.users or state.config.residency == "device":
                state.detail = reason
                self._waker.begin(state)
            if replica.task is None:  # the model stays asleep here, or wakes on another device
                budget.release(state)

    def _note_up(self) -> None:
        """Wake the models that could not be loaded because no host was up."""
        for state in self.states.values():
            if state.history.lacked_a_host and not state.waking:
                self._waker.begin(state)
