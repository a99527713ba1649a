"""Models of the whole network for a site's functions.

The site's own models run here; other models run at another site, through the router that the site's file names. So do calls that name an account in a
header, because that account has limits, which the router applies. The router bills a call to the account that deployed the function, which the signed
request names; usage of local models is counted here (bindings/usage.py).
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec

from pilotlight.functions.inference import Inference, InferenceResponse
from pilotlight.functions.router_client import RouterClient, whole
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.headers import ACCOUNT, forwardable
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.sse import CONTENT_TYPE

JSON_HEADERS = ("content-type", "application/json")


class NetworkInference:
    """Implements `Inference`: runs the site's own models here, and all other models through the router."""

    def __init__(self, own: Inference, router: RouterClient) -> None:
        self._own = own
        self._router = router
        self.is_busy = own.is_busy
        self.own_names = own.own_names
        self.models = own.models
        self.serves = own.serves

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        if self._own.serves(model) and ACCOUNT not in headers:
            return await self._own.run(account, model, inputs, headers)
        path = f"/client/v4/accounts/{account}/ai/run/{model}"
        named = {"content-type": "application/json", **headers}
        try:
            async with AsyncExitStack() as scope:
                answer = await scope.enter_async_context(self._router.ask("POST", path, inputs, named))
                pairs = forwardable((name.lower(), value) for name, value in answer.headers.items())
                if answer.headers.get("content-type", "").startswith(CONTENT_TYPE.partition(";")[0]):
                    return InferenceResponse(answer.status, pairs, events=RoutedEvents(answer, scope.pop_all()))
                body = await whole(answer)
                return InferenceResponse(answer.status, pairs, _result(body) if answer.status < 400 else body)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, KeyError) as error:
            sentence = (
                f"this site has no model named {model[:200]!r}, and {self._router.url} could not be reached: {error}"
            )
            refusal = ApiError("no_site_available", sentence, retry_after_s=1)
            pairs = [JSON_HEADERS, *refusal.headers()]
            return InferenceResponse(
                refusal.status(Dialect.WORKERS_AI), pairs, msgspec.json.encode(refusal.body(Dialect.WORKERS_AI))
            )


class RoutedEvents:
    """A stream of another site's events, relayed by the router."""

    use = ResourceUse()  # stays zero: the router counts the usage

    def __init__(self, answer: aiohttp.ClientResponse, scope: AsyncExitStack) -> None:
        self._chunks: AsyncIterator[bytes] = answer.content.iter_any()
        self._scope = scope

    def __aiter__(self) -> "RoutedEvents":
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        await self._scope.aclose()


def _result(body: bytes) -> bytes:
    """Return the `result` of a response of Workers AI's REST API."""
    envelope: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return bytes(envelope["result"])
