"""Hop signatures, request ids, and the site's name on every response."""

import hashlib
import json
import time
from typing import Any

import pytest

from pilotlight.runtime.app import build_app
from pilotlight.sites.config import ConfigError
from pilotlight.wire.hop.headers import CLOCK, HOP, REFUSAL, Hop, sign_hop, told_clock
from pilotlight.wire.http.access_log import AccessLog
from tests.asgi import call
from tests.runtime.conftest import Site, SiteMaker, site_config

CHAT = "/ai/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
SECRET = "a shared secret"
CLIENT, OPERATOR, BOB = ({"authorization": f"Bearer {name}"} for name in ("client", "operator", "bob"))


def signed(
    request_id: str = "r1", *, path: str = CHAT, method: str = "POST", secret: str = SECRET, age_s: float = 0, site: str = "ams1",
    query: str = "", body: bytes | None = None,
) -> dict[str, str]:  # fmt: skip
    body = (json.dumps(HELLO).encode() if method == "POST" else b"") if body is None else body
    signature = sign_hop(secret, time.time() - age_s, Hop(method, path, request_id, site, query), body)
    return {HOP: signature, "x-request-id": request_id}


async def test_every_response_names_site_and_request(site: Site) -> None:
    for path in ("/livez", "/nothing", "/ai/v1/models"):
        answer = await call(site.app, path)
        assert answer.headers["x-pilotlight-site"] == "ams1"
        assert len(answer.headers["x-request-id"]) == 32


async def test_a_strangers_request_id_is_replaced(site: Site) -> None:
    answer = await call(site.app, "/livez", **{"x-request-id": "mine"})
    assert answer.headers["x-request-id"] != "mine"


