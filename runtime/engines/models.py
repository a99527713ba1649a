"""The site's models: which there are, where each one is, and how a request gets one that is awake.

A model wakes at start, for its first request, or shortly before that is expected; requests that come meanwhile wait for the same waking. What a
request uses stays awake. When the engine host dies, the models in use and those that stay on the device wake again on the next one; the
others sleep. The module refuses to know HTTP and torch; who sleeps for whom is room.py's and residency.py's business.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from engine.chat_template import ChatTemplateError
from engine.client import EngineClient, EngineError, ProgressCallback
from engine.protocol import ModelInfo, ModelLoad, ModelSpec
from engine.tokenizer import Tokenizer, TokenizerError
from runtime.engines.hosts import EngineHosts
from runtime.engines.room import Room
from runtime.engines.sizes import estimated_bytes
from runtime.engines.slot import Clock, LoadedModel, Slot, Wake
from runtime.engines.sources import SourceError, directory_of
from runtime.engines.text import TextSide, check_vocabulary
from runtime.engines.weights_tier import WeightsTier
from sites.config import ModelConfig, SiteConfig
from wire.errors import ApiError
from wire.status import ModelStatus, Residency

log = logging.getLogger("pilotlight.models")

RETRY_FAILED_S = 10.0  # a load that failed is tried again by a request after so long
DEATHS_WHILE_LOADING = 3  # hosts that may die under one load before the load is to blame
SUCCESSOR_WAIT_S = 30.0
WAY_S = 0.01  # of a command to a host that is idle, and of its answer
FORESIGHT_S = 1.0  # between two looks at who is expected, and who has been idle for too long


class Models:
    def __init__(
        self,
        site: SiteConfig,
        hosts: EngineHosts,
        tier: WeightsTier | None = None,
        *,
        on_wake: Callable[[Wake], None] = lambda wake: None,
        on_eviction: Callable[[str, str], None] = lambda model, where: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is of the wall: rhythms are those of days. `on_eviction` is told the model and where it sleeps."""
        self._hosts = hosts
        self._engine = site.engine
        self._max_waking = site.limits.max_waking
        self._slots = {config.name: Slot(config) for config in site.models}
        self._names = {name: config.name for config in site.models for name in (config.name, *config.aliases)}
        self._on_wake = on_wake
        self._clock = clock
        self._room = Room(self._slots.values(), hosts, tier, site.engine, on_eviction, clock)
        self._foresight: asyncio.Task[None] | None = None
        self.created = int(time.time())
        hosts.on_down, hosts.on_up = self._forget, self._remember

    def resolve(self, name: str) -> str | None:
        """A model's own name, from its name or an alias."""
        return self._names.get(name)

    def start(self) -> None:
        """Begins to wake what is to be on the device from the start."""
        for slot in self._slots.values():
            if slot.config.residency == "device":
                self._begin(slot)
        self._foresight = asyncio.create_task(self._foresee(), name="foresight")

    async def stop(self) -> None:
        tasks = [slot.task for slot in self._slots.values()] + [slot.falling_asleep for slot in self._slots.values()]
        running = [task for task in (*tasks, self._foresight) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[LoadedModel]:
        """A request's scope: the model is awake, and stays so. Raises ApiError when it cannot be had."""
        slot = self._slots[name]
        slot.arrivals.note(self._clock())
        loaded = await self._ready(slot)
        slot.users += 1
        try:
            yield loaded
        finally:
            slot.users -= 1
            slot.used_at = time.monotonic()
            self._room.notify()

    async def ready(self, name: str) -> LoadedModel:
        """Waits until the model is awake; for a request that is using it, and has lost its host."""
        return await self._awake(self._slots[name])

    def hint(self, name: str) -> None:
        """A request is on its way: the model begins to wake if it sleeps, and there is room or somebody less expected."""
        slot = self._slots[name]
        if slot.is_asleep and slot.failure is None:
            slot.arrivals.note(self._clock())
            self._begin(slot)

    def residency(self, name: str) -> Residency:
        slot = self._slots[name]
        return slot.residency(self._room.is_in_memory(slot))

    def missing(self) -> list[str]:
        """Why the site is not ready: one sentence for each model that should be on the device and is not."""
        return [
            f"model {slot.config.name!r}: {slot.detail or slot.residency(self._room.is_in_memory(slot))}"
            for slot in self._slots.values()
            if slot.config.residency == "device" and slot.loaded is None
        ]

    def kv_tokens(self, model: LoadedModel) -> int:
        """Tokens of KV cache that the model could have now: less than all while others of its host are at work."""
        client = self._hosts.client
        load = client.loads.get(model.info.name) if client is not None else None
        return (load.total_blocks if load is not None else model.info.total_blocks) * model.info.block_size

    def info(self, name: str) -> ModelInfo | None:
        return self._slots[name].info

    def embedding_models(self) -> list[str]:
        """Those known to make embeddings: a model that was never loaded is not known yet."""
        return [slot.config.name for slot in self._slots.values() if slot.info is not None and slot.info.pooling]

    def tokenizer(self, name: str) -> Tokenizer | None:
        """The model's tokenizer, once it has been loaded."""
        text = self._slots[name].text
        return text.tokenizer if text is not None else None

    @property
    def configs(self) -> list[ModelConfig]:
        return [slot.config for slot in self._slots.values()]

    def statuses(self) -> tuple[ModelStatus, ...]:
        client = self._hosts.client
        loads = client.loads if client is not None else {}
        return tuple(
            slot.status(loads.get(name, ModelLoad()), self._room.is_in_memory(slot))
            for name, slot in self._slots.items()
        )

    async def _ready(self, slot: Slot) -> LoadedModel:
        """In the queue of those who wait for the model, which is bounded."""
        if slot.loaded is not None and not slot.is_yielding:
            return slot.loaded
        if slot.queued >= self._max_waking:
            expected_s = slot.expected_wake_s(self._room.is_in_memory(slot))
            message = f"{slot.queued} requests wait for {slot.config.name!r} to wake, as many as this site lets wait; try again later"
            raise ApiError("overloaded", message, retry_after_s=max(1.0, expected_s))
        slot.queued += 1
        try:
            while slot.is_yielding:
                await self._room.until_changed()
            return await self._awake(slot)
        finally:
            slot.queued -= 1

    async def _awake(self, slot: Slot) -> LoadedModel:
        slot.waiters += 1
        try:
            while slot.loaded is None:
                if slot.task is None:
                    if slot.failure is not None and time.monotonic() - slot.failed_at < RETRY_FAILED_S:
                        raise slot.failure
                    self._begin(slot)
                assert slot.task is not None
                await asyncio.shield(slot.task)
                if slot.failure is not None:
                    raise slot.failure
            return slot.loaded
        finally:
            slot.waiters -= 1

    def _begin(self, slot: Slot) -> None:
        slot.failure = None
        slot.task = asyncio.create_task(self._wake(slot), name=f"wake {slot.config.name}")

    def _forget(self, reason: str) -> None:
        """The host is gone, and with it every model it held: those in use, and those that stay, are wanted again, in this order."""
        lost = [slot for slot in self._slots.values() if slot.loaded is not None]
        for slot in sorted(lost, key=lambda slot: slot.users == 0):
            slot.loaded, slot.detail, slot.is_cut = None, reason, True
            if slot.users or slot.config.residency == "device":
                self._begin(slot)
            else:
                slot.detail = ""
                self._room.give_back(slot)

    def _remember(self) -> None:
        """There is a host again: what could not be loaded for want of one is wanted still."""
        for slot in self._slots.values():
            if slot.failure is not None and slot.failure.word == "overloaded":
                self._begin(slot)

    async def _wake(self, slot: Slot) -> None:
        """Ends with `slot.loaded` or `slot.failure` set; never raises but for cancellation."""
        began = time.monotonic()
        try:
            if slot.falling_asleep is not None:
                await asyncio.shield(slot.falling_asleep)
            slot.detail = "its files are being fetched"
            slot.directory = await directory_of(slot.config.source, _reporter(slot, "downloaded"))
            has_evicted = await self._take_room(slot)
            room_at = time.monotonic()
            slot.loaded = await self._load_on_a_host(slot, slot.directory)
            self._note_wake(slot, slot.loaded, began, room_at, has_evicted)
        except (SourceError, TokenizerError, ChatTemplateError) as error:
            self._fail(slot, "model_load_failed", str(error))
        except EngineError as error:
            self._fail(slot, "model_load_failed" if error.code == "engine_error" else error.code, str(error))
        except Exception as error:  # whatever it is, requests must hear of it rather than wait
            log.exception("loading %s", slot.config.name)
            self._fail(slot, "model_load_failed", repr(error))
        finally:
            slot.task = None
            if slot.loaded is None:
                self._room.give_back(slot)
            self._room.notify()

    async def _take_room(self, slot: Slot) -> bool:
        if self._engine.weights_gib is None and self._engine.device != "cpu":
            await self._hosts.until_ready()  # who else knows how large the device is?
        assert slot.directory is not None
        if slot.info is None:
            on_cpu = not self._engine.device.startswith("cuda")
            slot.num_bytes = await asyncio.to_thread(estimated_bytes, slot.directory, slot.config.dtype, on_cpu=on_cpu)
        return await self._room.take(slot)

    def _note_wake(self, slot: Slot, loaded: LoadedModel, began: float, room_at: float, has_evicted: bool) -> None:
        now, info = time.monotonic(), loaded.info
        slot.info, slot.detail, slot.num_bytes = info, "", info.weights_bytes
        loading_s = sum(seconds for _, seconds in info.load_phases) or info.load_s
        # Without the waits for room and for a host that was only starting: what is expected of the next wake, and how long the model stays
        # after it, must not grow with how crowded the device was.
        slot.wake_ms, slot.awake_since, slot.used_at = 1e3 * min(now - room_at, loading_s + WAY_S), now, now
        slot.wake_ms_from["host" if info.mapped else "disk"] = slot.wake_ms
        slot.wakes += 1
        clock: Clock = "crash" if slot.is_cut else "swap" if has_evicted else "host" if info.mapped else "disk"
        slot.is_cut = False
        phases = (("residency", room_at - began), ("host", max(0.0, now - room_at - loading_s)))
        self._on_wake(
            Wake(slot.config.name, clock, 1e3 * (now - began), phases + (info.load_phases or (("load", info.load_s),)))
        )
        log.info("model %s is ready after %.0f ms (%s)", slot.config.name, 1e3 * (now - began), clock)

    def _fail(self, slot: Slot, word: str, detail: str) -> None:
        retry_after_s = RETRY_FAILED_S if word == "overloaded" else None
        message = f"model {slot.config.name!r} cannot be used: {detail}"
        slot.failure = ApiError(word, message, retry_after_s=retry_after_s)
        slot.failed_at, slot.detail = time.monotonic(), detail
        log.error("%s", slot.failure.message)

    async def _load_on_a_host(self, slot: Slot, directory: Path) -> LoadedModel:
        # Beside the weights; before them, so that a missing tokenizer is told without reading gigabytes first.
        text = asyncio.create_task(self._read_text(slot, directory))
        weights = asyncio.create_task(self._load_weights(slot, directory))
        try:
            await asyncio.wait({text, weights}, return_when=asyncio.FIRST_EXCEPTION)
            slot.text = await text
            info = await weights
            check_vocabulary(slot.text.tokenizer, info)
            return LoadedModel(slot.config, info, slot.text)
        finally:
            text.cancel()
            weights.cancel()
            await asyncio.gather(text, weights, return_exceptions=True)

    async def _read_text(self, slot: Slot, directory: Path) -> TextSide:
        """Small, and kept while the model sleeps; read again only where there was none."""
        return await asyncio.to_thread(TextSide.from_directory, directory) if slot.text is None else slot.text

    async def _load_weights(self, slot: Slot, directory: Path) -> ModelInfo:
        config = slot.config
        weights_file = self._room.file_for(slot)
        spec = ModelSpec(config.name, str(directory), config.dtype, config.kv_tokens, weights_file)
        client: EngineClient | None = None
        for _ in range(DEATHS_WHILE_LOADING):
            slot.detail = "waiting for the engine host"
            client = await self._successor(client)
            slot.detail, slot.loaded_share = "its weights are being loaded", 0.0
            try:
                return await self._hosts.load_model(client, spec, _reporter(slot, "loaded"))
            except EngineError as error:
                if error.code != "engine_error":
                    raise
                slot.detail = str(error)
        raise EngineError("model_load_failed", f"the engine host died {DEATHS_WHILE_LOADING} times while loading it")

    async def _successor(self, client: EngineClient | None) -> EngineClient:
        if client is None:
            return await self._hosts.next_client()
        try:
            return await asyncio.wait_for(self._hosts.next_client(after=client), SUCCESSOR_WAIT_S)
        except TimeoutError:
            raise EngineError(
                "model_load_failed", f"{self._hosts.reason or 'the engine host cannot load it'}"
            ) from None

    async def _foresee(self) -> None:
        """Wakes who is expected, and puts to sleep who has been idle for as long as the site file lets it."""
        await self._fill_host_memory()
        while True:
            await asyncio.sleep(FORESIGHT_S)
            for slot in self._slots.values():
                lead_s = FORESIGHT_S + 2 * slot.expected_wake_s(self._room.is_in_memory(slot))
                if slot.is_asleep and slot.failure is None and slot.arrivals.is_due(self._clock(), lead_s):
                    if slot.info is not None and self._room.could_take_quietly(slot):
                        log.info("model %s is expected within %.1f s and wakes", slot.config.name, lead_s)
                        self._begin(slot)
                elif self._has_idled(slot):
                    await self._room.put_to_sleep(slot)

    def _has_idled(self, slot: Slot) -> bool:
        limit_s = slot.config.sleep_after_s
        return (
            slot.loaded is not None
            and limit_s is not None
            and not slot.is_busy
            and time.monotonic() - slot.used_at > limit_s
        )

    async def _fill_host_memory(self) -> None:
        """What is to lie there from the start is loaded once by an engine, one after the other, and put to sleep again."""
        for slot in self._slots.values():
            if slot.config.residency == "host" and slot.loaded is None:
                with suppress(ApiError):  # the log has said why; a request will try again
                    await self._awake(slot)
                    if not slot.is_busy:
                        await self._room.put_to_sleep(slot)


def _reporter(slot: Slot, verb: str) -> ProgressCallback:
    def report(done: int, total: int) -> None:
        slot.detail = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB {verb}"
        slot.loaded_share = done / total if total else 0.0

    return report
