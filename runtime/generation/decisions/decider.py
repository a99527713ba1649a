"""A request for decisions as a scope: its permit, its model, and a tree of tokens.

The state is the root of the tree, each question is a branch, and its options are the leaves. The first leaf computes the state, whose blocks are then
cached for all other leaves. For each other question one option is computed first; that also gives the scores of all the question's one-token options.
The remaining options follow. An option's score is the sum of its tokens' log-probabilities, so it depends only on its own question. Independent of
dialects.
"""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from pilotlight.dialects.decisions.questions import Question, ValidDecision
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import AdapterSource, SamplingParams, Submit, TokenLogprobs, TokenOutput
from pilotlight.engine.text.formats import Thinking
from pilotlight.engine.text.image_prompt import SizedImage
from pilotlight.runtime.generation.generator import Generator, as_api_errors, refuse_embedder
from pilotlight.runtime.generation.prompts import EncodedPrompt, encode_with, read_images
from pilotlight.runtime.models.model_state import AwakeModel
from pilotlight.support import background
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.chat import Usage
from pilotlight.wire.credentials import Tenant
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse

WINDOW = 64  # leaves that are in the engine at a time: as many as fit into one batch
# Number of likeliest tokens reported for a leaf's first position. A one-token option among them needs no leaf.
TOP = 64


class Decisions:
    """The result of a request; empty until `complete` is called.

    runtime/telemetry/metrics.py measures it like a generation."""

    def __init__(self, input_tokens: int) -> None:
        self.probabilities: list[list[float]] = []  # for each question a list with one probability per option
        self.input_tokens = input_tokens
        self.cached_tokens = 0
        self.device_us = 0
        self.finish_reason: str | None = None
        self.delivered_tokens = 0

    def complete(self, probabilities: list[list[float]]) -> None:
        """Complete the result. `probabilities` has a list for each question, with one number per option."""
        self.probabilities, self.finish_reason = probabilities, "stop"

    @property
    def usage(self) -> Usage:
        return Usage.of(self.input_tokens, completion_tokens=0, cached_tokens=self.cached_tokens)

    @property
    def use(self) -> ResourceUse:
        return ResourceUse(self.input_tokens, self.cached_tokens, device_us=self.device_us)


class Leaf(NamedTuple):
    """An option of a question."""

    question: int
    option: int


class AskedQuestion:
    """A question as tokens, with the scores of its options as far as they are known."""

    def __init__(self, prompt: EncodedPrompt, options: Sequence[tuple[int, ...]]) -> None:
        self.prompt = prompt
        self.options = options
        self.scores: list[float | None] = [None] * len(options)

    @property
    def first(self) -> int:
        """The option to compute first: the longest one, because no other computation gives its score."""
        return max(range(len(self.options)), key=lambda i: len(self.options[i]))

    @property
    def unknown(self) -> list[int]:
        return [i for i, known in enumerate(self.scores) if known is None]

    def learn(self, option: int, reported: Sequence[TokenLogprobs]) -> None:
        """Store an option's score, and those of one-token options that its first position reports."""
        self.scores[option] = math.fsum(each.logprob for each in reported)
        first = {self.options[option][0]: reported[0].logprob, **dict(reported[0].top)}
        for i, tokens in enumerate(self.options):
            if self.scores[i] is None and len(tokens) == 1 and tokens[0] in first:
                self.scores[i] = first[tokens[0]]

    def probabilities(self) -> list[float]:
        scores = [score for score in self.scores if score is not None]
        assert len(scores) == len(self.options)
        highest = max(scores)
        weights = [math.exp(score - highest) for score in scores]
        total = math.fsum(weights)
        return [weight / total for weight in weights]


