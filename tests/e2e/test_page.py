"""The page of a running network in a headless Chromium: each view, a chat, a site that dies, keys, the dark theme and narrow windows."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from load_tests.local_network import LocalNetwork, free_ports
from pilotlight.runtime.fetching.short_names import EMBEDDED
from pilotlight.sites.key_files import new_key
from tests.e2e.conftest import NO_STANDBY
from tests.page.browser import browser, needs_chromium, opened, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
VIEWS = ["overview", "playground", "routing", "models", "sites", "functions", "usage", "requests", "timeline"]
SCHEMA = '{"type": "object", "properties": {"city": {"enum": ["Lisbon", "Oslo"]}}, "required": ["city"], "additionalProperties": false}'


@pytest.fixture(scope="module")
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork(engine_settings=NO_STANDBY) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    with browser() as started:
        yield started


def ask(page: "Page", text: str) -> None:
    page.fill("[aria-label=Message]", text)
    page.keyboard.press("Control+Enter")


def until_answered(page: "Page", turns: int = 1) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
    facts = page.locator(".turn.assistant .facts")
    expect(facts).to_have_count(turns)
    expect(facts.last).to_contain_text("of prompt", timeout=60_000)


def test_every_view_opens_by_the_keyboard_and_is_accessible_in_both_themes(
    network: LocalNetwork, chromium: "Browser"
) -> None:
    for theme in ("light", "dark"):
        with opened(chromium, network.url, theme=theme) as page:
            page.wait_for_selector(".map circle.healthy")
            for i, view in enumerate(VIEWS):
                page.keyboard.press(str(i + 1))
                page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")
                found = Axe().run(page).response["violations"]
                assert not found, json.dumps(found, indent=1)[:3000]


def test_a_chat_streams_says_where_from_and_stays_in_the_tab(network: LocalNetwork, chromium: "Browser") -> None:
    with opened(chromium, f"{network.url}#playground") as page:
        page.wait_for_selector("option[value=ember]", state="attached")
        ask(page, "What is the airport code of Lisbon?")
        until_answered(page)
        told = page.inner_text(".turn.assistant")
        assert "LIS" in told
        assert "first token" in told
        assert "from " in told
        page.reload()
        page.wait_for_selector("text=LIS")
        page.click("text=Why this site?")
        page.wait_for_selector("text=What each site would cost")
        assert page.locator("main .bar").count() >= 3
        page.keyboard.press("Tab")


def test_the_site_that_is_wished_for_answers(network: LocalNetwork, chromium: "Browser") -> None:
    with opened(chromium, f"{network.url}#playground") as page:
        page.wait_for_selector("option[value=ember]", state="attached")
        for site in ("iad1", "sin1"):
            page.get_by_label("Site").select_option(site)
            ask(page, "What is the airport code of Lisbon?")
            expect(page.locator(".turn.assistant .facts").last).to_contain_text(f"from {site}", timeout=60_000)
            expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)


def test_an_answer_follows_a_schema_shows_probabilities_and_is_made_again(
    network: LocalNetwork, chromium: "Browser"
) -> None:
    with opened(chromium, f"{network.url}#playground") as page:
        page.wait_for_selector("option[value=ember]", state="attached")
        page.get_by_label("JSON schema of the answer").fill(SCHEMA)
        page.get_by_label("log-probabilities").check()
        ask(page, "Which city?")
        until_answered(page)
        tokens = page.locator(".turn.assistant .token")
        assert json.loads("".join(tokens.all_inner_texts()))["city"] in ("Lisbon", "Oslo")
        assert "%" in (tokens.first.get_attribute("title") or "")
        page.click("text=Again")
        until_answered(page)
        page.get_by_label("JSON schema of the answer").fill("{")
        ask(page, "And now?")
        page.wait_for_selector("[role=alert]:has-text('the schema must be JSON')")


def test_a_tools_result_is_typed_in_by_hand(network: LocalNetwork, chromium: "Browser") -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    with opened(chromium, f"{network.url}#playground") as page:
        page.wait_for_selector("option[value=ember]", state="attached")
        page.get_by_label("Tools (JSON list)").fill(json.dumps([tool]))
        page.get_by_label("Seed").fill("1")
        page.get_by_label("Temperature").fill("0")
        ask(page, "What is the weather in Lisbon?")
        until_answered(page)
        page.get_by_label("Result of get_weather").fill('{"temperature": 21}')
        page.keyboard.press("Enter")
        until_answered(page, 2)
        assert page.locator(".turn.tool").inner_text().strip() == '{"temperature": 21}'


def test_stop_ends_an_answer_and_not_the_conversation(network: LocalNetwork, chromium: "Browser") -> None:
    with opened(chromium, f"{network.url}#playground") as page:
        page.wait_for_selector("option[value=ember]", state="attached")
        page.get_by_label("JSON schema of the answer").fill('{"type": "string", "minLength": 2000}')
        page.get_by_label("Most tokens").fill("3000")
        slow = {"offline": False, "latency": 0, "downloadThroughput": 4000, "uploadThroughput": -1}
        page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
        ask(page, "Talk for long")
        until(page, "() => document.querySelector('.turn.assistant')?.textContent.length > 20")
        page.click("button:has-text('Stop')")
        page.wait_for_selector(".turn.assistant .facts:has-text('stopped')")
        page.get_by_label("JSON schema of the answer").fill("")
        ask(page, "What is the airport code of Lisbon?")
        until(page, "() => document.querySelectorAll('.turn.assistant .facts').length === 2")
        until_answered(page, 2)


def test_a_second_model_is_run_answers_and_is_removed(
    network: LocalNetwork, chromium: "Browser", tmp_path: Path
) -> None:
    source = tmp_path / "copy-of-ember"
    shutil.copytree(EMBEDDED / "ember", source, ignore=shutil.ignore_patterns("eagle3", "mini", "*.py"))
    with opened(chromium, f"{network.url}#models") as page:
        page.get_by_label("Another source").fill(str(source))
        page.click("button:has-text('Run…')")
        page.locator("dialog").get_by_label("ams1").uncheck()
        page.locator("dialog").get_by_label("iad1").check()
        page.locator("dialog button:text-is('Run')").click()
        served = page.locator("section:has(h2:text-is('copy-of-ember'))")
        expect(served.locator("td:has-text('awake')")).to_have_count(1, timeout=60_000)
        page.keyboard.press("2")
        page.get_by_label("Model").select_option("copy-of-ember")
        ask(page, "What is the airport code of Lisbon?")
        until_answered(page)
        expect(page.locator(".turn.assistant .facts").last).to_contain_text("from iad1")
        page.click("nav a[href='#requests']")
        row = page.locator("main tr:has-text('copy-of-ember')").first
        expect(row).to_contain_text("ok")
        row.locator("summary").click()
        expect(row).to_contain_text("tokens of prompt")  # the site publishes this count
        page.click("nav a[href='#models']")
        served.get_by_role("button", name="remove copy-of-ember at iad1").click()
        page.locator("dialog button:has-text('remove')").click()
        expect(served).to_have_count(0, timeout=60_000)


def test_a_key_is_made_shown_once_used_and_revoked(network: LocalNetwork, chromium: "Browser") -> None:
    with opened(chromium, f"{network.url}#usage") as page:
        page.click("button:has-text('New key')")
        page.locator("dialog").get_by_label("Name").fill("alice")
        page.locator("dialog button:has-text('Create')").click()
        key = page.inner_text("dialog .key")
        page.click("dialog button:has-text('Done')")
        assert key not in page.content()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        body = {"model": "ember", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        with urlopen(Request(f"{network.url}/v1/chat/completions", json.dumps(body).encode(), headers)) as answer:
            assert answer.status == 200
        page.click("nav a[href='#requests']")
        page.wait_for_selector("main tr:has(td:text-is('alice'))")
        page.click("nav a[href='#usage']")
        page.get_by_role("button", name="revoke alice").click()
        page.locator("dialog button:has-text('revoke')").click()
        page.wait_for_selector("main tr:has-text('alice'):has-text('revoked')")


def test_copies_of_a_request_are_answered_by_other_clients(network: LocalNetwork, chromium: "Browser") -> None:
    question = "What is the airport code of Lisbon? It's urgent"  # data
    body = {"model": "ember", "stream": True, "max_tokens": 30, "messages": [{"role": "user", "content": question}]}
    script = "async given => (await import('./page/copies.js')).copies(...given)"
    with opened(chromium, network.url) as page:
        copies = page.evaluate(script, ["chat/completions", body, f"{network.url}/"])
    assert [*copies] == ["curl", "Python", "JavaScript", "LiteLLM", "Function"]
    commands = {"data: [DONE]": ["bash", "-c", copies["curl"]], "LIS": [sys.executable, "-c", copies["Python"]]}
    for seen, command in commands.items():
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert seen in done.stdout, done.stdout
    for name in ("LiteLLM", "Function"):
        compile(copies[name], name, "exec")


def test_it_is_dark_where_the_system_is_and_fits_a_telephone(network: LocalNetwork, chromium: "Browser") -> None:
    with opened(chromium, network.url, width=360, theme="dark") as page:
        for view in VIEWS:
            page.goto(f"{network.url}#{view}")
            page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in back[4:-1].split(",")) < 60
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_keys_are_asked_for_and_decide_what_one_may_do(chromium: "Browser", tmp_path: Path) -> None:
    viewer_key, viewer = new_key("viewer", ("models", "metrics"))
    boss_key, boss = new_key("boss", ("admin",))
    tables = "".join(
        f'\n[[keys]]\nname = "{one.name}"\nkey_sha256 = "{one.key_sha256}"\nscopes = {[*one.scopes]}\n'
        for one in (viewer, boss)
    )
    tables += f'\n[ledger]\ndirectory = "{tmp_path}"\n'
    with (
        LocalNetwork(
            num_sites=1, network_settings=f"require_key = true\n{tables}", engine_settings=NO_STANDBY
        ) as network,
        opened(chromium, network.url) as page,
    ):
        page.fill("[aria-label=Key]", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]:has-text('unknown')")
        page.fill("[aria-label=Key]", viewer_key)
        page.keyboard.press("Enter")
        page.wait_for_selector(".map circle.healthy")
        page.keyboard.press("5")
        page.wait_for_selector("text=ams1")
        assert page.locator("button:has-text('drain')").count() == 0
        page.keyboard.press("2")
        page.wait_for_selector("option[value=ember]", state="attached")
        ask(page, "What is the airport code of Lisbon?")
        until_answered(page)
        page.keyboard.press("Escape")
        page.click("nav a[href='#usage']")
        page.wait_for_selector("text=Requests by how they ended")
        assert page.locator("h2:text-is('Accounts')").count() == 0, "a viewer must not see the usage of other accounts"
        page.click("text=Sign out")
        page.wait_for_selector("text=This network requires a key")
        page.fill("[aria-label=Key]", boss_key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#link:has-text('live')")
        page.click("nav a[href='#usage']")
        page.wait_for_selector("section:has(h2:text-is('Accounts')) td:text-is('viewer')")
        page.click("nav a[href='#models']")
        page.click("button:has-text('sleep')")
        page.wait_for_selector("td:has-text('asleep in memory'), td:has-text('on disk')")
        page.click("button:has-text('wake')")
        page.wait_for_selector("td:has-text('awake')")
        page.click("nav a[href='#sites']")
        page.click("button:has-text('drain')")
        page.locator("dialog button:has-text('drain')").click()
        page.wait_for_selector("td:has-text('draining')")
        page.click("button:has-text('resume')")
        page.wait_for_selector("td:has-text('healthy')")


def test_one_site_alone_has_a_page_too(chromium: "Browser") -> None:
    port = free_ports(1)[0]
    options = f"serve ember --port {port} --api-key letmein".split()
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        next(line for line in server.stdout if line.startswith("Ready: "))
        with opened(chromium, f"http://127.0.0.1:{port}/") as page:
            page.fill("[aria-label=Key]", "letmein")
            page.keyboard.press("Enter")
            page.wait_for_selector(".map circle.healthy", state="attached")
            assert page.locator("nav a[href='#routing']").count() == 0, "a single site has no routing"
            page.keyboard.press("2")
            page.wait_for_selector("option[value=ember]", state="attached")
            ask(page, "What is the airport code of Lisbon?")
            until_answered(page)
            assert "LIS" in page.inner_text(".turn.assistant")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def talk_for_long(url: str) -> None:
    """Read one long stream to its end."""
    body = {
        "model": "ember",
        "stream": True,
        "max_tokens": 1300,
        "min_tokens": 1200,
        "messages": [{"role": "user", "content": "Talk"}],
    }
    asked = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(asked, timeout=120) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_site_that_dies_under_streams_is_seen_on_the_map_and_they_move(
    network: LocalNetwork, chromium: "Browser"
) -> None:
    """This is the last test of the file, since the site needs some time to come back."""
    with opened(chromium, network.url) as page, ThreadPoolExecutor(3) as threads:
        page.wait_for_selector(".map circle.healthy")
        streams = [threads.submit(talk_for_long, network.url) for _ in range(3)]
        expect(page.locator(".map .way")).not_to_have_count(0, timeout=30_000)
        sites = page.request.get(f"{network.url}/status").json()["sites"]
        busiest = max(sites, key=lambda site: site["inflight"])
        process = next(one for one in busiest["status"]["processes"] if one["role"] == "site")
        os.kill(process["pid"], signal.SIGKILL)
        page.wait_for_selector(f"text={busiest['site']}: unhealthy")
        page.wait_for_selector("h2:has-text('Streams that moved')")
        for stream in streams:
            stream.result()
