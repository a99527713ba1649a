"""One request's generation as a scope: permit, model, tokens, sequences, deadline.

`generate` has the steps of a request after validation, in order. Leaving its scope, for any reason, aborts the sequences and returns the permit.
All expected errors inside are raised as ApiError. Independent of HTTP and dialects.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field

from msgspec.structs import replace

from pilotlight.dialects.requests import Conversation, Insertion, ValidGeneration
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.errors import TokenizerError
from pilotlight.engine.api.protocol import (
    AdapterSource,
    Constraint,
    SamplingParams,
    Submit,
    TokenLogprobs,
    TokenOutput,
)
from pilotlight.engine.grammar.grammar_check import GrammarVocabulary
from pilotlight.engine.text.chat_template import ChatTemplateError
from pilotlight.engine.text.formats import Part
from pilotlight.runtime.dispatch.continuation import Continuations
from pilotlight.runtime.generation.admission import RETRY_AFTER_S, Admission
from pilotlight.runtime.generation.answer_form import AnswerForm, CheckGrammar
from pilotlight.runtime.generation.grammar_checks import GrammarChecks
from pilotlight.runtime.generation.images import ImageReader
from pilotlight.runtime.generation.output_processor import Delta, DivergedError, OutputProcessor, joined
from pilotlight.runtime.generation.prompts import EncodedPrompt, encode, fill_in_of
from pilotlight.runtime.generation.resumption import Submits, resumed
from pilotlight.runtime.generation.usage_counter import UsageCounter
from pilotlight.runtime.models.model_state import AwakeModel
from pilotlight.runtime.models.registry import Models
from pilotlight.runtime.telemetry.metrics import Measure, RequestMetrics
from pilotlight.runtime.telemetry.recent_generations import GenerationClock, RecentGenerations
from pilotlight.runtime.telemetry.tracing import SiteTracing
from pilotlight.runtime.telemetry.traffic import Traffic
from pilotlight.support import background
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.chat import FinishReason, Usage
from pilotlight.wire.credentials import Tenant, salted
from pilotlight.wire.errors import ApiError

EMPTY_DELTA = Delta((), (), None)


@dataclass(eq=False)
class Generator:
    """Generates answers, with the parts of a site."""

    models: Models
    engine: Continuations
    admission: Admission
    metrics: RequestMetrics
    traffic: Traffic
    request_timeout_s: float
    images: ImageReader
    grammars: GrammarChecks
    tracing: SiteTracing | None  # None if no collector is configured
    held_back_s: float  # interval of empty deltas
    recent: RecentGenerations = field(default_factory=RecentGenerations)

    @asynccontextmanager
    async def generate(self, request: ValidGeneration, tenant: Tenant) -> AsyncIterator["Generation"]:
        with (
            self.recent.timed(request.model) as clock,
            nullcontext() if self.tracing is None else self.tracing.generation(request, clock),
            as_api_errors(self.request_timeout_s),
            self.metrics.measure(request.model) as measure,
            self.admission.permit() as permit,
        ):
            if isinstance(request.prompt, Conversation):
                self.models.expect_conversation(request.model)
            names_adapter = request.lora or request.requested_model != request.model
            adapter = await self.models.adapters.of(request, tenant.owner) if names_adapter else None
            async with TimeLimit(self.request_timeout_s), self.models.use(request.model) as model:
                clock.awake()
                refuse_embedder(model, request)
                if request.sampling.stop or isinstance(request.prompt, Insertion):
                    request = _with_end_tokens(model, request)
                prompts = [await encode(model, request, prompt, self.images) for prompt in request.prompts]
                params = [sampling_params(model, request, len(prompt.token_ids)) for prompt in prompts]
                demand = self.models.states[request.model].demand
                # Most answers are shorter than twice the average, and few reach their own limit.
                output = min(max(each.max_tokens for each in params), round(2 * demand.answer_tokens))
                tokens = sum(len(prompt.token_ids) for prompt in prompts) + request.num_choices * output
                permit.reserve(request.model, tokens, self.models.registry.kv_tokens(model))
                answer = AnswerForm(model, request, prompts[0].token_ids)
                constraint = await answer.constraint(self._check_of(model, tenant))
                submits, processors = await as_submits(request, prompts, params, tenant, adapter, answer, constraint)
                generation = Generation(request, prompts, processors, measure, answer.left_out, self.held_back_s)
                async with generation.running(self.engine, submits):
                    measure.answer = generation
                    clock.submitted()
                    self.traffic.arrived(request.model)
                    try:
                        yield generation
                    finally:
                        self._note_traffic(request, model, generation)
                        generation.tell(clock)
                    if not request.wants_prompt_only:
                        demand.answered(generation.usage.completion_tokens // request.num_choices)

    def _check_of(self, model: AwakeModel, tenant: Tenant) -> CheckGrammar:
        info = model.info
        vocabulary = GrammarVocabulary(model.text.directory, info.vocab_size, info.eos_token_ids)
        return lambda constraint: self.grammars.refusal(vocabulary, constraint, tenant.owner)

    def _note_traffic(self, request: ValidGeneration, model: AwakeModel, generation: "Generation") -> None:
        if generation.usage.completion_tokens:  # without output the prompt may not have been computed
            kv_tokens, counter = self.models.registry.kv_tokens(model), generation.counter
            self.traffic.computed(
                request.model, counter.prompt_tokens, counter.cached_tokens, request.prefixes, kv_tokens
            )


def _with_end_tokens(model: AwakeModel, request: ValidGeneration) -> ValidGeneration:
    """Return a request with the tokens that end its answers, besides the model's own. Raises ApiError.

    A stop string that is a special token, such as `<|endoftext|>`, never occurs in text. An insertion also ends at the model's tokens for that.
    """
    sampling = request.sampling
    tokenizer = model.text.tokenizer
    stops = map(tokenizer.added_token_id, sampling.stop)
    ends = [*sampling.stop_token_ids, *(each for each in stops if each is not None and tokenizer.is_special(each))]
    if isinstance(request.prompt, Insertion):
        ends += fill_in_of(model, request).end_token_ids
    return replace(request, sampling=replace(sampling, stop_token_ids=tuple(ends)))


@contextmanager
def as_api_errors(request_timeout_s: float) -> Iterator[None]:
    """Convert the errors that can follow validation to ApiError."""
    try:
        yield
    except TimeoutError:
        message = f"the answer was not complete after {request_timeout_s:g} s; request fewer tokens"
        raise ApiError("request_timeout", message) from None
    except EngineError as error:
        retry_after_s = RETRY_AFTER_S if error.code == "overloaded" else None
        raise ApiError(error.code, str(error), retry_after_s=retry_after_s) from None
    except DivergedError as error:
        raise ApiError("engine_error", f"the answer cannot be continued at this site: {error}") from None
    except (ChatTemplateError, TokenizerError) as error:
        raise ApiError("invalid_request", str(error)) from None


class Generation:
    """An answer in progress, with one or several choices for each of its prompts.

    Outputs accumulate while earlier outputs are sent, so a slow client gets fewer, larger events."""

    def __init__(
        self,
        request: ValidGeneration,
        prompts: list[EncodedPrompt],
        processors: list[OutputProcessor],
        measure: Measure,
        left_out: tuple[str, ...],
        held_back_s: float,
    ) -> None:
        """`processors` has one entry per choice.
        `left_out` names fields of the request that are not enforced on the answer."""
        self.left_out = left_out
        self.counter = UsageCounter(prompts, processors, request.delivery)
        self.first_output_ns = 0  # time of the first output, in ns of Unix time
        self._queue_us = 0  # time that the first sequence has waited in the engine
        self.route = ""  # the hosts of the first sequence, if there was a choice
        self._prompts = [_AnsweredPrompt(prompt.token_ids) for prompt in prompts]
        self._choices = [
            _OpenChoice(number, self._prompts[number // request.n], processor)
            for number, processor in enumerate(processors)
        ]
        self._ends_with_prompt = request.wants_prompt_only  # each choice ends at its first token, without text
        self._measure = measure
        self._held_back_s = held_back_s
        self._touched: dict[_OpenChoice, None] = {}  # choices with new outputs, in order of arrival
        self._error: Exception | None = None  # first error of any sequence
        self._news = asyncio.Event()

    @asynccontextmanager
    async def running(self, engine: Continuations, submits: Submits) -> AsyncIterator[None]:
        """Open the choices' sequences and collect their outputs; leaving the scope aborts unfinished ones."""
        async with AsyncExitStack() as sequences:
            for number, submit in submits.items():
                choice = self._choices[number]
                sequences.push_async_exit(choice.sequence)
                choice.prompt.awaits_logprobs |= submit.sampling.prompt_logprobs
                outputs = await choice.sequence.enter_async_context(engine.generate(submit))
                self.route = self.route or outputs.route
                collecting = asyncio.create_task(self._collect(choice, outputs), name="outputs")
                choice.sequence.push_async_callback(background.stop, collecting)
            yield

    @property
    def usage(self) -> Usage:
        return self.counter.usage()

    @property
    def delivered_tokens(self) -> int:
        return self.counter.delivered_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the first choice; None if none has."""
        return self._choices[0].processor.stop_string

    def shown_before(self, choice: int) -> tuple[Part, ...]:
        """Return the part of a choice that another site has delivered."""
        return self._choices[choice].processor.shown_before

    def prompt(self, choice: int = 0) -> tuple[int, ...]:
        """Return the token ids of a choice's prompt."""
        return self._choices[choice].prompt.token_ids

    def prompt_logprobs(self, choice: int) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of the prompt's tokens after the first.
        They are complete before the first delta."""
        return self._choices[choice].prompt.logprobs

    @property
    def is_finished(self) -> bool:
        """True once the last delta of every choice has been taken."""
        return all(choice.processor.is_taken for choice in self._choices)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason of the first choice, once all choices have finished."""
        return self._choices[0].processor.finish_reason if self.is_finished else None

    def tell(self, clock: GenerationClock) -> None:
        """Write the usage and times so far into a clock."""
        clock.computed(
            self.counter.resource_use(),
            self.finish_reason,
            first_output_ns=self.first_output_ns,
            queue_us=self._queue_us,
        )

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the new output of one choice at a time as a delta.

        A choice's last delta has its finish reason. Raises the first error of any sequence once all earlier output has been taken. While all tokens
        are held back, such as those of a tool call, an empty delta is yielded once a second, so that routers do not take the stream for stalled."""
        shown_at = time.monotonic()
        while not self.is_finished:
            if self._error is None:
                await self._news.wait()
                self._news.clear()
            if any(prompt.awaits_logprobs for prompt in self._prompts):  # they come before all choices' text
                self._check_prompt_logprobs()
                continue
            touched, self._touched = self._touched, {}
            if self._error is not None and not touched:
                raise self._error
            for choice in touched:
                if (delta := choice.processor.take()) is not None:
                    if delta.finish_reason is not None:
                        await choice.sequence.aclose()  # stops the engine, too, if a stop string was found
                    self._measure.note_delta(choice.number)
                    self.counter.count_cached(choice.number)
                    yield delta._replace(choice=choice.number)
                    shown_at = time.monotonic()
            if not self.is_finished and time.monotonic() - shown_at >= self._held_back_s:
                yield EMPTY_DELTA
                shown_at = time.monotonic()

    async def whole(self) -> list[Delta]:
        """Return every choice as one delta."""
        deltas = [delta async for delta in self.deltas()]
        return [joined([delta for delta in deltas if delta.choice == choice.number]) for choice in self._choices]

    async def _collect(self, choice: "_OpenChoice", outputs: AsyncIterator[TokenOutput]) -> None:
        is_ended = False
        try:
            async for output in outputs:
                if self._error is None:  # ignore outputs after the error that ends the request
                    self._push(choice, output)
                is_ended = output.finish_reason is not None
            if not is_ended:
                raise EngineError("engine_error", "the engine ended the answer without a finish reason")
        except Exception as error:  # pass on any exception, so that the request does not wait forever
            self._error = self._error or error
            self._news.set()

    def _push(self, choice: "_OpenChoice", output: TokenOutput) -> None:
        if not self.first_output_ns:
            self.first_output_ns, self._queue_us = time.time_ns(), output.queue_us
        self.counter.add(choice.number, output)
        if output.prompt_logprobs is not None:
            prompt = choice.prompt
            # In a continuation, delivered tokens follow the prompt: their log-probabilities are left out.
            prompt.logprobs = output.prompt_logprobs[: len(prompt.token_ids) - 1]
            prompt.awaits_logprobs = False
        if output.finish_reason == "abort":
            raise ApiError("aborted", "the request was aborted")
        if self._ends_with_prompt:
            output = replace(output, token_ids=(), logprobs=None, finish_reason="length")
        choice.processor.push(output)
        self._touched[choice] = None
        self._news.set()

    def _check_prompt_logprobs(self) -> None:
        if self._error is not None:
            raise self._error
        if all(choice.processor.finish_reason is not None for choice in self._choices):
            raise EngineError("engine_error", "the engine ended the answer without the prompt's logprobs")


@dataclass(eq=False, slots=True)
class _AnsweredPrompt:
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # log-probabilities of the prompt's tokens after the first
    awaits_logprobs: bool = False  # True until an output with them has arrived


@dataclass(eq=False, slots=True)
class _OpenChoice:
    """One choice of the answer."""

    number: int
    prompt: _AnsweredPrompt
    processor: OutputProcessor
    sequence: AsyncExitStack = field(default_factory=AsyncExitStack)  # empty if nothing is left to compute


def refuse_embedder(model: AwakeModel, request: ValidGeneration) -> None:
    if model.info.pooling is not None:
        kind = "is an embedding model and generates nothing; send texts to /ai/v1/embeddings"
        if model.info.labels:
            kind = "scores texts and generates nothing; send a query and documents to /ai/v1/rerank, or texts to /ai/v1/classify"
        message = f"{request.requested_model!r} {kind}"
        raise ApiError("invalid_request", message, param="model")


async def as_submits(
    request: ValidGeneration,
    prompts: list[EncodedPrompt],
    params: list[SamplingParams],
    tenant: Tenant,
    adapter: AdapterSource | None,
    answer: AnswerForm,
    constraint: Constraint | None,
) -> tuple[Submits, list[OutputProcessor]]:
    """Return the sequences, by choice, and the processors of all choices.

    Choice i of a prompt samples with seed + i, so the first choice equals the answer of a request for one choice. The other choices wait until it has
    computed the prompt. Raises ApiError, and DivergedError for an answer that cannot be continued.
    """
    submits: Submits = {}
    for prompt, sampling in zip(prompts, params, strict=True):
        sequence_id = os.urandom(16).hex()
        first = Submit(
            sequence_id,
            request.model,
            prompt.token_ids,
            sampling,
            salted(tenant.salt, request.cache_salt),
            constraint=constraint,
            adapter=adapter,
            images=prompt.images,
            waited_s=request.waited_s,
        )
        submits[len(submits)] = first
        for i in range(1, request.n):
            submits[len(submits)] = replace(
                first,
                sequence_id=os.urandom(16).hex(),
                sampling=replace(sampling, seed=(sampling.seed + i) % 2**63, prompt_logprobs=False),
                leader=first.sequence_id,
            )
    if request.delivery.choices:
        return await resumed(request, submits, answer.processor)
    return submits, [answer.processor() for _ in submits]


def sampling_params(model: AwakeModel, request: ValidGeneration, prompt_tokens: int) -> SamplingParams:
    """Return the request's sampling parameters.
    The checkpoint's defaults complete them, and the context limits the number of tokens."""
    sampling, defaults = request.sampling, model.text.defaults
    room = model.info.context_length - prompt_tokens
    top_k = defaults.top_k if sampling.top_k is None else sampling.top_k
    usual = max(model.config.default_max_tokens or sampling.usual_max_tokens or room, sampling.min_tokens)
    max_tokens = usual if sampling.max_tokens is None else sampling.max_tokens
    return SamplingParams(
        max_tokens=min(room, max(1, max_tokens)),  # at least 1: the first token ends the prompt's computation
        temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
        min_p=defaults.min_p if sampling.min_p is None else sampling.min_p,
        seed=request.answer_name.seed if sampling.seed is None else sampling.seed,
        repetition_penalty=(
            defaults.repetition_penalty if sampling.repetition_penalty is None else sampling.repetition_penalty
        ),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        num_logprobs=sampling.num_logprobs,
        prompt_logprobs=request.num_prompt_alternatives is not None,
        num_prompt_logprobs=request.num_prompt_alternatives,
    )
