"""Read-only access to a site's stores for operators: GET STORES_PATH lists them, POST returns a page.

Only routers that share a secret with the site may ask.
"""

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.functions.bindings.storage.store_view import NoStoreError, StoreReadError, list_stores, read_page
from pilotlight.runtime.api.connection import json_response, read_json
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import STORES_PATH, FunctionStore, StorePage, StoreQuery

MAX_BODY = 8 << 10


class StoreRoutes:
    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    def routes(self) -> list[Route]:
        return [Route(STORES_PATH, self.list_all), Route(STORES_PATH, self.page, methods=["POST"])]

    async def list_all(self, request: Request) -> Response:
        _require_router(request)
        return json_response(msgspec.json.encode(await self.stores()))

    async def page(self, request: Request) -> Response:
        _require_router(request)
        query = await read_json(request, StoreQuery, MAX_BODY, "the body is not a valid request of a router")
        return json_response(msgspec.json.encode(await self.read(query)))

    async def stores(self) -> tuple[FunctionStore, ...]:
        return await asyncio.to_thread(list_stores, self._state_dir)

    async def read(self, query: StoreQuery) -> StorePage:
        """Return a page of a store. Raises ApiError."""
        try:
            return await asyncio.to_thread(read_page, self._state_dir, query)
        except NoStoreError as error:
            raise ApiError("not_found", str(error)) from None
        except StoreReadError as error:
            raise ApiError("overloaded", str(error), retry_after_s=5) from None


def _require_router(request: Request) -> None:
    if not request.scope.get(GENUINE_HOP, False):
        raise ApiError("forbidden", "only a router that shares a secret with this site may read its functions' data")
