"""Operating a network with the page: clicks and seconds of each step, and pictures of each view.

python -m load_tests.scenarios.operate [--pictures FOLDER] [--no-record]

Starts a network of three sites by `pilotlight up`, with functions and a ledger, with an empty state directory. A packed model is pulled from a web
server of this machine. Pictures show every view in light, dark and telephone-width layouts, while requests are answered.
"""

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import uvicorn
from playwright.sync_api import Browser, Page, expect
from starlette.staticfiles import StaticFiles

from load_tests.local_network import LocalNetwork, free_ports
from load_tests.records import write_record
from load_tests.scenarios.deploys import ENVIRONMENT, SITE, TOKEN
from load_tests.scenarios.page import chromium

VIEWS = ["overview", "playground", "routing", "models", "sites", "functions", "usage", "requests", "timeline"]
LOOKS = {"light": (1200, "light"), "dark": (1200, "dark"), "phone": (390, "light")}
QUALITY = 45  # quality of WebP: text stays sharp, and no picture takes more than 40 kB
STREAMS = 24  # streams that are open while pictures are taken
QUESTION = "What is the airport code of Lisbon?"
FUNCTION = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        print("the swallow has landed")
        visits = int(await self.env.NOTES.get("visits") or 0) + 1
        await self.env.NOTES.put("visits", str(visits))
        return Response(f"Hello, visitor {visits}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="a folder for them")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ledger = f'\n[ledger]\ndirectory = "{folder / "ledger"}"\n'
        with (
            served(*packed(folder)) as source,
            LocalNetwork(
                environment={**ENVIRONMENT, "PILOTLIGHT_MODELS": str(folder / "models")},
                network_settings=ledger,
                site_settings=SITE,
            ) as network,
            chromium() as browser,
        ):
            deploy(folder / "hello", network.url)
            steps: list[dict[str, Any]] = [
                {"step": "`pilotlight up` is ready", "clicks": 0, "seconds": round(network.ready_s, 1)}
            ]
            steps += walk(browser, network.url, source)
            if options.pictures is not None:
                take_pictures(browser, network.url, options.pictures)
    results = {
        "steps": steps,
        "clicks": sum(each["clicks"] for each in steps),
        "seconds": round(sum(each["seconds"] for each in steps), 1),
    }
    print(json.dumps(results, indent=2))
    if not options.no_record:
        print("record:", write_record("operate", results, ("playwright",)))


def packed(folder: Path) -> tuple[Path, str]:
    """Pack the embedded model for a web server. Return the folder, and the digest as a URL's fragment."""
    out = folder / "web" / "second.packed"
    out.parent.mkdir()
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", "pack", "embedded:ember", "--out", str(out)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"#sha256=[0-9a-f]{64}", said)
    assert found is not None, said
    return out, found[0]


@contextmanager
def served(directory: Path, digest: str) -> Iterator[str]:
    """Serve a folder on loopback; yield its pinned URL."""
    config = uvicorn.Config(StaticFiles(directory=directory.parent), port=free_ports(1)[0], log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{config.port}/{directory.name}{digest}"
    finally:
        server.should_exit = True
        thread.join()


def deploy(folder: Path, url: str) -> None:
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "entry.py").write_text(FUNCTION)
    settings = 'name = "hello"\nmain = "src/entry.py"\ncompatibility_date = "2026-01-01"\ncompatibility_flags = ["python_workers"]\n'
    settings += '[[kv_namespaces]]\nbinding = "NOTES"\nid = "notes"\n'
    (folder / "wrangler.toml").write_text(settings)
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", "deploy", str(folder), "--url", url]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PILOTLIGHT_DEPLOY_TOKEN": TOKEN})
    for _ in range(3):
        subprocess.run(["curl", "-sf", f"{url}/fn/hello/"], check=True, capture_output=True)


