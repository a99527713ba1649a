"""One request's generation as a scope: permit, model, tokens, sequence, deadline.

`generate` reads as the life of a request behind validation. Leaving it, for whatever reason, aborts the sequence and gives the permit back
(I2, I6); everything that goes wrong inside comes out as an ApiError (I1). Refuses to know HTTP and dialects.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from engine.chat_template import ChatTemplateError
from engine.client import EngineError
from engine.formats import ToolParser
from engine.protocol import SamplingParams, Submit, TokenOutput
from engine.tokenizer import TokenizerError
from runtime.accounts import Tenant
from runtime.admission import RETRY_AFTER_S, Admission
from runtime.engines.hosts import EngineHosts
from runtime.engines.models import LoadedModel, Models
from runtime.metrics import Metrics
from runtime.streaming import Assembler, Piece
from runtime.validation import Conversation, Sampling, ValidGeneration
from wire.chat import Usage
from wire.errors import ApiError


class Generator:
    """What generating needs: held once per site."""

    def __init__(
        self, models: Models, hosts: EngineHosts, admission: Admission, metrics: Metrics, request_timeout_s: float
    ) -> None:
        self.models = models
        self.hosts = hosts
        self.admission = admission
        self.metrics = metrics
        self._request_timeout_s = request_timeout_s

    @asynccontextmanager
    async def generate(self, request: ValidGeneration, tenant: Tenant) -> AsyncIterator["Generation"]:
        try:
            with self.metrics.request(request.model) as measure, self.admission.permit() as permit:
                async with asyncio.timeout(self._request_timeout_s):
                    model = await self.models.ready(request.model)
                    prompt = await encode(model, request)
                    params = sampling_params(model, request.sampling, len(prompt))
                    permit.reserve(request.model, len(prompt), params.max_tokens, model.kv_tokens)
                    submit = Submit(uuid.uuid4().hex, request.model, prompt, params, tenant.salt)
                    async with self.hosts.generate(submit) as outputs, _pumping(outputs) as pump:
                        generation = Generation(len(prompt), assembler_for(model, request), pump)
                        measure.follow(generation)
                        yield generation
                        permit.settle(generation.assembler.completion_tokens)
        except TimeoutError:
            message = f"the answer was not complete after {self._request_timeout_s:g} s; ask for fewer tokens"
            raise ApiError("request_timeout", message) from None
        except EngineError as error:
            retry_after_s = RETRY_AFTER_S if error.code == "overloaded" else None
            raise ApiError(error.code, str(error), retry_after_s=retry_after_s) from None
        except (ChatTemplateError, TokenizerError) as error:
            raise ApiError("invalid_request", str(error)) from None


class Generation:
    """An answer under way."""

    def __init__(self, prompt_tokens: int, assembler: Assembler, pump: "_Pump") -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.assembler = assembler
        self.on_piece: Callable[[], None] = lambda: None
        self._pump = pump

    @property
    def usage(self) -> Usage:
        return Usage.of(self.prompt_tokens, self.assembler.completion_tokens, self.cached_tokens)

    async def pieces(self) -> AsyncIterator[Piece]:
        """All that is ready at a time as one piece. Ends after the piece with a finish reason."""
        while self.assembler.finish_reason is None:
            for output in await self._pump.take():
                if output.num_cached_tokens is not None:
                    self.cached_tokens = output.num_cached_tokens
                if output.finish_reason == "abort":
                    raise ApiError("aborted", "the engine was told to end this answer")
                self.assembler.push(output)
            if (piece := self.assembler.take()) is not None:
                self.on_piece()
                yield piece

    async def whole(self) -> Piece:
        pieces = [piece async for piece in self.pieces()]
        return Piece(
            tuple(part for piece in pieces for part in piece.parts),
            tuple(token for piece in pieces for token in piece.tokens),
            pieces[-1].finish_reason,
        )


async def encode(model: LoadedModel, request: ValidGeneration) -> tuple[int, ...]:
    """The prompt's token ids, which fit the model's context with room for at least one more."""
    prompt = request.prompt
    if isinstance(prompt, Conversation):
        messages, tools = model.text.tokenizer.shield((prompt.messages, prompt.tools))
        text = model.text.template.render(messages, tools or None)
        token_ids = await model.text.tokenizer.encode_prompt(text, is_rendered=True)
    elif isinstance(prompt, str):
        token_ids = await model.text.tokenizer.encode_prompt(prompt, is_rendered=False)
    else:
        token_ids = prompt
    if not token_ids:
        raise ApiError("invalid_request", "the prompt is empty; send at least one token", param="prompt")
    limit = model.info.context_length
    if len(token_ids) >= limit:
        message = (
            f"the prompt has {len(token_ids)} tokens and {request.model!r} takes {limit} with the answer; shorten it"
        )
        raise ApiError(
            "context_length_exceeded", message, param="messages" if isinstance(prompt, Conversation) else "prompt"
        )
    return token_ids


def sampling_params(model: LoadedModel, sampling: Sampling, prompt_tokens: int) -> SamplingParams:
    """The request's wishes, the checkpoint's recommendations where it has none, and never more tokens than the context leaves."""
    defaults = model.text.defaults
    room = model.info.context_length - prompt_tokens
    top_k = defaults.top_k if sampling.top_k is None else sampling.top_k
    return SamplingParams(
        max_tokens=min(room, sampling.max_tokens or model.config.default_max_tokens or room),
        temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
        min_p=defaults.min_p if sampling.min_p is None else sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=(
            defaults.repetition_penalty if sampling.repetition_penalty is None else sampling.repetition_penalty
        ),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        num_logprobs=sampling.num_logprobs,
    )


def assembler_for(model: LoadedModel, request: ValidGeneration) -> Assembler:
    prompt = request.prompt
    parser: ToolParser | None = None
    if isinstance(prompt, Conversation) and prompt.tools and model.text.tool_format is not None:
        parser = model.text.tool_format.parser()
    return Assembler(
        model.text.tokenizer.detokenizer(),
        stop=request.sampling.stop,
        hidden_token_ids=frozenset((*model.info.eos_token_ids, *request.sampling.stop_token_ids)),
        parser=parser,
        one_call_only=isinstance(prompt, Conversation) and not prompt.parallel_tool_calls,
    )


class _Pump:
    """Collects outputs while the last ones are being sent, so that a slow reader costs fewer, larger events."""

    def __init__(self, outputs: AsyncIterator[TokenOutput]) -> None:
        self._outputs = outputs
        self._ready: deque[TokenOutput] = deque()
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._is_done = False

    async def run(self) -> None:
        try:
            async for output in self._outputs:
                self._ready.append(output)
                self._news.set()
        except EngineError as error:
            self._error = error
        finally:
            self._is_done = True
            self._news.set()

    async def take(self) -> list[TokenOutput]:
        """At least one output. Raises the engine's error once everything before it has been taken."""
        await self._news.wait()
        if not self._ready:
            raise self._error or EngineError("engine_error", "the engine ended the answer without a finish reason")
        taken = list(self._ready)
        self._ready.clear()
        if not self._is_done:
            self._news.clear()
        return taken


@asynccontextmanager
async def _pumping(outputs: AsyncIterator[TokenOutput]) -> AsyncIterator[_Pump]:
    pump = _Pump(outputs)
    task = asyncio.create_task(pump.run(), name="pump")
    try:
        yield pump
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
