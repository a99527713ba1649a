"""The page on a fake network: hostile texts, many sites, a feed that goes away."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.datastructures import QueryParams

from pilotlight.edge_router.telemetry.status_routes import FAILURES
from pilotlight.page.feed import Feed
from pilotlight.page.management import KeyRequest, ManagementRoutes
from pilotlight.page.routes import PageRoutes
from pilotlight.page.sessions import Sessions
from pilotlight.page.source import Decision, Move
from pilotlight.wire.credentials import Access
from pilotlight.wire.hop.function_logs import FoundLogs, LoggedInvocation, LogLine
from pilotlight.wire.hop.management import Catalogue, CatalogueModel, DeviceReading, Download, Fit, SiteOperation
from tests.page.browser import browser, needs_chromium, opened, until
from tests.page.fakes import ToldSource, counts, row

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_chromium
VIEWS = ["overview", "playground", "routing", "models", "sites", "functions", "usage", "requests", "timeline"]
HOSTILE = [
    '<img src=x onerror="window.pwned=1">',
    "<script>window.pwned=1</script>",
    '"><svg onload=window.pwned=1>',
    "javascript:window.pwned=1",
    "' onmouseover='window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}",
    "</script><script>window.pwned=1</script>",
    "&lt;b&gt;&#60;script&#62;",
    "\u202egnp.exe\u2066 \u0000\u0007 \ud7ff",
    "x" * 4000,
]


class ToldFunctions:
    """Functions whose every text is hostile, and which print hostile lines."""

    def versions(self) -> bytes:
        versions = [{"number": 1, "digest": "0" * 64, "created_s": 0.0, "message": text} for text in HOSTILE[:5]]
        shares = [{"number": 1, "percent": 100.0}]
        return json.dumps(
            [{"name": text, "revision": 1, "versions": versions, "shares": shares} for text in HOSTILE]
        ).encode()

    async def invocations(self, name: str, asked: QueryParams) -> bytes:
        logged = [
            LoggedInvocation(i, text, text, text, 1.0, 1.0, 1.0, text, text, 200, text, text, text, (LogLine(1.0, text, text),), text)
            for i, text in enumerate(HOSTILE)
        ]  # fmt: skip
        return msgspec.json.encode(FoundLogs(logged, {}, {HOSTILE[0]: HOSTILE[1]}))

    async def lines(self, name: str) -> AsyncGenerator[bytes, None]:
        for text in HOSTILE:
            yield b"data: " + json.dumps({"site": text, "at_s": 1.0, "line": text}).encode() + b"\n\n"
        await asyncio.sleep(60)


class ToldOperator:
    """Sites whose models, downloads and refusals are hostile."""

    async def catalogues(self) -> dict[str, Catalogue | str]:
        fit = Fit(True, HOSTILE[0], HOSTILE[1], HOSTILE[2], 1, 1, 1.0, 1, 1.0, 1)
        models = tuple(
            CatalogueModel(text, text, "gguf", True, text, 1, 1, text, text, (text,), replace(fit, fits=i % 2 == 0, reason=text))
            for i, text in enumerate(HOSTILE)
        )  # fmt: skip
        downloads = tuple(
            Download(text, "running" if i % 2 else "failed", 1, 2, text) for i, text in enumerate(HOSTILE)
        )
        return {HOSTILE[0]: Catalogue(models, downloads, (DeviceReading(HOSTILE[0], 1, 2),)), HOSTILE[1]: HOSTILE[2]}

    async def perform(self, site: str, operation: SiteOperation) -> None: ...


class ToldKeys:
    def list_keys(self) -> list[dict[str, Any]]:
        return [
            {"name": text, "account": text, "scopes": [text], "key_sha256": text, "state": text, "is_issued": True}
            for text in HOSTILE
        ]

    async def create(self, new: KeyRequest) -> str:
        return HOSTILE[0]

    async def revoke(self, name: str) -> None: ...


async def told_requests() -> bytes:
    fields = {
        "at_s": 1.0,
        "tries": 1,
        "moves": 1,
        "first_token_ms": 1.0,
        "took_ms": 2.0,
        "output_tokens": 1,
        "phases": None,
    }
    names = ("request_id", "account", "path", "model", "site", "outcome")
    return json.dumps({"requests": [{**fields, **dict.fromkeys(names, text)} for text in HOSTILE]}).encode()


async def told_spans(site: str) -> bytes:
    spans = [{"name": text, "began_s": 1.0 * i, "ended_s": i + 0.5, "what": text} for i, text in enumerate(HOSTILE)]
    return json.dumps({"spans": spans}).encode()


class Served:
    """The page's own routes, served by a stock server in a thread."""

    def __init__(self, source: ToldSource, port: int = 0) -> None:
        self.source, self.port = source, port
        self._server: uvicorn.Server | None = None

    def __enter__(self) -> "Served":
        feed = Feed(self.source)
        sessions = Sessions(Access([], is_required=False), "")
        routes = PageRoutes(
            feed, sessions, functions=ToldFunctions(), timeline=told_spans, requests=told_requests, has_keys=True
        )
        management = ManagementRoutes(ToldOperator(), sessions, ToldKeys())

        @asynccontextmanager
        async def lifespan(app: Starlette):  # type: ignore[no-untyped-def]
            task = asyncio.create_task(feed.run())
            yield
            task.cancel()

        app = Starlette(routes=[*routes.routes(), *management.routes()], lifespan=lifespan, exception_handlers=FAILURES)
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


