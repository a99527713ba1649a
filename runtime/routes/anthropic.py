"""Anthropic's paths: /v1/messages and /v1/messages/count_tokens, under the prefixes that OpenAI's have."""

import asyncio
from functools import partial

import orjson
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dialects.anthropic import MessagesWriter, parse_count, parse_messages
from runtime.connection import json_response, read_body
from runtime.generation import Generator, as_api_errors, refuse_embedder
from runtime.prompts import encode
from runtime.responses.blocks import BlockBuilder
from runtime.router_context import check_model
from runtime.routes.endpoint import MIB, PREFIXES, Endpoint, parsed
from sites.site import LimitsConfig
from wire.errors import Dialect


def anthropic_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    messages = Endpoint(generator, Dialect.ANTHROPIC, parse_messages, partial(BlockBuilder, MessagesWriter), limits)
    counts = _TokenCount(generator, limits)
    return [
        route
        for prefix in PREFIXES
        for route in (
            Route(f"{prefix}/messages", messages, methods=["POST"]),
            Route(f"{prefix}/messages/count_tokens", counts.answer, methods=["POST"]),
        )
    ]


class _TokenCount:
    """How many tokens a prompt has, as its model's own template and tokenizer write it."""

    def __init__(self, generator: Generator, limits: LimitsConfig) -> None:
        self._generator = generator
        self._limits = limits

    async def answer(self, request: Request) -> Response:
        generator = self._generator
        raw = await read_body(request.scope, request.receive, int(self._limits.max_body_mib * MIB))
        parse = partial(parse_count, strict=self._limits.strict_fields)
        counted = await parsed(parse, raw, generator.models.registry.resolve)
        check_model(request.scope, counted.requested_model)
        counted = replace(counted, num_bytes=len(raw))
        with as_api_errors(generator.request_timeout_s), generator.admission.permit():
            async with asyncio.timeout(generator.request_timeout_s), generator.models.use(counted.model) as model:
                refuse_embedder(model, counted)
                prompt = await encode(model, counted, counted.prompt, generator.images)
        return json_response(orjson.dumps({"input_tokens": len(prompt.token_ids)}))
