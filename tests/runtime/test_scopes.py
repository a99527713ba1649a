"""Every path of a site, with the scope that it needs if keys are required. A path that is missing here fails the test."""

import hashlib
from pathlib import Path
from typing import Any, get_args

import pytest

from pilotlight.runtime.app import SiteApp
from pilotlight.sites.accounts import Scope
from pilotlight.wire.http.route_index import RouteIndex
from tests.asgi import call
from tests.runtime.conftest import SiteMaker

PUBLIC = ""
ROUTERS = "a router's signature"
NEEDS = {
    "/livez": PUBLIC,
    "/readyz": PUBLIC,
    "/health": PUBLIC,
    "/ping": PUBLIC,
    "/version": PUBLIC,
    "/openapi.json": PUBLIC,
    "/docs": PUBLIC,
    "/metrics": "metrics",
    "/status": "metrics",
    "/timeline": "metrics",
    "/": PUBLIC,
    "/page": PUBLIC,
    "/page/session": "metrics",
    "/page/feed": "metrics",
    "/page/history": "metrics",
    "/page/timeline": "metrics",
    "/page/functions": "metrics",
    "/page/tail": "admin",
    "/page/logs": "admin",
    "/page/requests": "admin",
    "/page/faults": "metrics",
    "/manage/catalogue": "admin",
    "/manage/sites/{site}": "admin",
    "/manage/hub": "admin",
    "/manage/stores": "admin",
    "/manage/stores/{site}": "admin",
    "/manage/audit": "admin",
    "/internal/wake": ROUTERS,
    "/internal/catalogue": ROUTERS,
    "/internal/operation": ROUTERS,
    "/internal/hub": ROUTERS,
    "/internal/requests": ROUTERS,
    "/internal/functions/try": ROUTERS,
    "/internal/usage": ROUTERS,
    "/internal/functions/serve": ROUTERS,
    "/internal/functions/tail/{name}": ROUTERS,
    "/internal/functions/logs": ROUTERS,
    "/internal/functions/stores": ROUTERS,
    "/api/version": PUBLIC,
    **{f"/api/{path}": "models" for path in ("chat", "generate", "embed", "embeddings", "show", "pull", "tags", "ps")},
    # Parts of Ollama's API that are refused with a sentence.
    **{f"/api/{path}": "models" for path in ("blobs/{digest}", "copy", "create", "delete", "push")},
    "/fn/@{model:path}": "models",
    "/fn/{name:function}{path:rest}": PUBLIC,
    "/client/v4/accounts/{account_id}/ai/run/{model:path}": "models",
    **{
        f"/client/v4/accounts/{{account_id}}/ai/{path}": "models"
        for path in ("models/search", "models/schema", "tasks/search")
    },
    **{
        f"/client/v4/accounts/{{account_id}}/ai/finetunes{path}": "models"
        for path in ("", "/public", "/{id}", "/{id}/finetune-assets")
    },
    "/v2/rerank": "models",
    **{f"/{path}": "models" for path in ("rerank", "score", "classify")},
    "/internal/finetunes": ROUTERS,
    "/internal/finetunes/{id}": ROUTERS,
    "/client/v4/user/tokens/verify": "models",
    **{
        f"{prefix}/{path}": "models"
        for prefix in ("/ai/v1", "/v1", "/client/v4/accounts/{account_id}/ai/v1")
        for path in (
            "chat/completions",
            "completions",
            "embeddings",
            "rerank",
            "score",
            "classify",
            "models",
            "models/{id:path}",
            "messages",
            "messages/count_tokens",
            "responses",
            "responses/{rest:path}",
            "conversations",
            "conversations/{rest:path}",
            "decisions",
            "systemone",
            "fine_tuning/jobs",
            "fine_tuning/jobs/{job}",
            "fine_tuning/jobs/{job}/{part}",
        )
    },
}
POSTED = (
    "/completions",
    "/embeddings",
    "/rerank",
    "/score",
    "/classify",
    "/messages",
    "/count_tokens",
    "/responses",
    "/decisions",
    "/systemone",
    *(f"/api/{path}" for path in ("chat", "generate", "embed", "show", "pull", "blobs/{digest}", "copy", "create")),
    *(f"/api/{path}" for path in ("delete", "push")),
    "/functions/logs",
    "/run/{model:path}",
    "/fn/@{model:path}",
    "/wake",
    "/internal/operation",
    "/internal/hub",
    "/manage/sites/{site}",
    "/internal/usage",
    "/try",
    "/serve",
    "/finetune-assets",
    "/finetune-assets/",
)
KEYS = [
    {"name": scope, "key_sha256": hashlib.sha256(scope.encode()).hexdigest(), "scopes": [scope]}
    for scope in get_args(Scope)
]


