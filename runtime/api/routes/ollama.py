"""Ollama's paths: /api/chat, /api/generate, /api/embed, and information about models.

dialects/ollama.py defines the bodies. A stream goes to a router as events with resume points, and to other clients as lines of JSON.
"""

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pilotlight.dialects.ollama import (
    CalledFunction,
    OllamaCall,
    OllamaEnd,
    OllamaMessage,
    ValidOllama,
    ValidOllamaEmbedding,
    answer_line,
    fixed_routes,
    parse_chat,
    parse_embed,
    parse_embeddings,
    parse_generate,
    parse_model,
    plain_name,
    timestamp,
)
from pilotlight.dialects.requests import ValidEmbedding
from pilotlight.engine.text.formats import CallPart, ReasoningPart, TextPart
from pilotlight.runtime.api.builders.logprobs import chat_logprobs
from pilotlight.runtime.api.connection import json_response
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.api.router_context import check_model, may_see, router_context
from pilotlight.runtime.api.routes.endpoint import Endpoint, parsed
from pilotlight.runtime.api.routes.texts import TextsEndpoint
from pilotlight.runtime.generation.generator import Generation, Generator, as_api_errors
from pilotlight.runtime.generation.output_processor import Delta
from pilotlight.runtime.generation.texts.embedding import Embedder
from pilotlight.runtime.generation.texts.pooled_texts import PooledTexts
from pilotlight.sites.site import LimitsConfig
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.chat import TokenLogprob
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.asgi import read_body, send_json
from pilotlight.wire.lines import as_lines
from pilotlight.wire.sse import DONE, encode_event

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Shown as the template of a model that can fill in the middle: clients search for `.Suffix` before they send one.
_INSERTS = "{{ .Prompt }}{{ .Suffix }}"
_NEVER = "0001-01-01T00:00:00Z"  # Go's zero time, which Ollama sends for "never"


def ollama_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    chats = OllamaEndpoint(generator, Dialect.OLLAMA, parse_chat, OllamaBuilder, limits)
    completions = OllamaEndpoint(generator, Dialect.OLLAMA, parse_generate, OllamaBuilder, limits)
    models, embed = OllamaModels(generator, limits), Embedder(generator).embed
    return [
        Route("/api/chat", _StreamedLines(chats), methods=["POST"]),
        Route("/api/generate", _StreamedLines(completions), methods=["POST"]),
        Route("/api/embed", TextsEndpoint(generator, parse_embed, embed, _embedded, limits), methods=["POST"]),
        Route(
            "/api/embeddings",
            TextsEndpoint(generator, parse_embeddings, embed, _embedded_one, limits),
            methods=["POST"],
        ),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.awake),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/pull", models.pull, methods=["POST"]),
        *fixed_routes(),
    ]


