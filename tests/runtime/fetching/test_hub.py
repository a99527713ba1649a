"""A search on the hub in a separate process, with a fake hub on loopback."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from pilotlight.runtime.fetching.errors import FetchError
from pilotlight.runtime.fetching.hub import MAX_FOUND, searched

pytestmark = pytest.mark.process

FOUND = [
    {
        "id": "org/Tiny-Llama", "downloads": 1200, "gated": False, "tags": ["license:apache-2.0", "safetensors"],
        "config": {"architectures": ["LlamaForCausalLM"], "tokenizer_config": {"chat_template": "x" * 100_000}},
        "safetensors": {"total": 1_000_000, "parameters": {"BF16": 1_000_000}},
    },
    {"id": "org/<b>bare</b>", "gated": "manual", "tags": []},
]  # fmt: skip


@contextmanager
def hub_at(body: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Run a server with the same response to every request; return its URL, and the list of requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


async def test_models_are_described_as_the_hub_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_at(json.dumps(FOUND).encode()) as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        first, second = await searched("tiny llama & more")
    assert first == {
        "id": "org/Tiny-Llama", "architectures": ["LlamaForCausalLM"], "parameters": 1_000_000, "license": "apache-2.0",
        "downloads": 1200, "is_gated": False,
    }  # fmt: skip
    assert (second["id"], second["is_gated"], second["architectures"]) == ("org/<b>bare</b>", True, [])
    query = parse_qs(urlsplit(asked[0]).query)
    assert query["search"] == ["tiny llama & more"]
    assert query["limit"] == [str(MAX_FOUND)]


async def test_a_hub_that_refuses_or_answers_nonsense_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for body, status in ((b"<html>", 200), (b'{"error": "no"}', 403)):
        with hub_at(body, status) as (url, _):
            monkeypatch.setenv("HF_ENDPOINT", url)
            with pytest.raises(FetchError, match="the hub cannot be searched: "):
                await searched("llama")


async def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nothing listens here after this scope
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(FetchError, match=r"the hub cannot be searched|did not answer"):
        await searched("llama")


async def test_a_site_that_was_set_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FetchError, match=r"(?i)offline"):
        await searched("llama")


async def test_a_hub_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(FetchError, match="did not answer within"):
            await searched("llama", timeout_s=0.5)