@pytest.fixture(scope="module")
def chromium(network_tier: None) -> "Iterator[Browser]":
    with browser() as started:
        yield started


def test_hostile_texts_are_shown_and_never_run(chromium: "Browser") -> None:
    source = ToldSource(
        [row(f"site{i}", text, state="unhealthy" if i % 2 else "healthy") for i, text in enumerate(HOSTILE)]
    )
    source.all_moves = tuple(Move(i + 1, text, text, text, 1.0) for i, text in enumerate(HOSTILE))
    source.all_decisions = tuple(Decision(i + 1, text, text, {text: 1.0}, 1.0, 1.0) for i, text in enumerate(HOSTILE))
    source.told = counts(requests=dict.fromkeys(HOSTILE, 5))
    with Served(source) as served, opened(chromium, served.url) as page:
        page.wait_for_selector(".map circle", state="attached")
        for i, view in enumerate(VIEWS):
            page.keyboard.press(str(i + 1))
            until(page, f"() => location.hash === '#{view}'")
            if view in ("models", "sites"):
                until(page, "text => document.querySelector('main').textContent.includes(text)", HOSTILE[0])
            if view == "functions":
                page.wait_for_selector("h2:has-text('Deployed versions')")
                page.locator("button:has-text('follow')").first.click()
                until(page, "text => document.querySelector('.log').textContent.includes(text)", HOSTILE[-1])
                page.locator("button:has-text('logs')").first.click()
                page.wait_for_selector("td pre.log", state="attached")
            if view == "models":
                page.wait_for_selector("h3:has-text('Downloads')")
                page.locator("button:has-text('Run')").first.click()
                page.locator("dialog button:has-text('Run')").click()
                page.wait_for_selector("[role=status]:has-text('onerror')")
            if view == "usage":
                page.locator("button:has-text('revoke')").first.click()
                page.locator("dialog button:has-text('revoke')").click()
                page.wait_for_selector("[role=status]:has-text('onerror')")
            if view == "requests":
                page.wait_for_selector("main details", state="attached")
            page.wait_for_timeout(100)
            assert page.evaluate("window.pwned") is None
            assert page.locator("main img, main script, main [onerror], main [onload]").count() == 0


def test_a_thousand_models_at_many_sites_stay_a_short_page(chromium: "Browser") -> None:
    models = row("x").models
    many = tuple(replace(models[0], name=f"model-{i:04}") for i in range(1000))
    source = ToldSource([row(f"s{i:03}", models=many if i < 3 else many[:1]) for i in range(330)])
    with Served(source) as served, opened(chromium, served.url) as page:
        page.wait_for_selector(".map circle", state="attached")
        page.keyboard.press("4")
        page.wait_for_selector("text=980 more: filter to see them")
        page.keyboard.press("/")
        page.keyboard.type("model-0777")
        page.wait_for_selector("h2:has-text('model-0777')")
        assert page.locator("main section:has(h2:text-is('model-0777')) tr").count() == 4, "its heading and three sites"
        page.click("a[href='#sites']")
        page.wait_for_selector("text=280 more: filter to see them")


def test_a_page_that_loses_its_router_says_so_and_comes_back(chromium: "Browser") -> None:
    with ExitStack() as stack:
        with Served(ToldSource([row("ams1")])) as first:
            page = stack.enter_context(opened(chromium, first.url))
            page.wait_for_selector("#link:has-text('live')")
        page.wait_for_selector("#link:has-text('connection lost')")
        with Served(ToldSource([row("ams1"), row("iad1")]), first.port):
            page.wait_for_selector("text=2 of 2")
            page.wait_for_selector("#link:has-text('live')")


def test_a_console_is_not_needed_to_read_it(chromium: "Browser") -> None:
    """Every control has a name, and every picture a description."""
    with Served(ToldSource([row("ams1")])) as served, opened(chromium, served.url) as page:
        page.wait_for_selector(".map circle", state="attached")
        for view in VIEWS:
            page.goto(f"{served.url}#{view}")
            page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")
            nameless = page.evaluate(
                "[...document.querySelectorAll('main input, main select, main textarea, main button, main svg[role=img]')]"
                ".filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map(one => one.outerHTML)"
            )
            assert not nameless
