"""Fakes of an engine: a client that plays scripts, a launcher of hosts that die on command, and a model directory with a tiny tokenizer.

The fake client has the guarantees of pilotlight.engine.api.client.EngineClient: scopes, aborts, errors and the end of open calls when a host dies.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pilotlight.engine.api.client import EngineError, ProgressCallback
from pilotlight.engine.api.protocol import (
    VERSION,
    Activation,
    HostReady,
    LoadProgress,
    ModelInfo,
    ModelLoad,
    ModelSpec,
    Pooling,
    StepOutput,
    Submit,
    TokenLogprobs,
    TokenOutput,
)
from pilotlight.engine.api.step_journal import NOTHING_HELD, HeldSequences

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>")
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

Step = TokenOutput | float | asyncio.Event | Exception | Callable[[], Awaitable[None]]


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, ordered by the bytes' printable forms; the special tokens and the tags follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return tokenizer


def write_model_directory(directory: Path, *, template: str | None = CHATML, **generation: Any) -> Path:
    """Write the text side of a checkpoint; the fake engine needs no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": SPECIAL[2], "pad_token": {"content": SPECIAL[0]}}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "config.json").write_text("{}")
    return directory


TOKENIZER = byte_tokenizer()
EOS: int = TOKENIZER.token_to_id("<|im_end|>")


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def says(
    text: str, *, finish: str | None = "stop", cached: int = 0, per_step: int = 1, logprobs: bool = False
) -> list[Step]:
    """Return the outputs of an engine that samples `text`, then the end token if `finish` is "stop"."""
    token_ids = ids(text) + ((EOS,) if finish == "stop" else ())
    groups = [token_ids[i : i + per_step] for i in range(0, len(token_ids), per_step)] or [()]
    outputs: list[Step] = []
    for position, group in enumerate(groups):
        is_last = position == len(groups) - 1
        outputs.append(
            TokenOutput(
                "",
                group,
                finish_reason=finish if is_last else None,
                num_cached_tokens=cached if position == 0 else None,
                logprobs=tuple(TokenLogprobs(-0.5, ((t, -0.5), (0, -1.5))) for t in group) if logprobs else None,
            )
        )
    return outputs


