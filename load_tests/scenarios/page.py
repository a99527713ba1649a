"""The page in a headless Chromium: sizes, first paint, memory over many updates, cost for the router.

python -m load_tests.scenarios.page [--minutes N] [--no-record]

Ten pages stay open for N minutes; use 60 to see whether the router's memory grows.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from load_tests.local_network import LocalNetwork
from load_tests.records import write_record
from pilotlight.page.routes import STATIC

PAINTS = 9
UPDATES = 10_000
PAGES = 10
QUIET_S, WARM_UP_S, SAMPLE_S = 20.0, 10.0, 5.0
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
# Sends one second of the feed to the page's own listener repeatedly.
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
    parser.add_argument("--minutes", type=float, default=3.0, help="how long ten pages stay open")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"bytes": sizes()}
    with LocalNetwork() as network, chromium() as browser:
        results["first_paint_ms"] = first_paints(browser, network.url)
        results["heap_mib"] = heap_over_updates(browser, network.url)
        results["router"] = cost_of_open_pages(browser, network, options.minutes)
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
    """Measure the first paint in browsers with an empty cache."""
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
    """Measure the JavaScript heap after garbage collection.

    The first measurement is made when the tab's ring buffers are full, the second after UPDATES more updates.
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


def cost_of_open_pages(browser: Browser, network: LocalNetwork, minutes: float) -> dict[str, float]:
    """Measure an idle network's router: CPU use without pages and with ten, and memory growth."""
    status = json.load(urlopen(f"{network.url}/status"))
    router = psutil.Process(status["process"]["pid"])

    def used(seconds: float) -> tuple[float, list[tuple[float, float]]]:
        """Return the cores used, and (second, resident MiB) over time."""
        before, began, memory = sum(router.cpu_times()[:2]), time.monotonic(), []
        while (now := time.monotonic() - began) < seconds:
            memory.append((now, router.memory_info().rss / 2**20))
            time.sleep(min(SAMPLE_S, seconds - now))
        return float(sum(router.cpu_times()[:2]) - before) / (time.monotonic() - began), memory

    none, _ = used(QUIET_S)
    contexts = [browser.new_context() for _ in range(PAGES)]
    pages = [context.new_page() for context in contexts]
    for page in pages:
        page.goto(network.url)
        page.wait_for_selector(".map circle", state="attached")
    used(WARM_UP_S)  # until the ring buffers of pages and router are full
    heap = _heap_mib(pages[0])
    ten, memory = used(60 * minutes)
    slope, _ = statistics.linear_regression(*zip(*memory, strict=True))
    found = {
        "pages": PAGES, "minutes": minutes, "cores_without": round(none, 4), "cores_with_ten": round(ten, 4),
        "cores_for_ten": round(ten - none, 4), "mib_at_first": round(memory[0][1], 2), "mib_at_last": round(memory[-1][1], 2),
        "mib_an_hour": round(3600 * slope, 2), "page_heap_mib_at_first": heap, "page_heap_mib_at_last": _heap_mib(pages[0]),
    }  # fmt: skip
    for context in contexts:
        context.close()
    return found


if __name__ == "__main__":
    main()
