"""Anthropic's paths: /v1/messages and /v1/messages/count_tokens, under the prefixes that OpenAI's have."""

from functools import partial

from starlette.routing import Route

from dialects.anthropic import MessagesWriter, parse_count, parse_messages
from runtime.generation import Generator
from runtime.responses.blocks import BlockBuilder
from runtime.routes.endpoint import PREFIXES, Endpoint
from runtime.routes.token_count import TokenCount
from sites.site import LimitsConfig
from wire.errors import Dialect


def anthropic_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    messages = Endpoint(generator, Dialect.ANTHROPIC, parse_messages, partial(BlockBuilder, MessagesWriter), limits)
    counts = TokenCount(generator, parse_count, limits)
    return [
        route
        for prefix in PREFIXES
        for route in (
            Route(f"{prefix}/messages", messages, methods=["POST"]),
            Route(f"{prefix}/messages/count_tokens", counts, methods=["POST"]),
        )
    ]
