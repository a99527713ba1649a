"""A fake engine host that computes nothing: the tokens of an answer are a function of the request's seed.

The client of the engine is the product's. The fake has steps, prefill over several steps, a queue, heartbeats and model loads. It can be killed,
crash in a step, be suspended, and refuse sequences and loads. It checks what a site submits: a request has the same prompt at each site that
continues it, and its delivered tokens are a prefix of its answer.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from pilotlight.engine.api.client import EngineClient, EngineError
from pilotlight.engine.api.protocol import (
    VERSION,
    Abort,
    Command,
    ErrorCode,
    Event,
    Hello,
    HostReady,
    LoadModel,
    LoadProgress,
    ModelFailed,
    ModelInfo,
    ModelLoad,
    ModelReady,
    ModelUnloaded,
    StepOutput,
    Submit,
    TokenOutput,
    UnloadModel,
)
from pilotlight.engine.api.step_journal import NOTHING_HELD, HeldSequences
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from tests.simulation.virtual_network import Network
from tests.simulation.virtual_time import Process

CONTEXT, BLOCK, BLOCKS = 1152, 16, 144
# Steps and the links of world.py are slow: an answer has few tokens, and as many are under way when a link or a site is lost.
STEP_S = 0.16
CHUNK = 96  # prompt tokens per step
HEARTBEAT_S = 0.5
BOOT_S, LOAD_S = 0.4, 0.3
WAY_S = 0.0005  # latency of a frame between a site and its engine host
MOST_RUNNING, MOST_WAITING = 8, 64


class Answers:
    """The answers to all requests by their sampling seed, and the prompts that were submitted with each seed."""

    def __init__(self, tokenizer: Tokenizer, eos: int, vocab_size: int) -> None:
        self.tokenizer, self.eos, self.vocab_size = tokenizer, eos, vocab_size
        self.broken: list[str] = []  # sentences about wrong submissions
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._words = _words(tokenizer)

    def tokens(self, seed: int) -> tuple[int, ...]:
        chance = random.Random(seed)
        return (*chance.choices(self._words, k=chance.randrange(2, 46)), self.eos)

    def text(self, seed: int) -> str:
        return "".join(map(self.tokenizer.token_text, self.tokens(seed)[:-1]))

    def rest(self, submit: Submit, host: str) -> tuple[int, ...]:
        """Return the tokens of the answer that are not delivered yet; record an error if prompt or delivered tokens are wrong."""
        delivered = submit.num_delivered_tokens
        prompt, before = submit.prompt_token_ids[: -delivered or None], submit.prompt_token_ids[-delivered:]
        seed = submit.sampling.seed
        tokens = self.tokens(seed)
        if self._prompts.setdefault(seed, prompt) != prompt:
            self.broken.append(f"{host} got another prompt for the answer {seed}")
        if delivered and before != tokens[:delivered]:
            self.broken.append(
                f"{host} was to continue the answer {seed} after {delivered} tokens that it does not have"
            )
        return tokens[delivered:]


@cache
def _words(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that are a space and a word of ASCII letters."""
    texts = ((token, tokenizer.token_text(token)) for token in range(tokenizer.num_base_tokens))
    return tuple(token for token, text in texts if text[:1] == " " and text[1:].isalpha() and text.isascii())


class _Client(EngineClient):
    """The product's client of an engine host, whose frames pass through the event loop instead of a socket."""

    def __init__(self, host: "EngineDouble") -> None:
        super().__init__(Hello(VERSION))
        self._host = host

    def receive(self, event: Event) -> None:
        self._handle(event)

    async def close(self) -> None:
        self.fail("the client was closed")

    def _connect(self) -> None:
        """Do nothing: frames need no connection."""

    def send(self, command: Command) -> None:
        if self.death is None:
            self._host.send(command)


@dataclass(eq=False)
class _Sequence:
    submit: Submit
    rest: tuple[int, ...]
    prompt_left: int
    made: int = field(default=0)