def walk(browser: Browser, url: str, source: str) -> list[dict[str, Any]]:
    """Do each step as a person does, and count clicks and seconds."""
    page = browser.new_context(viewport={"width": 1200, "height": 900}, reduced_motion="reduce").new_page()
    page.set_default_timeout(90_000)
    clicks = 0

    def click(target: Any) -> None:
        nonlocal clicks
        clicks += 1
        (page.locator(target) if isinstance(target, str) else target).first.click()

    def pull() -> None:
        click("nav a[href='#models']")
        page.get_by_label("Another source").fill(source)
        click("button:has-text('Pull…')")
        for box in page.locator("dialog input[type=checkbox]").all()[1:]:
            box.uncheck()
        click("dialog button:text-is('Pull')")
        expect(page.locator("main .row", has=page.get_by_text(source, exact=True))).to_contain_text(
            "done", timeout=90_000
        )

    def run() -> None:
        click(page.get_by_role("button", name="Run second", exact=True))
        click("dialog button:text-is('Run')")
        expect(page.locator("section:has(h2:text-is('second')) td:has-text('awake')")).to_have_count(1, timeout=90_000)

    def ask() -> None:
        click("nav a[href='#playground']")
        page.get_by_label("Model").select_option("second")
        page.fill("[aria-label=Message]", QUESTION)
        click("button:text-is('Send')")
        page.wait_for_selector(".turn.assistant .facts:has-text('of prompt')")

    def make_key() -> None:
        click("nav a[href='#usage']")
        click("button:has-text('New key')")
        page.locator("dialog").get_by_label("Name").fill("alice")
        click("dialog button:has-text('Create')")
        key = page.inner_text("dialog .key")
        click("dialog button:has-text('Done')")
        body = json.dumps({"model": "second", "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]})
        headers = ["-H", f"authorization: Bearer {key}", "-H", "content-type: application/json"]
        subprocess.run(
            ["curl", "-sf", f"{url}/v1/chat/completions", *headers, "-d", body], check=True, capture_output=True
        )
        page.wait_for_selector("td:text-is('alice') ~ td:text-is('second')")

    def find_line() -> None:
        click("nav a[href='#functions']")
        click(page.get_by_role("button", name="logs of hello"))
        page.get_by_label("Text in lines, errors and paths").fill("swallow")
        click("button:text-is('Search')")
        page.wait_for_selector("pre.log:has-text('the swallow has landed')")

    def look_into_data() -> None:
        click(page.get_by_role("button", name="look into notes"))
        page.wait_for_selector("tr:has(span:text-is('visits'))")

    def drain() -> None:
        click("nav a[href='#sites']")
        click(page.get_by_role("button", name="drain sin1"))
        click("dialog button:has-text('drain')")
        click(page.get_by_role("button", name="resume sin1"))
        page.wait_for_selector("tr:has-text('sin1') td:has-text('healthy')")

    def look() -> None:
        page.goto(url)
        page.wait_for_selector(".map circle.healthy")

    steps: dict[str, Callable[[], None]] = {
        "look": look, "pull a second model": pull, "run it at one site": run, "ask it": ask, "make a key, which curl uses": make_key,
        "find a function's log line": find_line, "look into its data": look_into_data, "drain a site and resume it": drain,
    }  # fmt: skip
    told = []
    for name, step in steps.items():
        clicks, began = 0, time.monotonic()
        step()
        told.append({"step": name, "clicks": clicks, "seconds": round(time.monotonic() - began, 1)})
        print(f"{told[-1]['seconds']:6.1f} s  {clicks} clicks  {name}", flush=True)
    return told


def take_pictures(browser: Browser, url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(STREAMS) as threads:
        ended = threading.Event()
        streams = [threads.submit(_talk, url, i, ended) for i in range(STREAMS)]
        try:
            for look, (width, theme) in LOOKS.items():
                page = browser.new_context(
                    viewport={"width": width, "height": 820},
                    color_scheme=theme,  # type: ignore[arg-type]
                    reduced_motion="reduce",
                ).new_page()
                page.goto(url)
                page.wait_for_selector(".map circle.healthy")
                for view in VIEWS:
                    page.click(f"nav a[href='#{view}']")
                    _open(page, view)
                    page.wait_for_timeout(2500)  # until the view has loaded its data besides the feed
                    _picture(page, folder / f"{view}-{look}.webp")
        finally:
            ended.set()
        for stream in streams:
            stream.result()


def _open(page: Page, view: str) -> None:
    """Use a view in a typical way before its picture is taken."""
    if view == "playground":
        page.wait_for_selector("option[value=ember]", state="attached")
        page.get_by_label("Model").select_option("ember")
        page.fill("[aria-label=Message]", QUESTION)
        page.click("button:text-is('Send')")
        page.wait_for_selector(".turn.assistant .facts:has-text('of prompt')")
    if view == "routing":
        page.click("button:text-is('Explain')")
        page.wait_for_selector("text=What each site would cost")
    if view == "functions":
        page.get_by_role("button", name="logs of hello").first.click()
        page.wait_for_selector("pre.log:has-text('the swallow has landed')")


def _picture(page: Page, file: Path) -> None:
    session = page.context.new_cdp_session(page)
    taken = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    file.write_bytes(base64.b64decode(taken["data"]))


def _talk(url: str, number: int, ended: threading.Event) -> None:
    """Send requests, one after the other, until the pictures are taken."""
    while not ended.is_set():
        messages = [{"role": "user", "content": f"Talk about {number}"}]
        body = {"model": "ember", "stream": True, "max_tokens": 300, "min_tokens": 200, "messages": messages}
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=120) as answer:
            answer.read()


if __name__ == "__main__":
    main()
