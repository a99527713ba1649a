"""The number of tokens of a request's prompt, after its model's template and tokenizer.

The count is the same in every dialect."""

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from pilotlight.dialects.requests import ValidGeneration
from pilotlight.runtime.api.router_context import check_model
from pilotlight.runtime.api.routes.endpoint import parsed
from pilotlight.runtime.generation.generator import Generator, as_api_errors, refuse_embedder
from pilotlight.runtime.generation.prompts import encode
from pilotlight.sites.site import LimitsConfig
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.http.asgi import read_body, send_json


class TokenCount:
    """A pure ASGI application for one path."""

    def __init__(
        self, generator: Generator, parse: Callable[..., ValidGeneration], limits: LimitsConfig, **fields: Any
    ) -> None:
        """`fields` are further fields of the response."""
        self._generator = generator
        self._parse = partial(parse, strict=limits.strict_fields)
        self._max_body_bytes = limits.max_body_bytes
        self._fields = fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generator = self._generator
        raw = await read_body(scope, receive, self._max_body_bytes)
        counted = await parsed(self._parse, raw, generator.models.registry.resolve)
        check_model(scope, counted.requested_model)
        counted = replace(counted, num_bytes=len(raw))
        with as_api_errors(generator.request_timeout_s), generator.admission.permit():
            async with TimeLimit(generator.request_timeout_s), generator.models.use(counted.model) as model:
                refuse_embedder(model, counted)
                prompt = await encode(model, counted, counted.prompt, generator.images)
        await send_json(send, orjson.dumps({**self._fields, "input_tokens": len(prompt.token_ids)}))
