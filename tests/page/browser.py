"""A headless Chromium, if one is installed."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


@contextmanager
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(
    chromium: "Browser",
    url: str,
    *,
    width: int = 1280,
    theme: str = "light",
    motion: str = "reduce",
    refused: tuple[str, ...] = ("status of 401",),
) -> "Iterator[Page]":
    """Open a page at this address. At the end fail if a script raised an exception or the console has an error. Errors of requests that are `refused`
    or cut are expected."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion=motion)
    page = context.new_page()
    page.set_default_timeout(30_000)
    troubles: list[str] = []
    # The further entries are errors of connections that a test cuts.
    expected = (*refused, "status of 503", "ERR_CONNECTION", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY")
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    page.on("dialog", lambda dialog: dialog.dismiss())

    def said(message: object) -> None:
        kind, text = message.type, message.text  # type: ignore[attr-defined]
        if kind == "error" and not any(word in text for word in expected):
            troubles.append(text)

    page.on("console", said)
    page.goto(url)
    try:
        yield page
        assert not troubles
    finally:
        context.close()


def until(page: "Page", expression: str, arg: object = None) -> None:
    """Wait until a function returns true in the page. (The library's own wait needs `eval`, which the page's policy forbids.)"""
    deadline = time.monotonic() + 30.0
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, f"did not come true within 30 s: {expression}"
        page.wait_for_timeout(50)
