"""Access to a router: keys if the file requires them, errors in each dialect, and operators' paths for operators only."""

import hashlib
from datetime import UTC, datetime
from typing import Any

import openai
import pytest

from pilotlight.wire.credentials import Access
from tests.edge_router.fakes import answer, router, sites

pytestmark = pytest.mark.process

KEY, ADMIN = "pl-client", "pl-operator"
TABLES: dict[str, Any] = {
    "door": {"require_key": True},
    "keys": [
        {"name": "client", "key_sha256": hashlib.sha256(KEY.encode()).hexdigest()},
        {"name": "operator", "key_sha256": hashlib.sha256(ADMIN.encode()).hexdigest(), "scopes": ["admin"]},
    ],
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_only_known_keys_are_served_and_others_learn_what_to_send() -> None:
    async with sites("ams1") as fakes, router(fakes, tables=TABLES) as running:
        fakes[0].behave = answer(200, {"ok": True})
        for headers, status in ((bearer(KEY), 200), ({}, 401), (bearer("guess"), 401), (bearer(KEY[:-1]), 401)):
            async with running.chat(headers=headers, stream=False) as response:
                assert response.status == status
                if status == 401:
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert (await response.json())["error"]["code"] == "unauthorized"
        assert len(fakes[0].seen) == 1, "refused requests do not reach a site"
        async with running.http.post(running.url + "/client/v4/accounts/a/ai/run/m", json={}) as response:
            assert (response.status, (await response.json())["errors"][0]["code"]) == (401, 10000)


@pytest.mark.parametrize("given", ["Bearer", "Bearer two words", "Basic dXNlcjo=", "Bearer anything"])
async def test_where_no_key_is_required_credentials_of_any_form_are_ignored(given: str) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {"ok": True})
        async with running.chat(headers={"authorization": given}, stream=False) as response:
            assert response.status == 200, await response.text()


@pytest.mark.parametrize("path", ["/status", "/metrics", "/debug/route?model=m"])
async def test_what_operators_ask_for_needs_an_admin_key(path: str) -> None:
    async with sites("ams1") as fakes, router(fakes, tables=TABLES) as running:
        for headers, status in (({}, 401), (bearer(KEY), 403), (bearer(ADMIN), 200)):
            async with running.http.get(running.url + path, headers=headers) as response:
                assert response.status == status


async def test_probes_and_functions_need_no_key() -> None:
    async with sites("ams1") as fakes, router(fakes, tables=TABLES) as running:
        fakes[0].behave = answer(200, {"ok": True})
        for path in ("/livez", "/readyz", "/fn/hello/"):
            async with running.http.get(running.url + path) as response:
                assert response.status == 200
        async with running.http.get(running.url + "/fn/hello/", headers={"authorization": "Basic eDp5"}) as response:
            assert response.status == 200


async def test_without_require_key_all_of_it_is_open() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        for path in ("/status", "/metrics"):
            async with running.http.get(running.url + path) as response:
                assert response.status == 200


async def test_a_withdrawn_key_is_refused_even_if_its_head_is_repeated() -> None:
    async with sites("ams1") as fakes, router(fakes, tables=TABLES) as running:
        fakes[0].behave = answer(200, {"ok": True})
        for status in (200, 401):
            for _ in range(3):
                async with running.chat(headers=bearer(KEY), stream=False) as response:
                    assert response.status == status
            running.proxy.admission.access.update_from(Access([], is_required=True))


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


PAST = datetime(2020, 1, 1, tzinfo=UTC)
FAULTY: dict[str, Any] = {
    "door": {"require_key": True},
    "accounts": [{"name": "acme", "models": ["llama-*"]}],
    "keys": [
        {"name": "expired", "key_sha256": digest("expired"), "expires": PAST},
        {"name": "revoked", "key_sha256": digest("revoked"), "revoked": True},
        {"name": "watcher", "key_sha256": digest("watcher"), "scopes": ["metrics"]},
        {"name": "acme-ci", "key_sha256": digest("acme-ci"), "account": "acme"},
    ],
}


@pytest.mark.parametrize(
    ("key", "error", "why"),
    [
        ("guess", openai.AuthenticationError, "this key is unknown"),
        ("expired", openai.AuthenticationError, "expired at 2020-01-01"),
        ("revoked", openai.AuthenticationError, "was revoked"),
        ("two words", openai.AuthenticationError, "must be `Bearer KEY`"),
        ("watcher", openai.PermissionDeniedError, "the scope models"),
        ("acme-ci", openai.PermissionDeniedError, "not available to the account acme"),
    ],
)
async def test_the_official_client_raises_its_own_error_for_each_fault_of_a_key(
    key: str, error: type[Exception], why: str
) -> None:
    async with (
        sites("ams1") as fakes,
        router(fakes, tables=FAULTY) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) as client,
    ):
        with pytest.raises(error, match=why):
            await client.chat.completions.create(model="ember", messages=[{"role": "user", "content": "hi"}])
        assert fakes[0].seen == []


@pytest.mark.parametrize("body", [{}, {"model": 7}, {"model": ["llama-8b"]}, {"model": "ember"}, {"model": ""}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/client/v4/accounts/a/ai/v1/completions"])
async def test_an_account_with_a_list_of_models_reaches_no_site_with_others(path: str, body: Any) -> None:
    async with sites("ams1") as fakes, router(fakes, tables=FAULTY) as running:
        async with running.http.post(running.url + path, json=body, headers=bearer("acme-ci")) as response:
            assert response.status == 403
        assert fakes[0].seen == []


async def test_a_path_names_the_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    tables = {**FAULTY, "accounts": [{"name": "acme", "models": ["@cf/llama-*"]}]}
    async with sites("ams1") as fakes, router(fakes, tables=tables) as running:
        fakes[0].behave = answer(200, {"ok": True})
        for prefix in ("/client/v4/accounts/a/ai/run/", "/fn/"):
            for model, status in (("@cf/llama-8b", 200), ("@cf/qwen", 403)):
                url = f"{running.url}{prefix}{model}"
                async with running.http.post(url, json={"prompt": "x"}, headers=bearer("acme-ci")) as response:
                    assert response.status == status
            async with running.http.post(f"{running.url}{prefix}@cf/llama-8b", json={"prompt": "x"}) as response:
                assert response.status == 401
        assert {request.headers["x-pilotlight-account"] for request in fakes[0].seen} == {"acme"}


@pytest.mark.parametrize("prefix", ["/client/v4/accounts/a/ai/run/", "/fn/"])
async def test_an_adapter_beside_its_model_is_judged_with_it(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    tables = {**FAULTY, "accounts": [{"name": "acme", "models": ["@cf/llama-8b", "@cf/llama-8b:ours"]}]}
    async with sites("ams1") as fakes, router(fakes, tables=tables) as running:
        fakes[0].behave = answer(200, {"ok": True})
        for lora, status in (("ours", 200), ("theirs", 403)):
            body = {"prompt": "x", "lora": lora}
            url = f"{running.url}{prefix}@cf/llama-8b"
            async with running.http.post(url, json=body, headers=bearer("acme-ci")) as response:
                assert response.status == status


async def test_a_client_cannot_say_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    async with sites("ams1") as fakes, router(fakes, tables={"keys": FAULTY["keys"][2:3]}) as running:
        fakes[0].behave = answer(200, {"ok": True})
        headers = {**bearer("somebody"), "x-pilotlight-account": "watcher"}
        async with running.chat(headers=headers, stream=False) as response:
            assert response.status == 200
        assert "x-pilotlight-account" not in fakes[0].seen[0].headers
