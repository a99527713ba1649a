"""Endpoints that answer all texts of a request in one object: embeddings and scores.

They are never streamed."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from pilotlight.dialects.requests import ValidEmbedding, ValidScoring
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.api.router_context import check_model, tenant_in
from pilotlight.runtime.api.routes.endpoint import counting, naming_ignored, parsed
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.credentials import Tenant
from pilotlight.wire.http.asgi import read_body, send_json, until_disconnect
from pilotlight.wire.paths import with_deployment

if TYPE_CHECKING:
    from pilotlight.runtime.generation.generator import Generator
    from pilotlight.runtime.generation.texts.pooled_texts import PooledTexts

RequestT = TypeVar("RequestT", ValidEmbedding, ValidScoring)

Compute = Callable[[RequestT, Tenant], Awaitable["PooledTexts"]]
Render = Callable[[RequestT, "PooledTexts"], bytes]


class TextsEndpoint(Generic[RequestT]):
    """A pure ASGI application for one path."""

    def __init__(
        self,
        generator: "Generator",
        parse: Callable[..., RequestT],
        compute: Compute[RequestT],
        render: Render[RequestT],
        limits: LimitsConfig,
    ) -> None:
        """Parse bodies by `parse`.

        `parse` is called with the body, a function that resolves a model's name, and the model's name if the path has one."""
        self._resolve = generator.models.registry.resolve
        self._parse: Callable[..., RequestT] = partial(parse, strict=limits.strict_fields)
        self._compute: Compute[RequestT] = compute
        self._render: Render[RequestT] = render
        self._max_body_bytes = limits.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, self._max_body_bytes)
        await self.answer(with_deployment(scope, raw), scope, receive, send)

    async def answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send, *model: Any) -> None:
        """Answer a request whose body `raw` has been read. `model` is the name in the path, if any."""
        request = await parsed(self._parse, raw, self._resolve, *model)
        check_model(scope, request.requested_model)
        tenant = tenant_in(scope)

        async def respond() -> None:
            pooled = await self._compute(request, tenant)
            headers = naming_ignored(request) + (counting(pooled.use) if scope.get(GENUINE_HOP, False) else [])
            await send_json(send, self._render(request, pooled), headers=headers)

        await until_disconnect(receive, respond())
