"""How a model wakes on one device: its files fetched, room made, its text side read beside its weights, the waking measured.

A load that fails is told to everybody who waits for the model, unless it is awake elsewhere. A chat template is part of it where nobody waits;
who waits may want no conversation, and the template is looked at a little later. A host that dies under a load is followed by the
next one of the same device: what kills hosts is not let loose on the others. Refuses to know who asked.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.client import EngineClient, EngineError, ProgressCallback
from engine.protocol import ModelInfo, ModelSpec
from engine.tokenizer import TokenizerError
from runtime.engines.copies import Copy
from runtime.engines.devices import is_surely_cpu
from runtime.engines.host_memory import HostMemory
from runtime.engines.room import News, Room
from runtime.engines.sizes import estimated_bytes
from runtime.engines.slot import RETRY_FAILED_S, Clock, Slot, Wake
from runtime.engines.sources import SourceError, directory_of
from runtime.engines.text import TextSide, check_vocabulary
from sites.site import EngineConfig
from wire.errors import ApiError

log = logging.getLogger("pilotlight.models")

DEATHS_WHILE_LOADING = 3  # hosts that may die under one load before the load is to blame
SUCCESSOR_WAIT_S = 30.0
# Of a model that was awaited: importing Jinja and compiling takes 35 ms, for which its first answers have no use
TEMPLATE_AFTER_S = 1.0
WAY_S = 0.01  # of a command to a host that is idle, and of its answer


class Waker:
    def __init__(
        self,
        rooms: Sequence[Room],
        memory: HostMemory,
        news: News,
        config: EngineConfig,
        on_wake: Callable[[Wake], None],
    ) -> None:
        """`rooms`: one for each device, in order."""
        self._rooms = rooms
        self._memory = memory
        self._news = news
        self._config = config
        self._on_wake = on_wake
        self.checks: set[asyncio.Task[None]] = set()  # of templates that are looked at later

    def begin(self, copy: Copy) -> None:
        copy.slot.failure = None
        copy.task = asyncio.create_task(self._wake(copy), name=f"wake {copy.slot.config.name}")

    async def _wake(self, copy: Copy) -> None:
        """Ends with the copy awake or the failure noted; never raises but for cancellation."""
        slot, began = copy.slot, time.monotonic()
        try:
            if copy.falling_asleep is not None:
                await asyncio.shield(copy.falling_asleep)
            if slot.directory is None or not slot.directory.is_dir():  # a wake asks no server for what is here
                slot.detail = "its files are being fetched"
                slot.directory = await directory_of(slot.config.source, _reporter(slot, "downloaded"))
            text = asyncio.create_task(self._read_text(slot, slot.directory))  # beside the wait for room
            try:
                has_evicted = await self._take_room(copy, slot.directory)
                room_at = time.monotonic()
                slot.info = await self._load(copy, slot.directory, text)
                while copy.host.client is not copy.loaded_by:  # it died while the text side was still being read
                    slot.info = await self._load(copy, slot.directory, text)
            finally:
                text.cancel()
                await asyncio.gather(text, return_exceptions=True)
            is_further = bool(slot.awake)
            copy.is_awake = True
            self._check_template_later(slot)
            self._note_wake(copy, slot.info, began, room_at, has_evicted, is_further)
        except (SourceError, TokenizerError, ChatTemplateError) as error:
            self._fail(copy, "model_load_failed", str(error))
        except EngineError as error:
            self._fail(copy, "model_load_failed" if error.code == "engine_error" else error.code, str(error))
        except Exception as error:  # whatever it is, requests must hear of it rather than wait
            log.exception("loading %s", slot.config.name)
            self._fail(copy, "model_load_failed", repr(error))
        finally:
            copy.task = None
            if not copy.is_awake:
                self._rooms[copy.host.index].give_back(copy)
            self._news.tell()

    async def _take_room(self, copy: Copy, directory: Path) -> bool:
        slot, device = copy.slot, copy.host.device
        if self._config.weights_gib is None and not is_surely_cpu(device):
            await copy.host.until_ready()  # who else knows how large the device is?
        if slot.info is None:
            on_cpu = not device.startswith("cuda")
            slot.num_bytes = await asyncio.to_thread(estimated_bytes, directory, slot.config.dtype, on_cpu=on_cpu)
        return await self._rooms[copy.host.index].take(copy)

    def _note_wake(
        self, copy: Copy, info: ModelInfo, began: float, room_at: float, has_evicted: bool, is_further: bool
    ) -> None:
        slot, now = copy.slot, time.monotonic()
        slot.detail, slot.num_bytes = "", info.weights_bytes
        loading_s = sum(seconds for _, seconds in info.load_phases) or info.load_s
        # Without the waits for room and for a host that was only starting: what is expected of the next wake, and how long the model stays
        # after it, must not grow with how crowded the device was.
        slot.wake_ms, copy.awake_since, slot.used_at = 1e3 * min(now - room_at, loading_s + WAY_S), now, now
        slot.wake_ms_from["host" if info.mapped else "disk"] = slot.wake_ms
        slot.wakes, slot.failures = slot.wakes + 1, 0
        clock: Clock = "disk"
        if is_further and info.mapped:
            clock = "sibling"
        elif slot.is_cut and not is_further:
            clock = "crash"
        elif has_evicted:
            clock = "swap"
        elif info.mapped:
            clock = "host"
        slot.is_cut = False
        phases = (("residency", room_at - began), ("host", max(0.0, now - room_at - loading_s)))
        self._on_wake(
            Wake(slot.config.name, clock, 1e3 * (now - began), phases + (info.load_phases or (("load", info.load_s),)))
        )
        where = f" on {copy.host.device}" if len(slot.copies) > 1 else ""
        log.info("model %s is ready%s after %.0f ms (%s)", slot.config.name, where, 1e3 * (now - began), clock)

    def _fail(self, copy: Copy, word: str, detail: str) -> None:
        slot = copy.slot
        message = f"model {slot.config.name!r} cannot be used: {detail}"
        slot.failed_at = time.monotonic()
        if any(
            other.is_awake or other.task is not None for other in slot.copies if other is not copy
        ):  # only a further copy is missing
            slot.detail = ""
            log.warning("model %r could not be woken on %s as well: %s", slot.config.name, copy.host.device, detail)
            return
        slot.failures += 1
        slot.failure = ApiError(word, message, retry_after_s=RETRY_FAILED_S if word == "overloaded" else None)
        slot.detail = detail
        log.error("%s", message)

    async def _load(self, copy: Copy, directory: Path, text: "asyncio.Task[TextSide]") -> ModelInfo:
        # Beside the weights; before them, so that a missing tokenizer is told without reading gigabytes first.
        slot = copy.slot
        weights = asyncio.create_task(self._load_weights(copy, directory))
        try:
            await asyncio.wait({text, weights}, return_when=asyncio.FIRST_EXCEPTION)
            slot.text = await text
            info = await weights
            check_vocabulary(slot.text.tokenizer, info)
            if not slot.waiters:
                await asyncio.to_thread(slot.text.template.compile)
            return info
        finally:
            weights.cancel()
            await asyncio.gather(weights, return_exceptions=True)

    async def _read_text(self, slot: Slot, directory: Path) -> TextSide:
        """Small, and kept while the model sleeps; read again only where there was none."""
        return await asyncio.to_thread(TextSide.from_directory, directory) if slot.text is None else slot.text

    def _check_template_later(self, slot: Slot) -> None:
        if slot.text is not None and not slot.text.template.is_compiled:
            check = asyncio.create_task(self._check_template(slot, slot.text.template), name="check template")
            self.checks.add(check)
            check.add_done_callback(self.checks.discard)

    async def _check_template(self, slot: Slot, template: ChatTemplate) -> None:
        """The model stays awake with a broken one, for what needs none; conversations are refused, and the site's status says why (`Slot.flaw`)."""
        await asyncio.sleep(TEMPLATE_AFTER_S)
        try:
            await asyncio.to_thread(template.compile)
        except ChatTemplateError as error:
            log.error("model %r takes no conversations: %s", slot.config.name, error)

    async def _load_weights(self, copy: Copy, directory: Path) -> ModelInfo:
        slot, config = copy.slot, copy.slot.config
        weights_file = self._memory.file_for(slot)
        spec = ModelSpec(config.name, str(directory), config.dtype, config.kv_tokens, weights_file, slot.waiters > 0)
        client: EngineClient | None = None
        for _ in range(DEATHS_WHILE_LOADING):
            slot.detail = "waiting for the engine host"
            client = await self._successor(copy, client)
            slot.detail, slot.loaded_share = "its weights are being loaded", 0.0
            try:
                info = await copy.host.load_model(client, spec, _reporter(slot, "loaded"))
                copy.loaded_by = client
                return info
            except EngineError as error:
                if error.code != "engine_error":
                    raise
                slot.detail = str(error)
        raise EngineError("model_load_failed", f"the engine host died {DEATHS_WHILE_LOADING} times while loading it")

    async def _successor(self, copy: Copy, client: EngineClient | None) -> EngineClient:
        if client is None:
            return await copy.host.next_client()
        try:
            return await asyncio.wait_for(copy.host.next_client(after=client), SUCCESSOR_WAIT_S)
        except TimeoutError:
            raise EngineError("model_load_failed", f"{copy.host.reason or 'the engine host cannot load it'}") from None


def _reporter(slot: Slot, verb: str) -> ProgressCallback:
    def report(done: int, total: int) -> None:
        slot.detail = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB {verb}"
        slot.loaded_share = done / total if total else 0.0

    return report