def paths(app: SiteApp) -> set[str]:
    (index,) = app.routes
    assert isinstance(index, RouteIndex)
    return {route.path for route in index.routes}  # type: ignore[attr-defined]


@pytest.mark.process
async def test_every_path_opens_to_its_scope_and_to_no_other(make_site: SiteMaker, tmp_path: Path) -> None:
    functions: dict[str, Any] = {"directory": str(tmp_path / "functions"), "state_dir": str(tmp_path / "state")}
    (tmp_path / "functions").mkdir()
    tables = {"door": {"require_key": True}, "keys": KEYS, "functions": functions}
    async with make_site(hop_secret="a shared secret", **tables) as site:
        assert paths(site.app) == set(NEEDS), "name the path, with the scope that it needs"
        for path, needed in NEEDS.items():
            url = (
                path.replace("{account_id}", "a")
                .replace("{id:path}", "tiny")
                .replace("{name}", "f")
                .replace("{name:function}", "f/")
            )
            url = url.replace("{model:path}", "tiny").replace("{path:rest}", "x") + (
                "/style.css" if path == "/page" else ""
            )
            method = "POST" if path.endswith(POSTED) else "DELETE" if path.endswith(("/{id}", "/{id}/")) else "GET"
            for scope in ("", *get_args(Scope)):
                headers = {"authorization": f"Bearer {scope}"} if scope else {}
                if path == "/page/feed" and scope in (needed, "admin"):
                    continue  # the stream does not end
                answer = await call(site.app, url, method=method, body=b"{}" if method == "POST" else b"", **headers)
                if needed == PUBLIC or (needed != ROUTERS and scope in (needed, "admin")):
                    assert answer.status not in (401, 403), (path, scope, answer.body)
                else:
                    assert answer.status == (403 if scope else 401), (path, scope, answer.body)


async def test_an_account_of_the_sites_own_file_is_held_to_its_models(make_site: SiteMaker) -> None:
    accounts = [{"name": "models", "models": ["other"]}]
    async with make_site(door={"require_key": True}, keys=KEYS, accounts=accounts) as site:
        for body, path in (
            ({"messages": [{"role": "user", "content": "Hi"}]}, "chat/completions"),
            ({"prompt": "x"}, "completions"),
        ):
            for scope, status in (("models", 403), ("admin", 200)):
                asked = await call(site.app, f"/v1/{path}", {"model": "tiny", **body}, authorization=f"Bearer {scope}")
                assert asked.status == status, asked.body


async def test_keys_of_one_account_share_a_salt_and_a_routers_word_for_it_counts(make_site: SiteMaker) -> None:
    from tests.runtime.test_identity import HELLO, SECRET, signed

    keys = [{**key, "account": "acme", "scopes": ["models"]} for key in KEYS[:2]]
    async with make_site(hop_secret=SECRET, keys=keys, accounts=[{"name": "acme"}]) as site:
        for headers in (
            {"authorization": "Bearer models"},
            {"authorization": "Bearer deploy"},
            {**signed(), "authorization": "Bearer unknown-here", "x-pilotlight-account": "acme"},
            {"authorization": "Bearer another"},
            # the account header does not count without a signature
            {"authorization": "Bearer another", "x-pilotlight-account": "acme"},
        ):
            assert (await call(site.app, "/ai/v1/chat/completions", HELLO, **headers)).status == 200
        salts = [submit.salt for submit in site.engine.submits]
        assert salts[0] == salts[1] == salts[2] != salts[3] == salts[4]