class FakeEngineClient:
    """A client that plays `script` for every submitted sequence: outputs to send, seconds to pause, events to wait for, exceptions to raise. The
    scripts in `scripts` come first, each for one sequence. `answer`, if given, makes every script from the submitted sequence.
    """

    def __init__(self) -> None:
        self.script: Iterable[Step] = says("Hello, world")
        self.scripts: list[Iterable[Step]] = []
        self.answer: Callable[[Submit], Iterable[Step]] | None = None
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()
        self.loaded: list[str] = []
        self.specs: dict[str, ModelSpec] = {}
        self.load_gate: asyncio.Event | None = None
        self.load_error: EngineError | None = None
        self.context_length = 512
        self.vocab_size = 261
        self.hello_gate: asyncio.Event | None = None
        self.pooling: Pooling | None = None
        self.text_prompt = ""
        self.prompts: tuple[tuple[str, str], ...] = ()
        self.labels: tuple[str, ...] = ()
        self.activation: Activation = "none"
        self.answers_by_token = False
        self.image_token_id: int | None = None
        self.embedding_size = 0
        self.loads: dict[str, ModelLoad] = {}
        self.last_event_at = time.monotonic()
        self._callbacks: list[Callable[[StepOutput], None]] = []
        self._death: str | None = None
        self.failed_under: tuple[str, ...] = ()
        self._dying = asyncio.Event()
        self.num_steps = 0
        self.prewarmed: list[ModelSpec] = []

    def on_step(self, callback: Callable[[StepOutput], None]) -> None:
        self._callbacks.append(callback)

    async def hello(self) -> HostReady:
        self._check()
        if self.hello_gate is not None:
            await self._or_death(self.hello_gate.wait())
        return HostReady(VERSION, (("import", 0.5),))

    async def load_model(self, spec: ModelSpec, on_progress: ProgressCallback | None = None) -> ModelInfo:
        self._check()
        if on_progress is not None:
            on_progress(LoadProgress(spec.name, 1_000_000, 2_000_000))
        if self.load_gate is not None:
            await self._or_death(self.load_gate.wait())
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append(spec.name)
        self.specs[spec.name] = spec
        self.loads[spec.name] = ModelLoad(free_blocks=60, total_blocks=64)
        self.heartbeat()
        kind = {
            "pooling": self.pooling,
            "text_prompt": self.text_prompt,
            "prompts": self.prompts,
            "labels": self.labels,
            "activation": self.activation,
            "answers_by_token": self.answers_by_token,
            "embedding_size": self.embedding_size,
            "image_token_id": self.image_token_id,
        }
        return ModelInfo(
            spec.name,
            self.context_length,
            self.vocab_size,
            (EOS,),
            "float32",
            16,
            64,
            1000,
            0.1,
            **kind,
        )

    def prewarm_model(self, spec: ModelSpec) -> None:
        self.prewarmed.append(spec)

    async def unload_model(self, name: str) -> None:
        self._check()
        if name in self.loaded:
            self.loaded.remove(name)

    @asynccontextmanager
    async def generate(self, submit: Submit) -> AsyncIterator[AsyncIterator[TokenOutput]]:
        self._check()
        self.submits.append(submit)
        self.open.add(submit.sequence_id)
        script = self._script_of(submit)
        is_finished = False

        async def outputs() -> AsyncIterator[TokenOutput]:
            nonlocal is_finished
            for step in script:
                self._check()
                if isinstance(step, TokenOutput):
                    self.step(step)
                    is_finished = step.finish_reason is not None
                    yield step
                elif isinstance(step, Exception):
                    is_finished = True
                    raise step
                else:
                    await self._or_death(_wait_for(step))

        try:
            yield outputs()
        finally:
            self.open.discard(submit.sequence_id)
            if not is_finished:
                self.aborted.append(submit.sequence_id)

    def _script_of(self, submit: Submit) -> Iterable[Step]:
        if self.answer is not None:
            return self.answer(submit)
        return self.scripts.pop(0) if self.scripts else self.script

    def step(self, *outputs: TokenOutput) -> None:
        self.num_steps += 1
        self.publish(StepOutput(self.num_steps, outputs, self.loads, 0.2, 1.0))

    def heartbeat(self) -> None:
        self.publish(StepOutput(self.num_steps, (), self.loads))

    @property
    def death(self) -> str | None:
        return self._death

    def fail(self, message: str) -> None:
        self._death = self._death or message
        self._dying.set()

    async def close(self) -> None:
        self.fail("the client was closed")

    def publish(self, step: StepOutput) -> None:
        self.last_event_at = time.monotonic()
        for callback in self._callbacks:
            callback(step)

    def _check(self) -> None:
        if self._death is not None:
            raise EngineError("engine_error", self._death)

    async def _or_death(self, waiting: Any) -> None:
        wait = asyncio.ensure_future(waiting)
        death = asyncio.ensure_future(self._dying.wait())
        try:
            await asyncio.wait({wait, death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wait.cancel()
            death.cancel()
            await asyncio.gather(wait, death, return_exceptions=True)
        self._check()


async def _wait_for(step: Any) -> None:
    if isinstance(step, float | int):
        await asyncio.sleep(step)
    elif isinstance(step, asyncio.Event):
        await step.wait()
    else:
        await step()


class FakeHost:
    def __init__(self, client: FakeEngineClient) -> None:
        self.client = client
        self.pid = 4242
        self.url = "inproc://fake"
        self.peer_address: str | None = None
        self.is_stopped = False
        self.has_crashed = False
        self.ended_by_itself = False
        self.was_killed = False
        self.is_suspended = False
        self.journal = NOTHING_HELD
        self._exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, how: str = "the engine host (pid 4242) was ended by SIGKILL") -> None:
        """End the process; its socket closes with it."""
        self.client.fail(how)
        if not self._exit.done():
            self._exit.set_result(how)

    async def exited(self) -> str:
        return await asyncio.shield(self._exit)

    def kill(self, how: str = "the engine host (pid 4242) was ended by SIGKILL") -> None:
        """End the process by a signal from outside."""
        self.was_killed = True
        self.die(how)

    def crash(self, how: str = "the engine host (pid 4242) was ended by SIGSEGV") -> None:
        """End the process by a crash, in a step that contained all its open sequences."""
        self.ended_by_itself = True
        self.journal = HeldSequences(tuple(self.client.open))
        self.die(how)

    def held(self) -> HeldSequences:
        return self.journal

    async def stop(self, grace_s: float) -> None:
        self.is_stopped = True
        self.die("it was stopped")


class FakeLauncher:
    """A launcher that makes a host with a new client each time; `prepare` may change the client before its first use."""

    def __init__(self, prepare: Callable[[FakeEngineClient], None] = lambda client: None) -> None:
        self.hosts: list[FakeHost] = []  # hosts launched to serve
        self.standbys: list[FakeHost] = []
        self.prepare = prepare
        self.failures: list[Exception] = []  # raised by the next launches
        self.client_class = FakeEngineClient
        self.launched_afresh: list[bool] = []
        self.peer_address: str | None = None

    async def launch(self, *, standby: bool = False, afresh: bool = False) -> FakeHost:
        self.launched_afresh.append(afresh)
        if self.failures:
            raise self.failures.pop(0)
        client = self.client_class()
        self.prepare(client)
        host = FakeHost(client)
        host.peer_address = self.peer_address
        (self.standbys if standby else self.hosts).append(host)
        return host

    def close(self) -> None:
        assert all(host.is_stopped for host in (*self.hosts[-1:], *self.standbys[-1:]))

    @property
    def client(self) -> FakeEngineClient:
        return self.hosts[-1].client