class Decider:
    """Computes decisions with the generator's parts: admission, models and engine sequences."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def decide(self, request: ValidDecision, tenant: Tenant) -> Decisions:
        site = self._generator
        with (
            as_api_errors(site.request_timeout_s),
            site.metrics.measure(request.model) as measure,
            site.admission.permit() as permit,
        ):
            site.models.expect_conversation(request.model)
            names_adapter = request.requested_model != request.model
            adapter = await site.models.adapters.of(request, tenant.owner) if names_adapter else None
            async with TimeLimit(site.request_timeout_s), site.models.use(request.model) as model:
                refuse_embedder(model, request)
                images = await read_images(model, request, request.prompt, site.images)
                asked = [await self._asked(model, request, question, images) for question in request.questions]
                shared = _num_shared([each.prompt.token_ids for each in asked])
                branches = [len(each.prompt.token_ids) - shared for each in asked]
                decisions = Decisions(shared + sum(branches))
                most_at_once = (
                    shared + sum(sorted(branches)[-WINDOW:]) + WINDOW * max(len(o) for a in asked for o in a.options)
                )
                permit.reserve(request.model, most_at_once, site.models.registry.kv_tokens(model))
                measure.answer = decisions
                await self._compute(request, tenant, adapter, asked, decisions)
                decisions.complete([each.probabilities() for each in asked])
                measure.note_delta(0)
                kv_tokens = site.models.registry.kv_tokens(model)
                site.traffic.computed(
                    request.model, decisions.input_tokens, decisions.cached_tokens, request.prefixes, kv_tokens
                )
                return decisions

    async def _asked(
        self, model: AwakeModel, request: ValidDecision, question: Question, images: tuple[SizedImage, ...]
    ) -> AskedQuestion:
        """Return a question and its options as tokens. `images`: those of the state.

        Raises ApiError if the model would reason before it answers, or if question and options do not fit into its context."""
        prompt = await encode_with(model, request, request.asked(question), images)
        if model.text.answers.thinking_after(prompt.token_ids) is Thinking.OPEN:
            sentence = f"{request.requested_model!r} begins each answer with its thoughts, which its template cannot turn off: ask another model"
            raise ApiError("invalid_request", sentence, param="model")
        tokenizer = model.text.tokenizer
        options = [tokenizer.encode(option.label, add_special_tokens=False) for option in question.options]
        room = model.info.context_length - len(prompt.token_ids) - 1
        if max(map(len, options)) > room:
            sentence = (
                f"the state and a question fill the {model.info.context_length} tokens of {request.requested_model!r}"
            )
            raise ApiError("context_length_exceeded", sentence, param=request.prompt_field)
        if any(a != b and b[: len(a)] == a for a in options for b in options) and model.info.eos_token_ids:
            # The end tag distinguishes an option from one that starts with the same text.
            options = [(*tokens, model.info.eos_token_ids[0]) for tokens in options]
        return AskedQuestion(prompt, options)

    async def _compute(
        self,
        request: ValidDecision,
        tenant: Tenant,
        adapter: AdapterSource | None,
        asked: list[AskedQuestion],
        decisions: Decisions,
    ) -> None:
        async def compute(leaf: Leaf) -> None:
            question = asked[leaf.question]
            prompt, option = question.prompt, question.options[leaf.option]
            sampling = SamplingParams(
                1, temperature=0.0, prompt_logprobs=True, num_prompt_logprobs=TOP, prompt_logprobs_from=len(prompt.token_ids)
            )  # fmt: skip
            tokens = (*prompt.token_ids, *option)
            submit = Submit(
                os.urandom(16).hex(),
                request.model,
                tokens,
                sampling,
                tenant.salt,
                adapter=adapter,
                images=prompt.images,
            )
            output = await self._first_output(submit, decisions)
            assert output.prompt_logprobs is not None
            question.learn(leaf.option, output.prompt_logprobs[: len(option)])
            if leaf == root:
                decisions.cached_tokens = output.num_cached_tokens or 0

        root = Leaf(0, asked[0].first)
        await compute(root)
        await background.run_all([Leaf(i, each.first) for i, each in enumerate(asked) if i > 0], compute, WINDOW)
        rest = [Leaf(i, option) for i, each in enumerate(asked) for option in each.unknown]
        await background.run_all(rest, compute, WINDOW)

    async def _first_output(self, submit: Submit, decisions: Decisions) -> TokenOutput:
        async with self._generator.engine.generate(submit) as outputs:
            async for output in outputs:
                if output.finish_reason == "abort":
                    raise ApiError("aborted", "the request was aborted")
                decisions.device_us += output.device_us
                if output.prompt_logprobs is not None:
                    return output
        raise EngineError("engine_error", "the engine ended a question without its log-probabilities")


def _num_shared(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the prompts' common prefix in tokens."""
    least, most = min(prompts), max(prompts)  # the common prefix of these two is that of all
    return next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))
