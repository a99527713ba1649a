"""The page in a browser, with a fake network: hostile texts, many sites, a lost feed, and keys with fewer rights."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from msgspec.structs import replace

from pilotlight.page.sessions import VIEW
from pilotlight.page.source import Decision, Move
from pilotlight.wire.credentials import Access, Key
from tests.page.browser import browser, needs_chromium, opened, until
from tests.page.fakes import ToldSource, counts, row
from tests.page.served import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Response

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


def hostile(what: str) -> Sequence[str]:
    return HOSTILE


def plain(what: str) -> Sequence[str]:
    return [f"mark of {what}"]


@pytest.fixture(scope="module")
def chromium(network_tier: None) -> "Iterator[Browser]":
    with browser() as started:
        yield started


class Step(NamedTuple):
    """A part of a view, and the clicks that open it."""

    view: str
    what: str  # the kind of its texts
    scope: str  # the scope that a key needs for it
    click: str = ""  # a button that opens it; empty if it is always shown
    fill: str = ""  # a field to fill in before the click


STEPS = [
    Step("playground", "answer", "metrics", "button:text-is('Send')", "Message"),
    Step("routing", "explained", "admin", "button:text-is('Explain')"),
    Step("models", "catalogue", "admin"),
    Step("models", "hub", "admin", "button:text-is('Search')", "Search the hub"),
    Step("sites", "joining", "admin", "button:text-is('Add a machine')"),
    Step("functions", "versions", "metrics"),
    Step("functions", "secrets", "admin"),
    Step("functions", "stores", "admin"),
    Step("functions", "rows", "admin", "button:text-is('look into')"),
    Step("functions", "tail", "admin", "button:text-is('follow')"),
    Step("functions", "logs", "admin", "button:text-is('logs')"),
    Step("usage", "keys", "admin"),
    Step("usage", "usage", "admin"),
    Step("requests", "requests", "admin"),
    Step("timeline", "spans", "metrics"),
]
HAS = "text => [...document.querySelectorAll('main, dialog')].some(one => one.textContent.includes(text))"


def go(page: "Page", view: str) -> None:
    page.click(f"nav a[href='#{view}']")
    page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")


def take(page: "Page", step: Step, text: str) -> None:
    """Open a part of the current view, and wait for its text."""
    if step.fill:
        page.get_by_label(step.fill, exact=True).fill("x")
    if step.click:
        page.locator(step.click).first.click()
    until(page, HAS, text)


def leave_dialog(page: "Page") -> None:
    if page.locator("dialog[open]").count():
        page.locator("dialog button:text-is('Done')").click()


def test_hostile_texts_are_shown_and_never_run(chromium: "Browser") -> None:
    source = ToldSource(
        [row(f"site{i}", text, state="unhealthy" if i % 2 else "healthy") for i, text in enumerate(HOSTILE)]
    )
    source.all_moves = tuple(Move(i + 1, text, text, text, 1.0) for i, text in enumerate(HOSTILE))
    source.all_decisions = tuple(Decision(i + 1, text, text, {text: 1.0}, 1.0, 1.0) for i, text in enumerate(HOSTILE))
    source.told = counts(requests=dict.fromkeys(HOSTILE, 5))

    def check() -> None:
        page.wait_for_timeout(100)
        assert page.evaluate("window.pwned") is None
        bad = ":is(main, dialog) :is(img, script, svg svg, [onerror], [onload], [onmouseover])"
        assert page.locator(bad).count() == 0

    with Served(source, hostile) as served, opened(chromium, served.url) as page:
        page.wait_for_selector(".map circle", state="attached")
        for view in VIEWS:
            go(page, view)
            if view in ("models", "sites"):
                until(page, HAS, HOSTILE[0])
            for step in STEPS:
                if step.view == view:
                    take(page, step, HOSTILE[0])
                    check()
                    leave_dialog(page)
            if view == "models":
                page.locator("button:text-is('Run')").first.click()
                page.locator("dialog button:text-is('Run')").click()
                page.wait_for_selector("[role=status]:has-text('onerror')")
            if view == "usage":
                page.locator("button:text-is('revoke')").first.click()
                page.locator("dialog button:text-is('revoke')").click()
                page.wait_for_selector("[role=status]:has-text('onerror')")
            check()


@pytest.mark.parametrize("scope", ["", "models", "deploy"])
def test_a_key_that_may_not_look_sees_the_door_alone(chromium: "Browser", scope: str) -> None:
    with (
        Served(ToldSource([row("secret-site", "secret")]), plain, access=keys()) as served,
        opened(chromium, served.url, refused=("status of 401", "status of 403")) as page,
    ):
        bodies = collected(page)
        page.wait_for_selector("text=This network requires a key")
        if scope:
            page.fill("[aria-label=Key]", scope)
            page.keyboard.press("Enter")
            page.wait_for_selector(f"[role=alert]:has-text('scope {VIEW}')")
        for view in VIEWS:
            page.evaluate("view => { location.hash = view; }", view)
            assert page.locator("form [aria-label=Key]").count() == 1
        told = bodies() + page.content()
        assert "secret" not in told
        assert not [step.what for step in STEPS if f"mark of {step.what}" in told]


@pytest.mark.parametrize("scope", ["metrics", "admin"])
def test_views_show_what_the_key_may_see_and_are_accessible(chromium: "Browser", scope: str) -> None:
    """The page sends no request that is refused, and receives no data that it does not show."""
    source = ToldSource([row("ams1", "hello")])
    with Served(source, plain, access=keys()) as served, opened(chromium, served.url) as page:
        bodies = collected(page)
        page.fill("[aria-label=Key]", scope)
        page.keyboard.press("Enter")
        page.wait_for_selector(".map circle", state="attached")
        shown, seen = {"admin": VIEWS, "metrics": [view for view in VIEWS if view != "requests"]}[scope], ""
        assert [one.removeprefix("#") for one in hrefs(page)] == shown
        for view in shown:
            go(page, view)
            for step in STEPS:
                if step.view == view and step.scope in (scope, "metrics"):
                    take(page, step, f"mark of {step.what}")
                    seen += page.content()
                    assert not Axe().run(page).response["violations"], step
                    leave_dialog(page)
                elif step.view == view and step.click:
                    assert page.locator(step.click).count() == 0, step
        told = bodies() + seen + page.content()
        found = {step.what for step in STEPS if f"mark of {step.what}" in told}
        assert found == {step.what for step in STEPS if step.scope in (scope, "metrics")}


def keys() -> Access:
    """Return access with one key for each scope; the name of the scope is also the key."""
    scopes = ("models", "deploy", "metrics", "admin")
    return Access(
        [Key(one, hashlib.sha256(one.encode()).hexdigest(), frozenset({one})) for one in scopes], is_required=True
    )


def hrefs(page: "Page") -> list[str]:
    found: list[str] = page.evaluate("[...document.querySelectorAll('nav a')].map(one => one.getAttribute('href'))")
    return found


def collected(page: "Page") -> Callable[[], str]:
    """Record the page's responses from now on; return a function that joins their bodies, without streams and scripts, and fails if a request got a
    403."""
    seen: list[Response] = []
    page.on("response", lambda one: seen.append(one))

    def bodies() -> str:
        assert not [one.url for one in seen if one.status == 403 and "/page/session" not in one.url]
        streams = ("text/event-stream", "text/javascript", "text/css")
        return " ".join(one.text() for one in seen if not one.headers.get("content-type", "").startswith(streams))

    return bodies


def test_a_thousand_models_at_many_sites_stay_a_short_page(chromium: "Browser") -> None:
    models = row("x").models
    many = tuple(replace(models[0], name=f"model-{i:04}") for i in range(1000))
    source = ToldSource([row(f"s{i:03}", models=many if i < 3 else many[:1]) for i in range(330)])
    with Served(source, plain) as served, opened(chromium, served.url) as page:
        page.wait_for_selector(".map circle", state="attached")
        page.keyboard.press("4")
        page.wait_for_selector("text=980 more: filter to see them")
        page.keyboard.press("/")
        page.keyboard.type("model-0777")
        page.wait_for_selector("h2:has-text('model-0777')")
        assert page.locator("main section:has(h2:text-is('model-0777')) tr").count() == 4, "a heading and three sites"
        page.click("a[href='#sites']")
        page.wait_for_selector("text=280 more: filter to see them")


def test_a_page_that_loses_its_router_says_so_and_comes_back(chromium: "Browser") -> None:
    with ExitStack() as stack:
        with Served(ToldSource([row("ams1")]), plain) as first:
            page = stack.enter_context(opened(chromium, first.url))
            page.wait_for_selector("#link:has-text('live')")
        page.wait_for_selector("#link:has-text('connection lost')")
        with Served(ToldSource([row("ams1"), row("iad1")]), plain, first.port):
            page.wait_for_selector("text=2 of 2")
            page.wait_for_selector("#link:has-text('live')")


def test_a_console_is_not_needed_to_read_it(chromium: "Browser") -> None:
    """Every control has an accessible name, and every picture a description."""
    with Served(ToldSource([row("ams1")]), plain) as served, opened(chromium, served.url) as page:
        page.wait_for_selector(".map circle", state="attached")
        for view in VIEWS:
            page.goto(f"{served.url}#{view}")
            page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")
            nameless = page.evaluate(
                "[...document.querySelectorAll('main input, main select, main textarea, main button, main svg[role=img]')]"
                ".filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map(one => one.outerHTML)"
            )
            assert not nameless
