"""The stages of a request: only those that the configuration needs."""

from pathlib import Path

import pytest

from pilotlight.edge_router.assembly import EdgeRouter
from pilotlight.edge_router.forwarding.request_state import Close, RequestState
from pilotlight.edge_router.requests.request import Head, RequestParser
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.workers.role import WorkerRole
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import RelayConfig
from pilotlight.wire.credentials import Account, Key
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from tests.edge_router.builders import Clock, network

URLS = {"ams1": "http://127.0.0.1:9"}
ACME = Key("k", "", account=Account("acme", models=("ember",)))
CLOSED = {"accounts": [{"name": "acme", "models": ["ember"]}]}
LIMITED = {"accounts": [{"name": "acme", "tokens_per_min": 1000}]}
JUDGED = {"objectives": [{"model": "*", "answered": 0.9}]}
KEPT_NEAR = {"models": [{"model": "ember", "data": {"sites": ["ams1"]}}]}


def made(**tables: object) -> EdgeRouter:
    return EdgeRouter(network(URLS, **tables), CostPolicy(), Clock())


def names(router: EdgeRouter) -> list[str]:
    return [getattr(stage, "func", stage).__name__ for stage in router.stages.present()]


def request(model: str = "ember", method: str = "POST", path: str = "/v1/completions", key: Key = ACME) -> RequestState:
    head = Head(method, path, path, [], holder=key)
    body = b'{"model": "%s", "prompt": "%s", "max_tokens": 7}' % (model.encode(), b"x" * 400)
    parsed = RequestParser("", 4, lambda *_: None).parse(head, body if method == "POST" else b"", "r", "")
    return RequestState(parsed, RelayConfig(), 0.0)


async def opened(router: EdgeRouter, proxied: RequestState) -> list[Close]:
    found = [await stage(proxied) for stage in router.stages.present()]
    return [close for close in found if close is not None]


def test_a_router_of_which_nothing_is_asked_has_no_stage() -> None:
    assert names(made()) == []


def test_a_stage_is_there_for_each_thing_that_is_asked_for_in_the_order_of_their_opening() -> None:
    assert names(made(**CLOSED)) == ["_check_model"]
    assert names(made(**JUDGED, **LIMITED, **KEPT_NEAR)) == ["_judge", "_reserve_tokens"]


async def test_limits_that_a_reload_brings_hold_for_the_next_request() -> None:
    router = made()
    router.reload(network(URLS, **CLOSED))
    assert names(router) == ["_check_model"]
    router.reload(network(URLS))
    assert names(router) == []


def test_limits_that_several_workers_cannot_keep_to_are_refused_by_a_reload_as_at_the_start(tmp_path: Path) -> None:
    role = WorkerRole(0, 2, 0, tmp_path)
    router = EdgeRouter(network(URLS), CostPolicy(), Clock(), role)
    with pytest.raises(ConfigError, match=r"set quotas\.store"):
        router.reload(network(URLS, **LIMITED, keys=[{"name": "k", "key_sha256": "0" * 64}]))
    assert (names(router), router.configured.keys) == ([], ())
    with pytest.raises(ConfigError, match=r"set quotas\.store"):
        EdgeRouter(network(URLS, **LIMITED), CostPolicy(), Clock(), role)


def test_an_account_is_limited_by_its_table_or_by_the_limits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not made(**LIMITED).is_limited("acme"), "a site could not name it"
    monkeypatch.setenv(HOP_SECRET_ENV, "s" * 32)
    for tables in (CLOSED, LIMITED, {"accounts": [{"name": "acme", "max_open": 3}]}):
        router = made(**tables)
        assert [router.is_limited(account) for account in ("acme", "other", "")] == [True, False, False]
        router.reload(network(URLS))
        assert not router.is_limited("acme")
    router.reload(network(URLS, tenant_limits={"requests_per_min": 5}))
    assert [router.is_limited(account) for account in ("acme", "")] == [True, False]


async def test_a_model_that_the_account_may_not_use_is_refused_and_requests_without_a_model_are_not() -> None:
    router = made(**CLOSED)
    with pytest.raises(ApiError, match="not available to the account acme") as refused:
        await opened(router, request("other"))
    assert (refused.value.word, refused.value.param) == ("forbidden", "model")
    for proxied in (request(), request(method="GET", path="/v1/models"), request("other", path="/fn/f")):
        assert await opened(router, proxied) == []


@pytest.mark.parametrize("is_admitted", [True, False])
async def test_a_request_is_settled_with_its_prompt_unless_a_later_stage_refused_it(is_admitted: bool) -> None:
    router, proxied = made(**LIMITED), request()
    (settle,) = await opened(router, proxied)
    limits, head, prompt = router.admission.limits, proxied.request.head, proxied.request.conversation.tokens
    with pytest.raises(ApiError, match="tokens per minute"):
        await limits.reserve(head, 1000 - prompt)
    if is_admitted:
        proxied.admitted()
    settle(None, 0.1)
    used = prompt if is_admitted else 0
    assert await limits.reserve(head, 1000 - used) is not None
    with pytest.raises(ApiError, match="tokens per minute"):
        await limits.reserve(head, 1)
