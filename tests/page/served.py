"""The page's real routes with a fake network, served by uvicorn in a thread.

`texts` returns every text of that network for its kind: hostile texts, or marks by which a test finds the texts that a key may see.
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pilotlight.edge_router.telemetry.status_routes import FAILURES
from pilotlight.page.feed import Feed
from pilotlight.page.management import KeyRequest, ManagementRoutes
from pilotlight.page.routes import PageRoutes
from pilotlight.page.sessions import Sessions
from pilotlight.wire.credentials import Access
from pilotlight.wire.hop.function_logs import FoundLogs, LoggedInvocation, LogLine
from pilotlight.wire.hop.management import (
    Catalogue,
    CatalogueModel,
    DeviceReading,
    Download,
    Fit,
    FunctionStore,
    HubModel,
    HubQuery,
    SiteOperation,
    StorePage,
    StoreQuery,
)
from tests.page.fakes import ToldSource

Texts = Callable[[str], Sequence[str]]
OPEN = Access([], is_required=False)


class ToldFunctions:
    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def versions(self, *, is_admin: bool) -> bytes:
        shares = [{"number": 1, "percent": 100.0}]
        rows = []
        for text, private in zip(self._texts("versions"), self._texts("secrets"), strict=True):
            version = {"number": 1, "digest": "0" * 64, "created_s": 0.0, "message": text[:100]}
            row = {"name": text, "revision": 1, "versions": [version], "shares": shares, "home": ""}
            rows.append(row | ({"account": private, "secret_names": [private]} if is_admin else {}))
        return json.dumps(rows).encode()

    async def invocations(self, name: str, asked: QueryParams) -> bytes:
        texts = self._texts("logs")
        logged = [
            LoggedInvocation(i, text, text, text, 1.0, 1.0, 1.0, text, text, 200, text, text, text, (LogLine(1.0, text, text),), text)
            for i, text in enumerate(texts)
        ]  # fmt: skip
        return msgspec.json.encode(FoundLogs(logged, {}, {texts[0]: texts[-1]}))

    async def lines(self, name: str) -> AsyncGenerator[bytes, None]:
        for text in self._texts("tail"):
            yield b"data: " + json.dumps({"site": text, "at_s": 1.0, "line": text}).encode() + b"\n\n"
        await asyncio.sleep(60)


class ToldOperator:
    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def catalogues(self) -> dict[str, Catalogue | str]:
        texts = self._texts("catalogue")
        fit = Fit(True, texts[0], texts[0], texts[-1], 1, 1, 1.0, 1, 1.0, 1)
        models = tuple(
            CatalogueModel(text, text, "gguf", True, text, 1, 1, text, text, (text,), replace(fit, fits=i % 2 == 0, reason=text))
            for i, text in enumerate(texts)
        )  # fmt: skip
        downloads = tuple(Download(text, "running" if i % 2 else "failed", 1, 2, text) for i, text in enumerate(texts))
        here = Catalogue(models, downloads, (DeviceReading(texts[0], 1, 2, 3.0, 4.0),))
        return {texts[0]: here, f"{texts[0]}2": texts[-1]}

    async def perform(self, site: str, operation: SiteOperation) -> None: ...

    async def search_hub(self, site: str, query: HubQuery) -> tuple[HubModel, ...]:
        return tuple(HubModel(text, text, 1, text, 1, True) for text in self._texts("hub"))

    async def stores(self) -> dict[str, tuple[FunctionStore, ...] | str]:
        texts = self._texts("stores")
        return {texts[0]: tuple(FunctionStore("d1", text, text, 1) for text in texts), f"{texts[0]}2": texts[-1]}

    async def read_store(self, site: str, query: StoreQuery) -> StorePage:
        texts = tuple(self._texts("rows"))
        return StorePage(texts, texts[0], texts, (texts, (None,) * len(texts)), texts[0])


class ToldKeys:
    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def list_keys(self) -> list[dict[str, Any]]:
        return [
            {"name": text, "account": text, "scopes": [text], "key_sha256": text, "state": text, "is_issued": True}
            for text in self._texts("keys")
        ]

    async def create(self, new: KeyRequest) -> str:
        return self._texts("keys")[0]

    async def revoke(self, name: str) -> None: ...


class Served:
    def __init__(self, source: ToldSource, texts: Texts, port: int = 0, access: Access = OPEN) -> None:
        self.source, self.port = source, port
        self._texts, self._access = texts, access
        self._server: uvicorn.Server | None = None

    def __enter__(self) -> "Served":
        feed, sessions, texts = Feed(self.source), Sessions(self._access, ""), self._texts
        routes = PageRoutes(
            feed,
            sessions,
            functions=ToldFunctions(texts),
            timeline=self._spans,
            requests=self._requests,
            has_usage=True,
            has_keys=True,
            has_joining=True,
        )
        management = ManagementRoutes(ToldOperator(texts), sessions, ToldKeys(texts), self._line)

        async def usage(request: Request) -> Response:
            sessions.visitor(request, "admin")
            numbers = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "output_tokens"), 1)
            row = {**numbers, "cost": "0.5", "day": "2026-01-01"}
            rows = [{**row, "account": text, "model": text} for text in texts("usage")]
            return JSONResponse({"currency": texts("usage")[0], "usage": rows})

        async def explain(request: Request) -> Response:
            sessions.visitor(request, "admin")
            found = texts("explained")
            row = {"cost_ms": 1.0, "cached_tokens": 1, "status_age_s": 1.0}
            ranking = [{**row, "site": text, "reason": text, "terms": {text: 1.0}} for text in found]
            home = {"site": found[0], "cached_tokens": 1}
            return JSONResponse(
                {"prompt_tokens": 1, "home": home, "ranking": ranking, "left_out": {found[0]: found[-1]}}
            )

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            task = asyncio.create_task(feed.run())
            yield
            task.cancel()

        more = [
            Route("/usage", usage),
            Route("/debug/route", explain, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/{path}", self._refused, methods=["POST"]),
        ]
        app = Starlette(
            routes=[*routes.routes(), *management.routes(), *more], lifespan=lifespan, exception_handlers=FAILURES
        )
        config = uvicorn.Config(app, port=self.port, log_level="critical", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            assert self._thread.is_alive()
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()

    async def _spans(self, site: str) -> bytes:
        texts = self._texts("spans")
        spans = [{"name": text, "began_s": 1.0 * i, "ended_s": i + 0.5, "what": text} for i, text in enumerate(texts)]
        return json.dumps({"spans": spans}).encode()

    async def _requests(self) -> bytes:
        numbers = {"at_s": 1.0, "tries": 1, "moves": 1, "first_token_ms": 1.0, "took_ms": 2.0, "output_tokens": 1}
        names = ("request_id", "account", "path", "model", "site", "outcome")
        rows = [{**numbers, "phases": None, **dict.fromkeys(names, text)} for text in self._texts("requests")]
        return json.dumps({"requests": rows}).encode()

    async def _line(self, minutes: float) -> str:
        return " ".join(self._texts("joining"))

    async def _chat(self, request: Request) -> Response:
        """Respond as a model whose answer, reasoning and tool calls are the texts of the kind "answer"."""

        def deltas() -> list[dict[str, Any]]:
            found = []
            for i, text in enumerate(self._texts("answer")):
                function = {"name": text, "arguments": text}
                found.append(
                    {
                        "content": text,
                        "reasoning_content": text,
                        "tool_calls": [{"index": i, "id": text, "function": function}],
                    }
                )
            return found

        events = [{"choices": [{"delta": delta}]} for delta in deltas()]
        events.append({"choices": [{"delta": {}, "finish_reason": self._texts("answer")[0]}]})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    async def _refused(self, request: Request) -> Response:
        return JSONResponse({"error": {"message": " ".join(self._texts("answer"))}}, 400)
