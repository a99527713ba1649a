"""Anthropic's paths: /v1/messages and /v1/messages/count_tokens, under the same prefixes as OpenAI's."""

from functools import partial

from starlette.routing import Route

from pilotlight.dialects.anthropic import MessagesWriter, parse_count, parse_messages
from pilotlight.runtime.api.builders.blocks import BlockBuilder
from pilotlight.runtime.api.routes.endpoint import PREFIXES, Endpoint
from pilotlight.runtime.api.routes.token_count import TokenCount
from pilotlight.runtime.generation.generator import Generator
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.errors import Dialect


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
