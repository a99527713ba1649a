"""A newcomer's first minute, by a script: from `make up` to an answer that streams into a browser.

python -m load_tests.scenarios.first_minute with pictures in docs/

`make up` runs with its dependencies already installed; a first installation downloads for minutes. To imitate a person, each step starts after READ_S
seconds, and keys are pressed KEY_S apart.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from playwright.sync_api import Page

from load_tests.records import write_record
from load_tests.scenarios.page import chromium

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
READ_S = 2.0
KEY_S = 0.08  # seconds between keys: 60 words a minute would be 0.2 s, but many people paste their question
QUESTION = "What is the airport code of Lisbon?"
READY_S = 600.0  # limit until the network is ready, including the time in which `make up` installs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    steps: list[dict[str, Any]] = []

    def did(what: str) -> None:
        steps.append({"step": what, "at_s": round(time.monotonic() - began, 1)})
        print(f"{steps[-1]['at_s']:6.1f} s  {what}", flush=True)

    network = subprocess.Popen(
        ["make", "up"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        url = address_of(network)
        did("`make up` printed its address")
        with chromium() as browser:
            page = browser.new_context(viewport={"width": 1200, "height": 820}, reduced_motion="reduce").new_page()
            walk(page, url, did)
    finally:
        os.killpg(network.pid, signal.SIGTERM)
        network.wait(30)
    print(json.dumps(steps, indent=2))
    if not options.no_record:
        print(
            "record:", write_record("first-minute", {"steps": steps, "read_s": READ_S, "key_s": KEY_S}, ("playwright",))
        )


def address_of(network: "subprocess.Popen[str]") -> str:
    """Return the address that the network prints when it is ready.

    Its further output is read and dropped. Raises SystemExit if it ends, or is not ready within READY_S.
    """
    assert network.stdout is not None

    def end_late() -> None:
        time.sleep(READY_S)
        if not seen_ready.is_set():
            os.killpg(network.pid, signal.SIGKILL)

    seen, seen_ready = list[str](), Event()
    Thread(target=end_late, daemon=True).start()
    for line in network.stdout:
        seen.append(line)
        if found := re.search(r"ready: (http://\S+)", line):
            seen_ready.set()
            Thread(target=network.stdout.read, daemon=True).start()
            return found[1]
    raise SystemExit("`make up` ended:\n" + "".join(seen[-20:]))


def walk(page: Page, url: str, did: Any) -> None:
    page.goto(url)
    page.wait_for_selector(".map circle.healthy")
    did("the page shows the network")
    page.wait_for_timeout(1000 * READ_S)
    page.screenshot(path=DOCS / "minute-1-network.png")
    page.click("nav a[href='#playground']")
    page.wait_for_selector("option[value=ember]", state="attached")
    did("the playground is open")
    page.wait_for_timeout(1000 * READ_S)
    page.click("[aria-label=Message]")
    page.keyboard.type(QUESTION, delay=1000 * KEY_S)
    page.screenshot(path=DOCS / "minute-2-question.png")
    did("a question is typed")
    page.click("text=Send")
    page.wait_for_function("() => document.querySelector('.turn.assistant')?.textContent.length > 1")
    did("the answer's first words are there")
    page.wait_for_selector(".turn.assistant .facts:has-text('of prompt')")
    did("the answer is whole")
    page.screenshot(path=DOCS / "minute-3-answer.png")
    page.wait_for_timeout(1000 * READ_S)
    page.click("text=Why this site?")
    page.wait_for_selector("text=What each site would cost")
    did("the page says why that site answered")


if __name__ == "__main__":
    main()
