"""Every path of a router, with the scope that it needs if keys are required. A path that is missing here fails."""

import hashlib
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from starlette.routing import Mount, Route

from pilotlight.edge_router.app import build_app
from pilotlight.edge_router.service_table import RouterService, service_of
from pilotlight.sites.accounts import Scope
from tests.edge_router.builders import network
from tests.edge_router.fakes import answer, router, sites

PUBLIC = ""  # any caller; functions check their callers, and the page's session identifies its user
OLLAMAS_OWN = ("blobs/{digest}", "copy", "create", "delete", "push")
NEEDS: dict[tuple[str, str], str] = {
    ("GET", "/usage"): "models",  # scope models for one account, admin for all accounts
    ("GET", "/livez"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/health"): PUBLIC,
    ("GET", "/ping"): PUBLIC,
    ("GET", "/version"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
    ("GET", "/docs"): PUBLIC,
    ("GET", "/metrics"): "metrics",
    ("GET", "/status"): "metrics",
    ("GET", "/slo"): "metrics",
    ("GET", "/debug/route"): "admin",
    ("POST", "/debug/route"): "admin",
    ("GET", "/"): PUBLIC,
    ("GET", "/page"): PUBLIC,  # files of the page
    ("GET", "/page/session"): "metrics",
    ("POST", "/page/session"): PUBLIC,
    ("DELETE", "/page/session"): PUBLIC,
    ("GET", "/page/feed"): "metrics",
    ("GET", "/page/history"): "metrics",
    ("GET", "/page/timeline"): "metrics",
    ("GET", "/page/functions"): "metrics",
    ("GET", "/page/tail"): "admin",
    ("GET", "/page/logs"): "admin",
    ("GET", "/page/requests"): "admin",
    ("GET", "/page/faults"): "metrics",
    ("GET", "/manage/catalogue"): "admin",
    ("POST", "/manage/sites/{site}"): "admin",
    ("GET", "/manage/hub"): "admin",
    ("GET", "/manage/stores"): "admin",
    ("GET", "/manage/stores/{site}"): "admin",
    ("GET", "/manage/audit"): "admin",
    ("GET", "/manage/keys"): "admin",
    ("POST", "/manage/keys"): "admin",
    ("DELETE", "/manage/keys/{name}"): "admin",
    ("POST", "/manage/join"): "admin",
    ("GET", "/deployments"): "deploy",
    ("GET", "/deployments/bundles/{digest}"): "deploy",
    ("PUT", "/deployments/bundles/{digest}"): "deploy",
    ("GET", "/deployments/{name}"): "deploy",
    ("POST", "/deployments/{name}"): "deploy",
    ("POST", "/deployments/{name}/rollback"): "deploy",
    ("DELETE", "/deployments/{name}"): "deploy",
    ("GET", "/deployments/{name}/tail"): "deploy",
    ("GET", "/deployments/{name}/logs"): "deploy",
    ("GET", "/deployments/{name}/secrets"): "deploy",
    ("PUT", "/deployments/{name}/secrets/{secret}"): "deploy",
    ("DELETE", "/deployments/{name}/secrets/{secret}"): "deploy",
    ("GET", "/api/version"): PUBLIC,
    # Parts of Ollama's API that are always refused.
    **{(method, f"/api/{name}"): PUBLIC for method in ("POST", "DELETE") for name in OLLAMAS_OWN},
    # All paths in the table of services, with any method.
    ("GET", "/v1/models"): "models",
    ("GET", "/v1/models/m"): "models",
    ("POST", "/v1/chat/completions"): "models",
    ("POST", "/v1/completions"): "models",
    ("POST", "/v1/messages"): "models",
    ("POST", "/v1/messages/count_tokens"): "models",
    ("POST", "/v1/responses"): "models",
    ("GET", "/v1/responses/r"): "models",
    ("DELETE", "/v1/responses/r"): "models",
    ("GET", "/v1/files"): "models",
    ("POST", "/v1/files"): "models",
    ("GET", "/v1/files/f"): "models",
    ("DELETE", "/v1/files/f"): "models",
    ("GET", "/v1/files/f/content"): "models",
    ("GET", "/v1/batches"): "models",
    ("POST", "/v1/batches"): "models",
    ("GET", "/v1/batches/b"): "models",
    ("POST", "/v1/batches/b/cancel"): "models",
    ("POST", "/client/v4/accounts/a/ai/run/m?queueRequest=true"): "models",
    ("GET", "/client/v4/accounts/a/ai/finetunes"): "models",
    ("POST", "/client/v4/accounts/a/ai/finetunes"): "models",
    ("DELETE", "/client/v4/accounts/a/ai/finetunes/f"): "models",
    ("POST", "/client/v4/accounts/a/ai/finetunes/f/finetune-assets"): "models",
    ("POST", "/ai/v1/embeddings"): "models",
    **{("POST", path): "models" for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/classify")},
    ("POST", "/client/v4/accounts/a/ai/run/m"): "models",
    ("GET", "/client/v4/accounts/a/ai/models/search"): "models",
    ("GET", "/client/v4/accounts/a/ai/tasks/search"): "models",
    ("GET", "/client/v4/user/tokens/verify"): "models",
    ("POST", "/fn/"): PUBLIC,
    ("POST", "/fn/@org/model"): "models",
}
TABLES: dict[str, Any] = {
    "door": {"require_key": True},
    "keys": [
        {"name": scope, "key_sha256": hashlib.sha256(scope.encode()).hexdigest(), "scopes": [scope]}
        for scope in get_args(Scope)
    ],
}


def endpoints() -> Iterator[tuple[str, str]]:
    for route in build_app(network({"ams1": "http://x:1"})).routes:
        if isinstance(route, Mount):
            yield "GET", route.path
            continue
        assert isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}:
            yield method, route.path


def test_every_path_of_a_router_is_named_here_with_its_scope() -> None:
    beside = {place: service for place in NEEDS if (service := service_at(*place)) is not None}
    assert set(beside.values()) | {RouterService.RUNS} == set(RouterService)
    assert set(endpoints()) == set(NEEDS) - beside.keys()


def service_at(method: str, path: str) -> RouterService | None:
    path, _, query = path.partition("?")
    return service_of({"method": method, "path": path, "query_string": query.encode()})


@pytest.mark.parametrize(
    ("method", "path", "service"),
    [
        *(("POST", f"{prefix}/v1/chat/completions", RouterService.SITES) for prefix in ("", "/ai", "/client/v4/accounts/a/ai")),
        *(("POST", f"{prefix}/rerank", RouterService.SITES) for prefix in ("", "/v1", "/v2", "/ai/v1", "/client/v4/accounts/a/ai/v1")),
        ("GET", "/client/v4/accounts/a/ai/v1/models", RouterService.MODEL_LISTS),
        ("GET", "/ai/v1/models/@cf/meta/llama", RouterService.MODEL_LISTS),
        ("HEAD", "/v1/models", RouterService.SITES),
        ("POST", "/ai/v1/responses/input_tokens", RouterService.RESPONSES),
        ("POST", "/client/v4/accounts/a/ai/run/@cf/v1/files", RouterService.SITES),
        ("POST", "/client/v4/accounts/a/ai/run/v1/responses?queueRequest=false", RouterService.SITES),
        ("POST", "/client/v4/accounts/a/ai/run/m?queueRequest=true", RouterService.BATCHES),
        ("GET", "/client/v4/accounts/a/ai/finetunes/public", RouterService.SITES),
        ("POST", "/client/v4/accounts/a/ai/finetunes/f/finetune-assets", RouterService.FINETUNES),
        ("GET", "/fn/f/v1/models", RouterService.SITES),
        *(("POST", path, None) for path in ("/v2/score", "/a/rerank")),
        *(("POST", path, None) for path in ("/v1/audio/speech", "/v1", "/v1/chat", "/v1/files/a/b", "/v2/models", "/client/v4/zones", "/", "/fn")),
    ],
)  # fmt: skip
def test_a_path_is_one_services(method: str, path: str, service: RouterService | None) -> None:
    assert service_at(method, path) is service


@pytest.mark.process
@pytest.mark.parametrize(("method", "path"), NEEDS)
async def test_a_path_opens_to_its_scope_and_to_no_other(method: str, path: str) -> None:
    needed = NEEDS[method, path]
    url = path.replace("{digest}", "0" * 64).replace("{name}", "f").replace("{secret}", "S")
    url += "/style.css" if path == "/page" else ""
    url += "x" if url.endswith("/fn/") else ""
    async with sites("ams1") as fakes, router(fakes, tables=TABLES) as running:
        fakes[0].behave = answer(200, {"ok": True})
        for scope in ("", *get_args(Scope)):
            headers = {"authorization": f"Bearer {scope}"} if scope else {}
            async with running.http.request(
                method, running.url + url, headers=headers, json={"key": "metrics"}
            ) as response:
                if needed == PUBLIC or scope in (needed, "admin"):
                    assert response.status not in (401, 403), scope
                else:
                    assert response.status == (403 if scope else 401), scope
