"""The wake of a model on the most suitable device, measured: fetch files, make room, load weights.

The text side is loaded at the same time. A failed load is raised in every request that waits for the model, unless it is awake elsewhere. A wake
without waiting requests checks the chat template too; otherwise the check follows a little later, because the request may not need the template. If a
host dies during a load, the next host of the same device continues; other devices are not used, because the load may be the cause. Independent of the
reason for the wake.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from pilotlight.engine.api.client import EngineClient, EngineError
from pilotlight.engine.api.errors import TokenizerError
from pilotlight.engine.api.protocol import LoadProgress, ModelInfo, ModelSpec
from pilotlight.engine.planning.model_plan import planned_weights_bytes
from pilotlight.engine.text.chat_template import ChatTemplateError
from pilotlight.runtime.fetching.short_names import EMBEDDED
from pilotlight.runtime.generation.rendering import Rendering
from pilotlight.runtime.hosts.device_host import ChangeNotifier
from pilotlight.runtime.hosts.devices import is_surely_cpu
from pilotlight.runtime.models.device_budget import DeviceBudget
from pilotlight.runtime.models.host_memory import HostMemory
from pilotlight.runtime.models.model_state import ModelState, Replica
from pilotlight.runtime.models.sources import SourceError, directory_of
from pilotlight.runtime.models.text import TextSide, check_vocabulary, require_safe_tokenizer
from pilotlight.runtime.models.wake_history import RETRY_FAILED_S, Clock, Wake
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.site import EngineConfig, ModelConfig
from pilotlight.support import background
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.errors import ApiError

log = logging.getLogger("pilotlight.models")

DEATHS_WHILE_LOADING = (
    3  # if so many hosts end during one load, and none was killed from outside, the load is assumed to be the cause
)
SUCCESSOR_WAIT_S = 30.0
WAY_S = 0.01  # assumed time of a command to an idle host, with its response


class Waker:
    def __init__(
        self,
        budgets: Sequence[DeviceBudget],
        memory: HostMemory,
        changed: ChangeNotifier,
        config: EngineConfig,
        on_wake: Callable[[Wake], None],
        timings: SiteTimings,
    ) -> None:
        """`budgets` has one entry for each device, in order."""
        self._budgets = budgets
        self._memory = memory
        self._changed = changed
        self._config = config
        self._on_wake = on_wake
        self._timings = timings
        self.checks: set[asyncio.Task[None]] = set()  # pending checks of chat templates

    def begin(self, state: ModelState, replicas: Sequence[Replica] = ()) -> None:
        """Start to wake the model on the most suitable device, of the given replicas if there are any.
        A device for prompts only is the last choice."""
        replicas = replicas or state.replicas
        replicas = [replica for replica in replicas if replica.host.role != "prefill"] or replicas
        if len(replicas) > 1:
            suitabilities = [self._budgets[replica.host.index].suitability(state) for replica in replicas]
            replicas = [state.replicas[min(suitabilities).device_index]]
        self.begin_on(state, replicas[0])

    def begin_on(self, state: ModelState, replica: Replica) -> None:
        """Start to wake the model as this replica."""
        state.history.failure = None
        replica.start_waking(self._wake(state, replica))

    async def _wake(self, state: ModelState, replica: Replica) -> None:
        """Wake the replica, or record the failure. Only cancellation is raised."""
        began = time.monotonic()
        try:
            if replica.falling_asleep is not None:
                await asyncio.shield(replica.falling_asleep)
            directory = await self._files(state)
            text = asyncio.create_task(self._read_text(state, directory))  # concurrent with the wait for room
            try:
                has_evicted = await self._acquire_memory(state, replica, directory)
                room_at = time.monotonic()
                info = await self._load(state, replica, directory, text)
                while replica.host.client is not replica.loaded_by:  # the host died meanwhile
                    info = await self._load(state, replica, directory, text)
            finally:
                await background.stop(text)
            is_first = state.note_info(info)
            replica.is_awake = True
            self._check_template_later(state)
            self._note_wake(state, replica, info, began, room_at, has_evicted)
            if is_first:
                _log_conversion(info)
        except (SourceError, TokenizerError, ChatTemplateError) as error:
            self._fail(state, replica, "model_load_failed", str(error))
        except EngineError as error:
            self._fail(state, replica, "model_load_failed" if error.code == "engine_error" else error.code, str(error))
        except Exception as error:  # pass on any exception, so that requests do not wait forever
            log.exception("loading %s", state.name)
            self._fail(state, replica, "model_load_failed", repr(error))
        finally:
            replica.end_waking()
            if not (replica.is_awake or replica.falling_asleep is not None):
                self._budgets[replica.host.index].release(state)
            self._changed.notify_all()

    async def _files(self, state: ModelState) -> Path:
        """Return the model's folder; download it first if necessary."""
        if state.directory is None or not state.directory.is_dir():
            state.detail = "its files are being fetched"
            state.note_files(await directory_of(state.config.source, _reporter(state, "downloaded")))
        assert state.directory is not None
        return state.directory

    async def _acquire_memory(self, state: ModelState, replica: Replica, directory: Path) -> bool:
        device = replica.host.device
        if self._config.weights_gib is None and not is_surely_cpu(device):
            await replica.host.until_ready()  # only the host knows the size of the device
        if state.info is None:
            on_cpu = not device.startswith("cuda")
            state.num_bytes = await asyncio.to_thread(
                planned_weights_bytes, directory, state.config.dtype, on_cpu=on_cpu
            )
        return await self._budgets[replica.host.index].acquire(state)

    def _note_wake(
        self,
        state: ModelState,
        replica: Replica,
        info: ModelInfo,
        began: float,
        room_at: float,
        has_evicted: bool,
    ) -> None:
        history, now = state.history, time.monotonic()
        is_further = state.has_others_awake(replica)
        state.detail, state.num_bytes = "", info.weights_bytes
        loading_s = sum(seconds for _, seconds in info.load_phases) or info.load_s
        replica.awake_since = state.demand.used_at = now
        clock = _clock(is_further, info.mapped, history.is_cut, has_evicted)
        # Leave out the waits for room and for a starting host: the estimate of the next wake, and the time that the model then stays awake, must not
        # grow with the device's load.
        history.note_wake(1e3 * min(now - room_at, loading_s + WAY_S), info.mapped)
        phases = (("residency", room_at - began), ("host", max(0.0, now - room_at - loading_s)))
        self._on_wake(
            Wake(state.name, clock, 1e3 * (now - began), phases + (info.load_phases or (("load", info.load_s),)))
        )
        where = f" on {replica.host.device}" if len(state.replicas) > 1 else ""
        log.info("model %s is ready%s after %.0f ms (%s)", state.name, where, 1e3 * (now - began), clock)

    def _fail(self, state: ModelState, replica: Replica, word: str, detail: str) -> None:
        if replica.holds_memory:
            self._budgets[replica.host.index].discard(state)
        message = f"model {state.name!r} cannot be used: {detail}"
        state.history.failed_at = time.monotonic()
        if any(other.is_awake or other.task is not None for other in state.replicas if other is not replica):
            state.detail = ""  # the model itself is available
            log.warning("model %r could not be woken on %s as well: %s", state.name, replica.host.device, detail)
            return
        retry_after_s = RETRY_FAILED_S if word == "overloaded" else None
        state.history.note_failure(ApiError(word, message, retry_after_s=retry_after_s))
        state.detail = detail
        log.error("%s", message)

    async def _load(
        self, state: ModelState, replica: Replica, directory: Path, text: "asyncio.Task[TextSide]"
    ) -> ModelInfo:
        # Wait for the text side and the weights together, so that a missing tokenizer is reported before gigabytes are read.
        weights = asyncio.create_task(self._load_weights(state, replica, directory))
        try:
            await asyncio.wait({text, weights}, return_when=asyncio.FIRST_EXCEPTION)
            text_side = await text
            state.note_text(text_side)
            info = _limited(await weights, state.config)
            check_vocabulary(text_side.tokenizer, info)
            if not state.demand.waiters:
                await text_side.rendering.check()
            return info
        finally:
            await background.stop(weights)

    async def _read_text(self, state: ModelState, directory: Path) -> TextSide:
        """Return the text side, read at the first wake: it is small, and kept while the model sleeps."""
        if state.text is not None:
            return state.text
        if not directory.is_relative_to(EMBEDDED):
            await require_safe_tokenizer(directory, self._timings.tokenizer_cpu_s)
        return await asyncio.to_thread(
            TextSide.from_directory, directory, state.config.tool_format, self._timings.render_cpu_s
        )

    def _check_template_later(self, state: ModelState) -> None:
        if state.text is not None and not state.text.rendering.is_checked:
            check = asyncio.create_task(self._check_template(state, state.text.rendering), name="check template")
            self.checks.add(check)
            check.add_done_callback(self.checks.discard)

    async def _check_template(self, state: ModelState, rendering: Rendering) -> None:
        """Compile the chat template.

        If it is broken the model stays awake and refuses conversations; its status has the reason (`ModelState.flaw`)."""
        await asyncio.sleep(self._timings.template_after_s)
        try:
            await rendering.check()
        except EngineError as error:  # the machine was too busy: the first conversation checks again
            log.warning("model %r: %s", state.config.name, error)
        except ChatTemplateError as error:
            log.error("model %r takes no conversations: %s", state.config.name, error)

    async def _load_weights(self, state: ModelState, replica: Replica, directory: Path) -> ModelInfo:
        config = state.config
        weights_file = self._memory.file_for(state)
        spec = ModelSpec(
            config.name,
            str(directory),
            dtype=config.dtype,
            kv_tokens=config.kv_tokens,
            weights_file=weights_file,
            is_awaited=state.demand.waiters > 0,
            lossless=config.lossless,
            speculate=config.speculate,
            kv_dtype=config.kv_dtype,
        )
        client: EngineClient | None = None
        deaths = 0
        while deaths < DEATHS_WHILE_LOADING:
            state.detail = "waiting for the engine host"
            client = await self._successor(replica, client)
            state.detail, state.loaded_share = "its weights are being loaded", 0.0
            try:
                info = await replica.host.load_model(client, spec, partial(_note_progress, state))
                replica.note_loaded(client)
                return info
            except EngineError as error:
                if error.code != "engine_error":
                    raise
                state.detail = str(error)
                deaths += not (await replica.host.end_of(client)).was_killed
        raise EngineError("model_load_failed", f"the engine host died {DEATHS_WHILE_LOADING} times while loading it")

    async def _successor(self, replica: Replica, client: EngineClient | None) -> EngineClient:
        if client is None:
            return await replica.host.next_client()
        try:
            async with TimeLimit(SUCCESSOR_WAIT_S):
                return await replica.host.next_client(after=client)
        except TimeoutError:
            raise EngineError(
                "model_load_failed", f"{replica.host.reason or 'the engine host cannot load it'}"
            ) from None