class _StreamedLines:
    """An endpoint whose streams are lines of JSON, or events if the client is a router."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send if scope.get(GENUINE_HOP, False) else as_lines(send))


class OllamaEndpoint(Endpoint[ValidOllama]):
    """An endpoint for chats or completions; a request without a prompt only loads its model."""

    async def answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send, *model: str) -> None:
        _, asked = router_context(scope, raw)
        request = await parsed(self._parse, asked, self._registry.resolve)
        if not request.loads_only:
            return await super().answer(raw, scope, receive, send)
        check_model(scope, request.asked_model)
        generator = self._generator
        with as_api_errors(generator.request_timeout_s):
            async with TimeLimit(generator.request_timeout_s), generator.models.use(request.model):
                took_ns = time.time_ns() - request.received_ns
        await send_json(send, answer_line(request, OllamaMessage(), OllamaEnd("load", took_ns, took_ns, 0, 0, 0, 0)))


class OllamaBuilder:
    num_events = 0

    def __init__(self, request: ValidOllama, generator: Generator) -> None:
        self._request = request
        self._models = generator.models.registry

    def events(self, delta: Delta, generation: Generation) -> bytes:
        """Return a line for each part of the delta; the last line has the log-probabilities.

        A delta that only ends the answer gives no line.
        """
        messages = list(self._messages(delta))
        if not messages:
            return b""
        logprobs = self._logprobs(delta)
        lines = [answer_line(self._request, message) for message in messages[:-1]]
        lines.append(answer_line(self._request, messages[-1], logprobs=logprobs))
        return b"".join(map(encode_event, lines))

    def ending(self, generation: Generation) -> bytes:
        reason = generation.finish_reason
        line = answer_line(self._request, OllamaMessage(), self._end(generation, is_cut=reason == "length"))
        return encode_event(line) + encode_event(DONE)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        (delta,) = deltas
        calls = tuple(self._call(call, arguments) for call, arguments in delta.calls)
        message = OllamaMessage(delta.text, delta.reasoning or msgspec.UNSET, calls or msgspec.UNSET)
        end = self._end(generation, is_cut=delta.finish_reason == "length")
        return answer_line(self._request, message, end, self._logprobs(delta))

    def _messages(self, delta: Delta) -> Iterator[OllamaMessage]:
        calls = iter(delta.calls)
        for part in delta.parts:
            if isinstance(part, TextPart):
                yield OllamaMessage(part.text)
            elif isinstance(part, ReasoningPart):
                yield OllamaMessage(thinking=part.text)
            elif isinstance(part, CallPart):
                yield OllamaMessage(tool_calls=(self._call(*next(calls)),))

    def _call(self, call: CallPart, arguments: str) -> OllamaCall:
        """Return a tool call. Arguments that are not a JSON object become {}: this API has no other form."""
        try:
            _objects.decode(arguments)
        except (ValueError, RecursionError):
            arguments = "{}"
        # Streams have one object a line. A line end in JSON can only be white space.
        written = msgspec.Raw(arguments.replace("\r", " ").replace("\n", " ").encode())
        call_id = call.id or f"call_{self._request.answer_name.item_id(0, call.position)}"
        return OllamaCall(call_id, CalledFunction(call.name, written, call.position))

    def _end(self, generation: Generation, *, is_cut: bool) -> OllamaEnd:
        now_ns, began_ns = time.time_ns(), self._request.received_ns
        first_ns = min(max(generation.first_output_ns or now_ns, began_ns), now_ns)
        usage = generation.usage
        return OllamaEnd(
            "length" if is_cut else "stop",
            total_duration=now_ns - began_ns,
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=first_ns - began_ns,
            eval_count=usage.completion_tokens,
            eval_duration=max(1, now_ns - first_ns),
        )

    def _logprobs(self, delta: Delta) -> tuple[TokenLogprob, ...]:
        if self._request.sampling.num_logprobs is None:
            return ()
        return chat_logprobs(delta.tokens, self._models.tokenizer(self._request.model)).content


def _embedded(request: ValidEmbedding, embeddings: PooledTexts) -> bytes:
    assert isinstance(request, ValidOllamaEmbedding)
    return orjson.dumps({
        "model": request.shown_model, "embeddings": embeddings.vectors,
        "total_duration": time.time_ns() - request.received_ns, "load_duration": 0,
        "prompt_eval_count": embeddings.usage.prompt_tokens,
    })  # fmt: skip


def _embedded_one(request: ValidEmbedding, embeddings: PooledTexts) -> bytes:
    return orjson.dumps({"embedding": embeddings.vectors[0]})


class OllamaModels:
    """Information about the site's models, in Ollama's form."""

    def __init__(self, generator: Generator, limits: LimitsConfig) -> None:
        self._models = generator.models.registry
        self._max_body_bytes = limits.max_body_bytes

    async def tags(self, request: Request) -> Response:
        return json_response(orjson.dumps({"models": [self._listed(name) for name in self._names(request)]}))

    async def awake(self, request: Request) -> Response:
        """List the models that are on a device.

        Models do not expire after a fixed time, so the time of expiry is "never"."""
        names = [name for name in self._names(request) if self._models.residency(name) == "device"]
        models = [{**self._listed(name), "expires_at": _NEVER, **self._awake(name)} for name in names]
        return json_response(orjson.dumps({"models": models}))

    async def show(self, request: Request) -> Response:
        name = await self._asked(request)
        info, text = self._models.info(name), self._models.text(name)
        family = self._family(name) or "unknown"
        capabilities = []
        known: dict[str, Any] = {"general.architecture": family}
        if info is not None:
            known[f"{family}.context_length"] = info.context_length
            if info.embedding_size:
                known[f"{family}.embedding_length"] = info.embedding_size
            capabilities = ["embedding"] if info.pooling else ["completion"]
        if info is not None and info.image_token_id is not None:
            capabilities.append("vision")
        if text is not None and info is not None and not info.pooling:
            capabilities += ["tools"] if text.answers.tools is not None else []
            capabilities += ["insert"] if text.fill_in is not None else []
            capabilities += ["thinking"] if text.answers.can_reason else []
        shown = {
            "modelfile": f"FROM {name}\n", "parameters": "", "template": _INSERTS if "insert" in capabilities else "", "license": "",
            "details": self._details(name), "model_info": known, "capabilities": capabilities,
            "modified_at": timestamp(self._models.created),
        }  # fmt: skip
        return json_response(orjson.dumps(shown))

    async def pull(self, request: Request) -> Response:
        """Report success for a model that the site has; a request cannot download others."""
        await self._asked(request)
        return json_response(b'{"status":"success"}\n')

    async def _asked(self, request: Request) -> str:
        """Return the main name of the model that the request names. Raises ApiError."""
        raw = await read_body(request.scope, request.receive, self._max_body_bytes)
        asked = parse_model(router_context(request.scope, raw)[1])
        name = self._models.resolve(plain_name(asked))
        if name is None or not may_see(request.scope, self._models.names_of(plain_name(asked))):
            sentence = f"this site has no model named {asked[:200]!r}; models are named in its file"
            raise ApiError("model_not_found", sentence, param="model")
        return name

    def _names(self, request: Request) -> list[str]:
        names = [config.name for config in self._models.configs]
        return [name for name in names if may_see(request.scope, self._models.names_of(name))]

    def _listed(self, name: str) -> dict[str, Any]:
        info = self._models.info(name)
        source = next(config.source for config in self._models.configs if config.name == name)
        return {
            "name": name, "model": name, "modified_at": timestamp(self._models.created),
            "size": 0 if info is None else info.weights_bytes,
            # This digest covers the model's name and source, because a list should not have to read the model's files.
            "digest": hashlib.sha256(f"{name}\0{source}".encode()).hexdigest(),
            "details": self._details(name),
        }  # fmt: skip

    def _awake(self, name: str) -> dict[str, Any]:
        info = self._models.info(name)
        return {} if info is None else {"size_vram": info.weights_bytes, "context_length": info.context_length}

    def _details(self, name: str) -> dict[str, Any]:
        info = self._models.info(name)
        stored = () if info is None else info.stored_dtypes
        family = self._family(name)
        return {
            "parent_model": "", "format": "", "family": family, "families": [family] if family else [],
            "parameter_size": "", "quantization_level": ", ".join(stored),
        }  # fmt: skip

    def _family(self, name: str) -> str:
        text = self._models.text(name)
        return "" if text is None else text.family
