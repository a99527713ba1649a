"""Decisions: /v1/decisions, /v1/systemone, and Workers AI's `run` with a decision model.

They are never streamed."""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pilotlight.dialects.decisions.openai_decisions import decision_object, parse_decisions
from pilotlight.dialects.decisions.questions import ValidDecision
from pilotlight.dialects.decisions.system_one import parse_system_one, system_one_object
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.api.router_context import body_limit, check_model, router_context, tenant_in
from pilotlight.runtime.api.routes.endpoint import PREFIXES, counting, naming_ignored, parsed
from pilotlight.runtime.generation.decisions.decider import Decider
from pilotlight.runtime.generation.generator import Generator
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.http.asgi import read_body, send_json, until_disconnect

# Arguments: the request, the probabilities of each question's options, the number of input tokens, and how many of these were cached.
Render = Callable[[ValidDecision, Sequence[Sequence[float]], int, int], bytes]


def decision_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    decisions = DecisionEndpoint(generator, parse_decisions, decision_object, limits)
    system_one = DecisionEndpoint(generator, parse_system_one, system_one_object, limits)
    return [
        route
        for prefix in PREFIXES
        for route in (
            Route(f"{prefix}/decisions", decisions, methods=["POST"]),
            Route(f"{prefix}/systemone", system_one, methods=["POST"]),
        )
    ]


class DecisionEndpoint:
    """A pure ASGI application for one path."""

    def __init__(
        self, generator: Generator, parse: Callable[..., ValidDecision], render: Render, limits: LimitsConfig
    ) -> None:
        self._decider = Decider(generator)
        self._registry = generator.models.registry
        self._parse = partial(parse, strict=limits.strict_fields)
        self._render = render
        self._max_body_bytes = limits.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(
            await read_body(scope, receive, body_limit(scope, self._max_body_bytes)), scope, receive, send
        )

    async def answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send, *model: str) -> None:
        """Answer a request whose body `raw` has been read. `model` is the name in the path, if any."""
        context, raw = router_context(scope, raw)
        request = await parsed(self._parse, raw, self._registry.resolve, *model)
        request = replace(request, num_bytes=len(raw), prefixes=context.prefixes)
        context.check_queue(self._registry.load(request.model))
        check_model(scope, request.asked_model)
        tenant = tenant_in(scope)

        async def respond() -> None:
            found = await self._decider.decide(request, tenant)
            headers = naming_ignored(request) + (counting(found.use) if scope.get(GENUINE_HOP, False) else [])
            body = self._render(request, found.probabilities, found.input_tokens, found.cached_tokens)
            await send_json(send, body, headers=headers)

        await until_disconnect(receive, respond())