def _clock(is_further: bool, is_mapped: bool, was_cut: bool, has_evicted: bool) -> Clock:
    """Return the kind of a wake, which determines the wakes that it is compared with.

    `is_further`: the model is awake on another device. `is_mapped`: its weights were in host memory. `was_cut`: its host had died. `has_evicted`:
    another model made room."""
    if is_further and is_mapped:
        return "sibling"
    if was_cut and not is_further:
        return "crash"
    if has_evicted:
        return "swap"
    return "host" if is_mapped else "disk"


def _note_progress(state: ModelState, progress: LoadProgress) -> None:
    if progress.waits_for:
        state.detail = progress.waits_for
    else:
        _reporter(state, "loaded")(progress.done_bytes, progress.total_bytes)


def _reporter(state: ModelState, verb: str) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        state.detail = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB {verb}"
        state.loaded_share = done / total if total else 0.0

    return report


def _log_conversion(info: ModelInfo) -> None:
    """Log, once for each model, that its weights are converted to another type for computation."""
    if "F16" not in info.stored_dtypes:
        return
    if info.dtype == "bfloat16":
        log.warning(
            "model %s is stored in float16 and computed in bfloat16, which keeps 8 of its weights' 11 significant bits; "
            'dtype = "float32" in the site\'s file keeps all bits, in twice the memory',
            info.name,
        )
    else:
        log.info("model %s is stored in float16 and computed in %s, with the same weights", info.name, info.dtype)


def _limited(info: ModelInfo, config: ModelConfig) -> ModelInfo:
    """Return a model's facts with the context length that the site's file sets.

    Raises EngineError if the model or its KV cache allows less."""
    if config.context_tokens is None:
        return info
    if config.context_tokens > info.context_length:
        there = f"the model and its KV cache allow {info.context_length}"
        raise EngineError("model_load_failed", f"its context_tokens are {config.context_tokens}, and {there}")
    return replace(info, context_length=config.context_tokens)
