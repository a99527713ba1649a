"""The site's models: which there are, where each one is, and how a request gets one that is ready.

A model is loaded at start or by its first request; requests that come meanwhile wait for the same load. When the engine host dies its models
are loaded again on the next one. The module knows a model's text side (tokenizer, template, tool format) and refuses to know HTTP and torch.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.client import EngineClient, EngineError, ProgressCallback
from engine.formats import ToolFormat, tool_format_of
from engine.protocol import ModelInfo, ModelLoad, ModelSpec
from engine.tokenizer import Tokenizer, TokenizerError, read_json
from runtime.engines.hosts import EngineHosts
from runtime.engines.sources import SourceError, directory_of
from sites.config import ModelConfig
from wire.errors import ApiError
from wire.status import ModelStatus, Residency

log = logging.getLogger("pilotlight.models")

RETRY_FAILED_S = 10.0  # a load that failed is tried again by a request after so long
DEATHS_WHILE_LOADING = 3  # hosts that may die under one load before the load is to blame
SUCCESSOR_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the checkpoint's generation_config.json recommends where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns text into a model's tokens and back."""

    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: ToolFormat | None
    defaults: SamplingDefaults

    @classmethod
    def from_directory(cls, directory: Path) -> "TextSide":
        template = ChatTemplate.from_directory(directory)
        defaults = sampling_defaults(read_json(directory / "generation_config.json"))
        return cls(Tokenizer.from_directory(directory), template, tool_format_of(template), defaults)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    config: ModelConfig
    info: ModelInfo
    text: TextSide


@dataclass(slots=True)
class _Slot:
    config: ModelConfig
    loaded: LoadedModel | None = None
    info: ModelInfo | None = None  # of the last load: what the model can do stays true while it sleeps
    failure: ApiError | None = None
    failed_at: float = 0.0
    task: "asyncio.Task[None] | None" = None
    detail: str = ""
    loaded_share: float = 0.0  # of the bytes downloaded or, later, loaded
    wake_ms: float = 0.0
    text: TextSide | None = None
    directory: Path | None = field(default=None)

    @property
    def residency(self) -> Residency:
        if self.loaded is not None:
            return "device"
        if self.task is not None:
            return "loading"
        return "disk" if self.failure is None else "failed"


