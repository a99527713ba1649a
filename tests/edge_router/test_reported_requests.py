"""Requests of other projects' clients that were refused once, at a site and at a router, streamed and not."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from pilotlight.edge_router.services.batches.lines import ENDPOINTS
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from tests.edge_router.fakes import router, start_its_store
from tests.edge_router.services.test_finetune_registry import ServedSite
from tests.fakes import says

pytestmark = pytest.mark.process

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
RUN = "/client/v4/accounts/a/ai/run/@test/tiny"
SAID: dict[str, Any] = {"role": "user", "content": "Hi"}
CUT = '{"value": '
CUT_CHAT = [
    SAID,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "noop", "arguments": CUT}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "not run"},
    SAID,
]  # fmt: skip
CODEX = [
    {"type": "namespace", "name": "multi_agent_v1", "description": "x", "tools": [
        {"type": "function", "name": "spawn_agent", "parameters": {"type": "object"}}]},
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
]  # fmt: skip
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"}

REPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a call that was cut, in a chat": (CHAT, {"messages": CUT_CHAT}),
    "a call that was cut, in a run": (RUN, {"messages": CUT_CHAT}),
    "a call that was cut, in responses": (RESPONSES, {"input": [
        SAID, {"type": "function_call", "call_id": "c1", "name": "noop", "arguments": CUT},
        {"type": "function_call_output", "call_id": "c1", "output": "not run"}]}),
    "an assistant that said nothing": (CHAT, {"messages": [SAID, {"role": "assistant", "content": None, "tool_calls": []}, SAID]}),
    "verbosity in a chat": (CHAT, {"messages": [SAID], "verbosity": "low"}),
    "verbosity in responses": (RESPONSES, {"input": "Hi", "text": {"verbosity": "high"}}),
    "no nucleus and no stop string": (CHAT, {"messages": [SAID], "top_p": 0, "stop": ""}),
    "a prompt to be truncated": (TEXT, {"prompt": "x" * 600, "truncate_prompt_tokens": 20}),
    "a stop string that is shown, and a salt": (TEXT, {"prompt": "x", "stop": "o", "include_stop_str_in_output": True, "cache_salt": "s"}),
    "SGLang's regex": (CHAT, {"messages": [SAID], "regex": "[0-9]{3}"}),
    "a slash at the end": (f"{CHAT}/", {"messages": [SAID]}),
    "a system message amid messages": (MESSAGES, {"max_tokens": 30, "messages": [SAID, {"role": "system", "content": "Agents: none."}]}),
    "a billing line": (MESSAGES, {"max_tokens": 30, "messages": [SAID], "system": [BILLING, {"type": "text", "text": "Be brief."}]}),
    "Anthropic's search": (MESSAGES, {"max_tokens": 30, "messages": [SAID], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    "Codex's tools": (RESPONSES, {"input": "Hi", "tools": CODEX}),
    "items of Codex's": (RESPONSES, {"input": [
        SAID, {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}, {"type": "web_search_call", "id": "w"},
        {"type": "compaction", "encrypted_content": "x"}]}),
    "logprobs of a response": (RESPONSES, {"input": "Hi", "include": ["message.output_text.logprobs"]}),
}  # fmt: skip


class Servers(NamedTuple):
    urls: dict[str, str]  # URLs of a router and its site
    site: ServedSite
    http: aiohttp.ClientSession


@pytest.fixture
async def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    monkeypatch.setenv(HOP_SECRET_ENV, "s3cret")
    site = ServedSite("ams1", tmp_path / "ams1")
    await site.start()
    try:
        await start_its_store(site.url)
        async with router([site], tables={"responses": {"directory": str(tmp_path / "responses")}}) as running:
            yield Servers({"router": running.url, "site": site.url}, site, running.http)
    finally:
        await site.stop()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("at", ["router", "site"])
async def test_a_request_that_was_reported_as_refused_is_answered(servers: Servers, at: str, is_streamed: bool) -> None:
    for name, (path, fields) in REPORTED.items():
        servers.site.launcher.client.script = says("Hello, world", logprobs="include" in fields, per_step=20)
        body = {"model": "tiny", **fields, **({"stream": True} if is_streamed else {})}
        headers = {"authorization": "Bearer ", "host": "host.docker.internal"}
        async with servers.http.post(servers.urls[at] + path, json=body, headers=headers) as response:
            told = await response.text()
            assert response.status == 200, (name, told)
            assert response.content_type == ("text/event-stream" if is_streamed else "application/json"), name
        assert ("Hell" in told, '"error":{' in told) == (True, False), (name, told)


@pytest.mark.parametrize("at", ["router", "site"])
async def test_a_call_that_was_cut_and_is_kept_here_alone_is_gone_on_from(servers: Servers, at: str) -> None:
    tool = {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    }
    servers.site.launcher.client.script = says('<tool_call>{"name": "f", "arguments": {"text": "it', finish="length")
    url = servers.urls[at] + RESPONSES
    async with servers.http.post(url, json={"model": "tiny", "input": "Hi", "tools": [tool]}) as response:
        first = await response.json()
    assert (first["status"], first["output"][0]["arguments"]) == ("incomplete", '{"text": "it')
    servers.site.launcher.client.script = says("Fine.")
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "bad arguments"}
    again = {"model": "tiny", "previous_response_id": first["id"], "input": [result]}
    async with servers.http.post(f"{url}/input_tokens", json=again) as response:
        counted = await response.json()
    async with servers.http.post(url, json=again) as response:
        answer = await response.json()
    assert (response.status, answer["status"]) == (200, "completed"), answer
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


@pytest.mark.parametrize("at", ["router", "site"])
async def test_an_unanswerable_request_is_refused_in_the_clients_words(servers: Servers, at: str) -> None:
    url, http = servers.urls[at], servers.http
    form = aiohttp.FormData({"model": "tiny"})
    form.add_field("file", b"\0" * 100, filename="speech.wav")
    async with http.post(f"{url}/v1/audio/transcriptions", data=form) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with http.get(f"{url}/v1/models/nope", headers={"anthropic-version": "2023-06-01"}) as response:
        assert (response.status, (await response.json())["type"]) == (404, "error")
    page = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    async with http.options(url + CHAT, headers=page) as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (204, page["origin"])
    async with http.get(f"{url}/v1/models/", headers=page) as response:
        assert (response.status, response.headers.getall("access-control-allow-origin")) == (200, [page["origin"]])
    for method in ("HEAD", "GET"):
        async with http.request(method, f"{url}/") as response:
            assert response.status == 200
    async with http.get(f"{url}/v1/models", headers={"host": "rebound.example"}) as response:
        assert response.status == 421
    for name in ("bad_words", "allowed_token_ids"):
        body = json.dumps({"model": "tiny", "messages": [SAID], name: [1]})
        async with http.post(url + CHAT, data=body) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, name)


def test_batches_take_every_dialect_of_openais() -> None:
    assert RESPONSES in ENDPOINTS