async def test_a_genuine_hop_keeps_its_request_id(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        answer = await call(site.app, CHAT, HELLO, **signed())
        assert (answer.status, answer.headers["x-request-id"]) == (200, "r1")
        assert (await call(site.app, CHAT, HELLO)).status == 200  # unsigned requests are allowed without require_hop


@pytest.mark.parametrize(
    ("headers", "fault"),
    [
        (signed(secret="another secret"), "signature"),
        (signed(secret="another secret", age_s=120), "signature"),
        (signed(path="/ai/v1/completions"), "signature"),
        (signed(method="GET"), "signature"),
        (signed(age_s=120), "clock"),
        (signed(age_s=-86_400), "clock"),
        ({**signed(), "x-request-id": "r2"}, "signature"),
        (signed(site="iad1"), "signature"),
        (signed(query="a=b"), "signature"),
        ({HOP: "nonsense", "x-request-id": "r1"}, "signature"),
    ],
)
async def test_a_false_hop_is_403_and_its_router_learns_why(
    make_site: SiteMaker, headers: dict[str, str], fault: str
) -> None:
    async with make_site(hop_secret=SECRET) as site:
        answer = await call(site.app, CHAT, HELLO, **headers)
        assert (answer.status, answer.json["error"]["code"]) == (403, "forbidden")
        assert answer.headers["x-pilotlight-site"] == "ams1"
        assert answer.headers["x-request-id"] != "r1"
        assert answer.headers[REFUSAL] == fault
        if fault == "clock":
            assert " by this site's clock" in answer.json["error"]["message"]
            assert told_clock(answer.headers[CLOCK], SECRET, "ams1", "r1") == pytest.approx(time.time(), abs=30)
        else:
            assert CLOCK not in answer.headers


async def test_refused_hops_are_logged_once_a_minute(make_site: SiteMaker, caplog: pytest.LogCaptureFixture) -> None:
    async with make_site(hop_secret=SECRET) as site:
        for _ in range(5):
            await call(site.app, CHAT, HELLO, **signed(age_s=120))
            await call(site.app, "/status", **signed(secret="another", path="/status", method="GET"))
        said = [record.message for record in caplog.records if "was refused" in record.message]
        assert len(said) == 2
        assert " s old by this site's clock" in said[0]


async def test_what_another_site_would_not_say_is_marked_and_what_every_site_would_is_not(site: Site) -> None:
    unknown = await call(site.app, CHAT, {**HELLO, "model": "none"})
    assert (unknown.status, unknown.headers.get(REFUSAL)) == (404, None)
    site.admission.drain()
    draining = await call(site.app, CHAT, HELLO)
    assert (draining.status, draining.headers[REFUSAL]) == (503, "draining")


async def test_a_site_can_demand_hops_but_not_of_probes(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET, listen={"port": 0, "require_hop": True}) as site:
        assert (await call(site.app, CHAT, HELLO)).status == 403
        cloud = await call(site.app, "/client/v4/accounts/a/ai/run/tiny", {"prompt": "Hi"})
        assert (cloud.status, cloud.json["errors"][0]["code"]) == (403, 5018)
        assert (await call(site.app, CHAT, HELLO, **signed())).status == 200
        assert (await call(site.app, "/readyz")).status == 200
        status = await call(site.app, "/status")
        assert (status.status, status.headers[REFUSAL]) == (401, "signature")
        genuine = await call(site.app, "/status", **signed(path="/status", method="GET"))
        assert (genuine.status, genuine.headers.get(REFUSAL)) == (200, None)


async def test_a_body_that_is_not_the_one_that_was_signed_is_refused_before_any_work(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        answer = await call(site.app, CHAT, HELLO, **signed(body=b"{}"))
        assert (answer.status, answer.headers[REFUSAL]) == (403, "signature")
        assert not site.engine.submits


def key(name: str, *scopes: str, **more: object) -> dict[str, object]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {"name": name, "key_sha256": digest, "scopes": [*scopes] or ["models"], **more}


async def test_a_site_with_keys_serves_those_alone_and_routers_whose_signature_is_genuine(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET, door={"require_key": True}, keys=[key("client")]) as site:
        for headers, status in (({}, 401), (BOB, 401), (CLIENT, 200), (signed(), 200)):
            assert (await call(site.app, CHAT, HELLO, **headers)).status == status
        cloud = await call(site.app, "/client/v4/accounts/a/ai/run/tiny", {"prompt": "Hi"})
        assert (cloud.status, cloud.json["errors"][0]["code"]) == (401, 10000)
        assert (await call(site.app, "/livez")).status == (await call(site.app, "/readyz")).status == 200
        assert (await call(site.app, "/fn/none/")).status == 404, "functions judge for themselves"


@pytest.mark.parametrize("path", ["/status", "/metrics", "/timeline"])
@pytest.mark.parametrize("tables", [{"door": {"require_key": True}}, {"listen": {"port": 0, "require_hop": True}}])
async def test_what_operators_ask_of_a_site_needs_an_admin_key_or_a_signature(
    make_site: SiteMaker, path: str, tables: dict[str, Any]
) -> None:
    keys = [key("client"), key("operator", "metrics")]
    async with make_site(hop_secret=SECRET, keys=keys, **tables) as site:
        router = signed(path=path, method="GET")
        for headers, status in (({}, 401), (CLIENT, 403), (OPERATOR, 200), (router, 200)):
            assert (await call(site.app, path, **headers)).status == status


async def test_hints_are_not_taken_from_clients_with_a_key(make_site: SiteMaker) -> None:
    async with make_site(door={"require_key": True}, keys=[key("client")]) as site:
        for headers, status in (({}, 401), (CLIENT, 403)):
            assert (await call(site.app, "/internal/wake", {"model": "tiny"}, **headers)).status == status


def test_demanding_hops_without_a_secret_stops_the_start(model_directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PILOTLIGHT_HOP_SECRET", raising=False)
    with pytest.raises(ConfigError, match="PILOTLIGHT_HOP_SECRET"):
        build_app(site_config(model_directory, listen={"port": 0, "require_hop": True}))


@pytest.mark.parametrize("given", ["Bearer ", "Bearer two words", "Basic dXNlcjo="])
async def test_where_no_key_is_required_credentials_of_any_form_are_ignored(site: Site, given: str) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await call(site.app, path, body, authorization=given)).status == 200
    assert (await call(site.app, "/v1/responses", {"model": "tiny", "input": "Hi"}, authorization=given)).status == 200
    assert len({submit.salt for submit in site.engine.submits}) == 1


async def test_a_sites_access_line_has_the_routers_request_id(
    make_site: SiteMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pilotlight.access")
    async with make_site(hop_secret=SECRET) as site:
        app = AccessLog(site.app)
        answer = await call(app, CHAT, HELLO, **signed("r2"))
        await call(app, "/nothing")
        await call(app, "/readyz")
        await call(app, "/internal/usage", {})
    chat, nothing = [record.__dict__["fields"] for record in caplog.records if record.name == "pilotlight.access"]
    assert (chat["request_id"], chat["status"], chat["path"], chat["site"]) == ("r2", 200, CHAT, "ams1")
    assert chat["bytes"] == len(answer.body)
    assert nothing["status"] == 404
    assert len(nothing["request_id"]) == 32
