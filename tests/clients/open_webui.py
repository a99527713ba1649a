"""Open WebUI, the package, in a headless Chromium: one process reaches the models by Ollama's API, another by OpenAI's, and each check uses both.

No request may be refused; the router's log has the status of each.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import harness
from harness import ANSWER, CHAT, ENDLESS, KEY, OPENAI_URL, QUESTION, ROUTER, VECTORS, expect, until
from playwright.sync_api import Browser, Page, sync_playwright

AGENT = "agent"  # its context has room for the definitions of Open WebUI's built-in tools
ROUTER_LOG = Path(os.environ["PILOTLIGHT_ROUTER_LOG"])
LOGGED = re.compile(r" INFO \S+ (?:GET|POST) (/\S*) (\d+) ")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_S, WAIT_S = 300.0, 120.0
DOCUMENT = "The airport code of Lisbon is LIS.\n" * 20
SETTINGS = {
    "WEBUI_AUTH": "False", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_MODEL": VECTORS,
    # Titles and tags have to end: other models write some of them up to the end of their context.
    "TASK_MODEL": AGENT, "TASK_MODEL_EXTERNAL": AGENT, "ENABLE_RETRIEVAL_QUERY_GENERATION": "False",
    "WEBUI_SECRET_KEY": "a secret of this run, which ends with it", "ANONYMIZED_TELEMETRY": "False", "DO_NOT_TRACK": "true",
}  # fmt: skip
# The definitions of Open WebUI's built-in tools are longer than these models' context. This is its setting for such models.
WITHOUT_TOOLS = """(models) => Promise.all(models.map(async (id) => {
  const body = { id, name: id, base_model_id: null, meta: {}, params: { function_calling: "legacy" }, is_active: true };
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${localStorage.token}` };
  return (await fetch("/api/v1/models/create", { method: "POST", headers, body: JSON.stringify(body) })).status;
}))"""


class Connection(NamedTuple):
    """A connection to the models: Open WebUI's settings, and the paths that it then requests."""

    settings: dict[str, str]
    models: str
    chat: str
    embed: str


CONNECTIONS = (
    Connection(
        {"RAG_EMBEDDING_ENGINE": "ollama", "ENABLE_OPENAI_API": "False", "OLLAMA_BASE_URL": ROUTER},
        "/api/tags", "/api/chat", "/api/embed",
    ),
    Connection(
        {
            "RAG_EMBEDDING_ENGINE": "openai", "ENABLE_OLLAMA_API": "False", "OPENAI_API_BASE_URL": OPENAI_URL, "OPENAI_API_KEY": KEY,
            "RAG_OPENAI_API_BASE_URL": OPENAI_URL, "RAG_OPENAI_API_KEY": KEY,
        },
        "/v1/models", "/v1/chat/completions", "/v1/embeddings",
    ),
)  # fmt: skip


class Server(NamedTuple):
    connection: Connection
    url: str
    browser: Browser

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        with contextlib.closing(self.browser.new_page()) as page:
            page.set_default_timeout(WAIT_S * 1000)
            page.goto(self.url)
            yield page


@contextlib.contextmanager
def started(connection: Connection, browser: Browser) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "DATA_DIR": folder,
            **SETTINGS,
            **connection.settings,
        }
        command = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
        log = Path(folder) / "log"
        with log.open("wb") as sink, subprocess.Popen(command, env=environment, stdout=sink, stderr=sink) as process:
            try:
                server = Server(connection, f"http://127.0.0.1:{port}", browser)
                until(lambda: is_ready(server.url) or process.poll() is not None, START_S, "Open WebUI does not start")
                expect(process.poll() is None, log.read_text()[-1000:])
                greet(server)
                yield server
            finally:
                process.kill()


def is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def greet(server: Server) -> None:
    """Dismiss the news that a first visit shows, and turn off tools for models with a small context."""
    with server.page() as page:
        with page.expect_response("**/user/settings/update"):
            page.get_by_role("button", name="Okay, Let's Go!").click()
        expect(page.evaluate(WITHOUT_TOOLS, [CHAT, ENDLESS]) == [200, 200], "the models' settings")


def choose(page: Page, model: str) -> list[str]:
    """Choose a model in the page's list; return the names in the list."""
    page.click("#model-selector-model-button")
    options = page.locator("[role=option]")
    options.first.wait_for()
    names = [option.get_attribute("data-value") for option in options.all()]
    page.click(f"[role=option][data-value={model}]")
    return names


def send(page: Page, text: str) -> None:
    page.click("#chat-input")
    page.keyboard.insert_text(text)
    page.click("#send-message-button")


def answer(page: Page) -> str:
    return " ".join(page.locator(".chat-assistant").all_inner_texts())


def wait_for_answer(page: Page, text: str) -> None:
    """Wait until the answer has this text; fail with the part that is shown."""
    wait_in(page, lambda: text in answer(page), f"no {text!r} in the answer")


def wait_in(page: Page, condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        expect(time.monotonic() < deadline, f"{otherwise}: {answer(page)!r}")
        page.wait_for_timeout(100)  # the page's events are handled meanwhile


@contextlib.contextmanager
def answered(paths: dict[str, int], *refusals: int) -> Iterator[None]:
    """Check that requests for these paths, at least as many as given, were answered in the block, and none refused but with `refusals`."""
    began = ROUTER_LOG.stat().st_size
    yield

    def logged() -> list[tuple[str, int]]:
        lines = ROUTER_LOG.read_bytes()[began:].decode()
        return [(path, int(status)) for path, status in LOGGED.findall(lines)]

    def are_enough() -> bool:
        found = logged()
        return all(found.count((path, 200)) >= least for path, least in paths.items())

    until(are_enough, WAIT_S, f"not enough of {paths} in the router's log")
    refused = [one for one in logged() if one[1] >= 400 and one[1] not in refusals]
    expect(not refused, refused)


def chat(server: Server) -> None:
    connection = server.connection
    with answered({connection.models: 1, connection.chat: 1}), server.page() as page:
        names = choose(page, CHAT)
        expect({CHAT, ENDLESS, AGENT, VECTORS} <= set(names), names)
        send(page, QUESTION)
        wait_for_answer(page, ANSWER)


def stream(server: Server) -> None:
    """Check that the page shows a growing answer."""
    with answered({}), server.page() as page:
        choose(page, ENDLESS)
        send(page, QUESTION)
        wait_in(page, lambda: len(answer(page)) > 20, "no part of the answer")
        shown = len(answer(page))
        wait_in(page, lambda: len(answer(page)) > shown, "no further part of the answer")
        stop(page)


def stop(page: Page) -> None:
    """Click on the page's button, and check that the engine stops."""
    page.get_by_role("button", name="Stop").click()
    harness.expect_idle()


def cancel(server: Server) -> None:
    with answered({}), server.page() as page:
        choose(page, ENDLESS)
        send(page, QUESTION)
        harness.expect_running()
        stop(page)


def tools(server: Server) -> None:
    """Check that a request with the definitions of Open WebUI's built-in tools is answered."""
    with answered({server.connection.chat: 1}), server.page() as page:
        choose(page, AGENT)
        send(page, QUESTION)
        page.get_by_role("button", name="Regenerate").wait_for()


def embeddings(server: Server) -> None:
    """Check that a document's and a question's vectors are requested, and that the document reaches the answer."""
    connection = server.connection
    with answered({connection.embed: 2, connection.chat: 1}), server.page() as page:
        choose(page, CHAT)
        file = {"name": "lisbon.txt", "mimeType": "text/plain", "buffer": DOCUMENT.encode()}
        with answered({connection.embed: 1}):
            page.locator("input[type=file]:not([accept])").set_input_files(file)
        send(page, QUESTION)
        wait_for_answer(page, ANSWER)
        wait_for_answer(page, "1 Source")


def errors(server: Server) -> None:
    """Check that the page shows the sentence of a refusal."""
    with answered({}, 400), server.page() as page:
        choose(page, CHAT)
        send(page, harness.TOO_LONG)
        wait_for_answer(page, "maximum context length")


def open_servers(stack: contextlib.ExitStack) -> list[Server]:
    playwright = stack.enter_context(sync_playwright())
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
    stack.callback(browser.close)
    return [stack.enter_context(started(connection, browser)) for connection in CONNECTIONS]


def main() -> None:
    with (
        ThreadPoolExecutor(1) as thread,
        contextlib.ExitStack() as closing,
    ):  # Playwright's event loop runs in its thread
        stack = contextlib.ExitStack()
        closing.callback(lambda: thread.submit(stack.close).result())
        servers = thread.submit(open_servers, stack).result()

        def of_both(check: Callable[[Server], None]) -> Callable[[], None]:
            return lambda: thread.submit(lambda: [check(server) for server in servers]).result()

        checks = {check.__name__: of_both(check) for check in (chat, stream, tools, embeddings, errors, cancel)}
        harness.main("open-webui", checks, check_s=300)


if __name__ == "__main__":
    main()