class Models:
    def __init__(self, configs: tuple[ModelConfig, ...], hosts: EngineHosts) -> None:
        self._hosts = hosts
        self._slots = {config.name: _Slot(config) for config in configs}
        self._names = {name: config.name for config in configs for name in (config.name, *config.aliases)}
        self.created = int(time.time())
        hosts.on_down, hosts.on_up = self._forget, self._remember

    def resolve(self, name: str) -> str | None:
        """A model's own name, from its name or an alias."""
        return self._names.get(name)

    def has_waiting(self, name: str) -> bool:
        """Whether sequences wait for room already."""
        client = self._hosts.client
        load = client.loads.get(self._names.get(name, "")) if client is not None else None
        return load is not None and load.waiting > 0

    def start(self) -> None:
        """Begins to load what is to be on the device from the start."""
        for slot in self._slots.values():
            if slot.config.residency == "device":
                self._begin(slot)

    async def stop(self) -> None:
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ready(self, name: str) -> LoadedModel:
        """Waits for the model, loading it if it sleeps. Raises ApiError when it cannot be loaded."""
        slot = self._slots[name]
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

    def missing(self) -> list[str]:
        """Why the site is not ready: one sentence for each model that should be on the device and is not."""
        return [
            f"model {slot.config.name!r}: {slot.detail or slot.residency}"
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
        return tuple(_status(slot, loads.get(name, ModelLoad())) for name, slot in self._slots.items())

    def _begin(self, slot: _Slot) -> None:
        slot.failure = None
        slot.task = asyncio.create_task(self._load(slot), name=f"load {slot.config.name}")

    def _forget(self, reason: str) -> None:
        """The host is gone, and with it every model it held: those that were awake are wanted again."""
        for slot in self._slots.values():
            if slot.loaded is not None:
                slot.loaded, slot.detail = None, reason
                self._begin(slot)

    def _remember(self) -> None:
        """There is a host again: what could not be loaded for want of one is wanted still."""
        for slot in self._slots.values():
            if slot.failure is not None and slot.failure.word == "overloaded":
                self._begin(slot)

    async def _load(self, slot: _Slot) -> None:
        """Ends with `slot.loaded` or `slot.failure` set; never raises but for cancellation."""
        began = time.monotonic()
        try:
            slot.loaded = await self._load_on_a_host(slot)
            slot.info, slot.detail = slot.loaded.info, ""
            slot.wake_ms = 1e3 * (time.monotonic() - began)
            log.info("model %s is ready after %.0f ms", slot.config.name, slot.wake_ms)
        except (SourceError, TokenizerError, ChatTemplateError) as error:
            self._fail(slot, "model_load_failed", str(error))
        except EngineError as error:
            self._fail(slot, "model_load_failed" if error.code == "engine_error" else error.code, str(error))
        except Exception as error:  # whatever it is, requests must hear of it rather than wait
            log.exception("loading %s", slot.config.name)
            self._fail(slot, "model_load_failed", repr(error))
        finally:
            slot.task = None

    def _fail(self, slot: _Slot, word: str, detail: str) -> None:
        retry_after_s = RETRY_FAILED_S if word == "overloaded" else None
        message = f"model {slot.config.name!r} cannot be used: {detail}"
        slot.failure = ApiError(word, message, retry_after_s=retry_after_s)
        slot.failed_at, slot.detail = time.monotonic(), detail
        log.error("%s", slot.failure.message)

    async def _load_on_a_host(self, slot: _Slot) -> LoadedModel:
        slot.detail = "its files are being fetched"
        slot.directory = await directory_of(slot.config.source, _reporter(slot, "downloaded"))
        # Beside the weights; before them, so that a missing tokenizer is told without reading gigabytes first.
        text = asyncio.create_task(asyncio.to_thread(TextSide.from_directory, slot.directory))
        weights = asyncio.create_task(self._load_weights(slot))
        try:
            await asyncio.wait({text, weights}, return_when=asyncio.FIRST_EXCEPTION)
            slot.text = await text
            info = await weights
            _check_vocabulary(slot.text.tokenizer, info)
            return LoadedModel(slot.config, info, slot.text)
        finally:
            text.cancel()
            weights.cancel()
            await asyncio.gather(text, weights, return_exceptions=True)

    async def _load_weights(self, slot: _Slot) -> ModelInfo:
        config = slot.config
        spec = ModelSpec(config.name, str(slot.directory), config.dtype, config.kv_tokens)
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


def _check_vocabulary(tokenizer: Tokenizer, info: ModelInfo) -> None:
    """An added token without an embedding is common, and refused when a prompt holds it; a whole vocabulary without is another model's."""
    if tokenizer.num_base_tokens > info.vocab_size:
        raise TokenizerError(
            f"its tokenizer.json has {tokenizer.num_base_tokens} tokens and its weights embed {info.vocab_size}; "
            "they belong to different models"
        )


def sampling_defaults(config: dict[str, Any]) -> SamplingDefaults:
    """Only an explicit `do_sample: false` means greedy: many chat checkpoints leave the word out and mean to be sampled."""
    repetition_penalty = float(config.get("repetition_penalty") or 1.0)
    if config.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0, repetition_penalty=repetition_penalty)
    top_k = config.get("top_k")
    return SamplingDefaults(
        temperature=float(config.get("temperature") or 1.0),
        top_p=float(config.get("top_p") or 1.0),
        top_k=int(top_k) if top_k else None,
        min_p=float(config.get("min_p") or 0.0),
        repetition_penalty=repetition_penalty,
    )


def _status(slot: _Slot, load: ModelLoad) -> ModelStatus:
    return ModelStatus(
        name=slot.config.name,
        aliases=slot.config.aliases,
        residency=slot.residency,
        loaded=1.0 if slot.loaded is not None else slot.loaded_share,
        context_length=slot.info.context_length if slot.info is not None else 0,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.waiting_tokens,
        kv_blocks_free=load.free_blocks,
        kv_blocks_total=load.total_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_tokens_per_s=load.decode_tokens_per_s,
        wake_ms=slot.wake_ms,
        detail=slot.detail,
    )


def _reporter(slot: _Slot, verb: str) -> ProgressCallback:
    def report(done: int, total: int) -> None:
        slot.detail = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB {verb}"
        slot.loaded_share = done / total if total else 0.0

    return report
