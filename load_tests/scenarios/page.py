"""The page in a headless Chromium: sizes, first paint, memory over many updates, cost for the router.

python -m load_tests.scenarios.page with new pictures in docs/
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from load_tests.local_network import LocalNetwork
from load_tests.records import write_record
from pilotlight.page.routes import STATIC

DOCS = Path(__file__).parents[2] / "docs"
PAINTS = 9
UPDATES = 10_000
PAGES = 10
STRETCH_S = 20.0
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
# Replays one second of the feed repeatedly, as the page's own listener would get it.
_PLAY = """async updates => {
    const { network, watch } = await import("./page/network.js"), source = window.feedOfThePage;
    const row = network.sites[0];
    for (let i = 0; i < updates; i++) {
        const sample = { ...network.samples.at(-1), at: 1e9 + i, tokens: i % 100 };
        const data = { at: 1e9 + i, sample, sites: [{ ...row, inflight: i % 9 }], gone: [], moves: [], decisions: [] };
        source.dispatchEvent(new MessageEvent("second", { data: JSON.stringify(data) }));
        if (i % 50 === 0) await new Promise(requestAnimationFrame);
    }
}"""
_KEEP_FEED = (
    "window.EventSource = class extends EventSource { constructor(url) { super(url); window.feedOfThePage = this; } };"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"bytes": sizes()}
    with LocalNetwork() as network, chromium() as browser:
        results["first_paint_ms"] = first_paints(browser, network.url)
        results["heap_mib"] = heap_over_updates(browser, network.url)
        results["router_cpu"] = cost_of_open_pages(browser, network)
        take_pictures(browser, network.url)
    print(json.dumps(results, indent=2))
    if not options.no_record:
        print("record:", write_record("page", results, ("playwright",)))


@contextmanager
def chromium() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        try:
            yield browser
        finally:
            browser.close()


def sizes() -> dict[str, int]:
    files = [path.read_bytes() for path in sorted(STATIC.rglob("*")) if path.is_file()]
    return {"all": sum(map(len, files)), "compressed": sum(len(gzip.compress(data)) for data in files)}


def first_paints(browser: Browser, url: str) -> dict[str, float]:
    """Measure a browser with an empty cache."""
    times = []
    for _ in range(PAINTS):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector(".map circle", state="attached")
        times.append(float(page.evaluate(_PAINT)))
        context.close()
    return {"median": statistics.median(times), "max": max(times), "n": len(times)}


def heap_over_updates(browser: Browser, url: str) -> dict[str, float]:
    """Measure the JavaScript heap after a collection, when the tab's rings are full.

    And again after as many more updates.
    """
    context = browser.new_context()
    context.add_init_script(_KEEP_FEED)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(".map circle", state="attached")
    page.evaluate(_PLAY, 1000)
    before = _heap_mib(page)
    began = time.monotonic()
    page.evaluate(_PLAY, UPDATES)
    seconds = time.monotonic() - began
    after = _heap_mib(page)
    context.close()
    return {"after_1000": before, "after_11000": after, "ms_an_update": round(1000 * seconds / UPDATES, 2)}


def _heap_mib(page: Page) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return round(float(session.send("Runtime.getHeapUsage")["usedSize"]) / 2**20, 2)


def cost_of_open_pages(browser: Browser, network: LocalNetwork) -> dict[str, float]:
    """Measure the router's processor time in an idle network, without pages and with ten."""
    status = json.load(urlopen(f"{network.url}/status"))
    router = psutil.Process(status["process"]["pid"])

    def share() -> float:
        before, began = sum(router.cpu_times()[:2]), time.monotonic()
        time.sleep(STRETCH_S)
        return float(sum(router.cpu_times()[:2]) - before) / (time.monotonic() - began)

    none = share()
    contexts = [browser.new_context() for _ in range(PAGES)]
    for context in contexts:
        page = context.new_page()
        page.goto(network.url)
        page.wait_for_selector(".map circle", state="attached")
    ten = share()
    for context in contexts:
        context.close()
    return {"without": round(none, 4), "with_ten_pages": round(ten, 4), "cores_for_ten": round(ten - none, 4)}


def take_pictures(browser: Browser, url: str) -> None:
    with ThreadPoolExecutor(12) as threads:
        streams = [threads.submit(_talk, url, i) for i in range(96)]
        page = browser.new_context(viewport={"width": 1200, "height": 820}, reduced_motion="reduce").new_page()
        page.goto(url)
        page.wait_for_timeout(8000)
        page.screenshot(path=DOCS / "page-overview.png")
        page.goto(f"{url}#playground")
        page.wait_for_selector("option[value=ember]", state="attached")
        page.fill("[aria-label=Message]", "What is the airport code of Lisbon?")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".turn.assistant .facts:has-text('of prompt')")
        page.screenshot(path=DOCS / "page-playground.png")
        page.click("text=Why this site?")
        page.wait_for_selector("text=What each site would cost")
        page.screenshot(path=DOCS / "page-routing.png")
        for stream in streams:
            stream.result()


def _talk(url: str, number: int) -> None:
    messages = [{"role": "user", "content": f"Talk about {number}"}]
    body = {"model": "ember", "stream": True, "max_tokens": 900, "min_tokens": 800, "messages": messages}
    asked = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(asked, timeout=120) as answer:
        answer.read()


if __name__ == "__main__":
    main()