class EngineDouble:
    """A fake of the process of one engine host."""

    pid: int | None = 4242
    url: str | None = None
    peer_address: str | None = None

    def __init__(self, network: Network, name: str, site: Process, answers: Answers) -> None:
        self.process = Process(name, site.host)
        self.client = _Client(self)
        self.refuses: ErrorCode | None = None  # the error for new sequences, if any
        self.fails_loads = False
        self.has_crashed = self.ended_by_itself = self.was_killed = False
        self._network, self._site, self._answers = network, site, answers
        self._models: dict[str, ModelInfo] = {}
        self._open: dict[str, _Sequence] = {}
        self._journal = NOTHING_HELD
        self._step = 0
        self._has_step = False
        self._exit: asyncio.Future[str] = network.create_future()
        self._later(HEARTBEAT_S, self._beat)

    # The interface of an engine host.

    async def exited(self) -> str:
        return await asyncio.shield(self._exit)

    def held(self) -> HeldSequences:
        return self._journal

    async def stop(self, grace_s: float) -> None:
        self.end("it was stopped")

    # The functions below are called by faults.

    @property
    def is_suspended(self) -> bool:
        return self.process.state == "suspended"

    @property
    def is_alive(self) -> bool:
        return self.process.state != "dead"

    @property
    def num_open(self) -> int:
        return len(self._open)

    def end(self, how: str) -> None:
        """End the process; its socket closes with it."""
        if not self.is_alive:
            return
        self._network.kill(self.process)

        def notice() -> None:
            self.client.fail("the engine host went away")
            if not self._exit.done():
                self._exit.set_result(how)

        self._network.call_later(WAY_S, notice, context=self._site.context.copy())

    def kill(self) -> None:
        """End by a signal from outside."""
        self.was_killed = True
        self.end("the engine host was ended by SIGKILL")

    def crash(self) -> None:
        """Crash in a step that contains all open sequences."""
        if self.is_alive:
            self.ended_by_itself = self.has_crashed = True
            self._journal = HeldSequences(tuple(self._open))
            self.end("the engine host was ended by SIGSEGV")

    # The functions below simulate the host.

    def send(self, command: Command) -> None:
        """Receive a command of the site, after the latency of a frame."""
        if self.is_alive:
            self._later(WAY_S, lambda: self._obey(command))

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            if self.is_alive:
                work()

        self._network.call_later(seconds, run, context=self.process.context.copy())

    def _tell(self, event: Event) -> None:
        self._network.call_later(WAY_S, self.client.receive, event, context=self._site.context.copy())

    def _obey(self, command: Command) -> None:
        match command:
            case Hello():
                self._later(BOOT_S, lambda: self._tell(HostReady(VERSION, (("import", BOOT_S),))))
            case LoadModel(spec):
                self._tell(LoadProgress(spec.name, 1, 2))
                self._later(LOAD_S, lambda: self._load(spec.name))
            case UnloadModel(name):
                self._models.pop(name, None)
                self._tell(ModelUnloaded(name))
            case Submit():
                self._submit(command)
            case Abort(sequence_id):
                self._open.pop(sequence_id, None)
            case _:
                pass  # this host prepares no models and needs no lease

    def _load(self, name: str) -> None:
        if self.fails_loads:
            return self._tell(ModelFailed(name, "model_load_failed", "there is no memory for its weights"))
        eos, vocab_size = self._answers.eos, self._answers.vocab_size
        info = ModelInfo(name, CONTEXT, vocab_size, (eos,), "float32", BLOCK, BLOCKS, 1_000_000, LOAD_S)
        self._models[name] = info
        self._tell(ModelReady(info))

    def _submit(self, submit: Submit) -> None:
        if self.refuses is not None:
            return self._refuse(submit, self.refuses, "the engine's queue is full")
        if submit.model not in self._models:
            return self._refuse(submit, "model_not_found", f"no model {submit.model!r}")
        if len(self._open) >= MOST_RUNNING + MOST_WAITING:
            return self._refuse(submit, "overloaded", "the engine's queue is full")
        rest = self._answers.rest(submit, self.process.name)
        self._open[submit.sequence_id] = _Sequence(submit, rest, len(submit.prompt_token_ids))
        self._begin_step()

    def _refuse(self, submit: Submit, code: ErrorCode, message: str) -> None:
        error = TokenOutput(submit.sequence_id, finish_reason="error", error_code=code, error_message=message)
        self._tell(StepOutput(self._step, (error,), self._loads()))

    def _begin_step(self) -> None:
        if self._open and not self._has_step:
            self._has_step = True
            self._later(STEP_S, self._end_step)

    def _end_step(self) -> None:
        self._step += 1
        self._has_step = False
        outputs = [output for each in list(self._open.values())[:MOST_RUNNING] for output in self._advance(each)]
        self._tell(StepOutput(self._step, tuple(outputs), self._loads(), 1.0, 1e3 * STEP_S))
        self._begin_step()

    def _advance(self, sequence: _Sequence) -> list[TokenOutput]:
        if sequence.prompt_left > CHUNK:
            sequence.prompt_left -= CHUNK
            return []
        submit = sequence.submit
        token = sequence.rest[sequence.made]
        sequence.made += 1
        is_last = sequence.made == len(sequence.rest)
        if is_last:
            del self._open[submit.sequence_id]
        cached = 0 if sequence.made == 1 else None
        sequence.prompt_left = 0
        return [TokenOutput(submit.sequence_id, (token,), "stop" if is_last else None, cached)]

    def _beat(self) -> None:
        if not self._has_step:
            self._tell(StepOutput(self._step, (), self._loads()))
        self._later(HEARTBEAT_S, self._beat)

    def _loads(self) -> dict[str, ModelLoad]:
        waiting = [each for each in self._open.values() if each.prompt_left]
        load = ModelLoad(
            running=len(self._open) - len(waiting),
            waiting=len(waiting),
            waiting_tokens=sum(each.prompt_left for each in waiting),
            free_blocks=BLOCKS,
            total_blocks=BLOCKS,
            prefill_tokens_per_s=CHUNK / STEP_S,
            decode_tokens_per_s=1 / STEP_S,
        )
        return dict.fromkeys(self._models, load)


class DoubleLauncher:
    """A launcher of the fake engine hosts of one device of a site."""

    def __init__(self, network: Network, site: Process, device: int, answers: Answers) -> None:
        self.hosts: list[EngineDouble] = []
        self.refuses: ErrorCode | None = None  # also for hosts launched later
        self.fails_loads = False
        self._network, self._site, self._device, self._answers = network, site, device, answers

    async def launch(self, *, standby: bool = False, afresh: bool = False) -> EngineDouble:
        if self._site.state == "dead":
            raise EngineError("engine_error", "the site has been killed")
        name = f"{self._site.name}'s engine host {len(self.hosts)} of device {self._device}"
        host = EngineDouble(self._network, name, self._site, self._answers)
        host.refuses, host.fails_loads = self.refuses, self.fails_loads
        self.hosts.append(host)
        await asyncio.sleep(WAY_S)
        return host

    @property
    def living(self) -> list[EngineDouble]:
        return [host for host in self.hosts if host.is_alive]

    def have_no_room(self, code: ErrorCode | None, *, fails_loads: bool) -> None:
        """Let present and later hosts refuse new sequences with `code` (None accepts them), and fail loads if `fails_loads`."""
        self.refuses, self.fails_loads = code, fails_loads
        for host in self.living:
            host.refuses, host.fails_loads = code, fails_loads

    def close(self) -> None:
        """Do nothing: there is nothing to remove."""
