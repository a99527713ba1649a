"""Host names of functions: the function for a request, and the request as router and site see it."""

from typing import Any

import pytest

from pilotlight.edge_router.requests.function_hosts import OWN_HOST, FunctionHosts, FunctionMount
from pilotlight.sites.config import ConfigError
from pilotlight.wire.credentials import Account
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.deployments import Deployment, Share, Version
from tests.edge_router.builders import network

HOSTS = (
    {"pattern": "shop.example/*", "function": "shop"},
    {"pattern": "shop.example/api/*", "function": "api"},
    {"pattern": "*.shop.example/*", "function": "branches"},
    {"pattern": "apex.example/only", "function": "only"},
)


def made(hosts: Any = HOSTS, domain: str | None = "fn.example", **tables: Any) -> FunctionHosts:
    return FunctionHosts(network({"ams1": "http://127.0.0.1:1"}, hosts=hosts, functions={"domain": domain}, **tables))


def deployment(name: str, *routes: str, account: str = "", has_subdomain: bool = True) -> Deployment:
    version = Version(1, "0" * 64, 0.0, routes=routes, has_subdomain=has_subdomain)
    return Deployment(name, 1, (version,), (Share(1, 100.0),), account)


@pytest.mark.parametrize(
    ("host", "path", "function"),
    [
        ("shop.example", "/", "shop"),
        ("shop.example", "/api/x", "api"),
        ("shop.example", "/api", "shop"),
        ("a.shop.example", "/api/x", "branches"),
        ("b.a.shop.example", "/", "branches"),
        ("apex.example", "/only", "only"),
        ("apex.example", "/only/more", None),
        ("greeter.fn.example", "/x", "greeter"),
        ("a.b.fn.example", "/", None),
        ("fn.example", "/", None),
        ("myshop.example", "/", None),
        ("example", "/", None),
        ("", "/", None),
    ],
)
def test_the_most_specific_pattern_says_whose_a_request_is(host: str, path: str, function: str | None) -> None:
    assert made().find(host, path) == function


def test_routes_of_deployed_functions_count_while_their_newest_version_has_traffic() -> None:
    hosts = made()
    hosts.serve({"blog": deployment("blog", "blog.example/*", has_subdomain=False)})
    assert (hosts.find("blog.example", "/"), hosts.find("blog.fn.example", "/")) == ("blog", None)
    assert hosts.addresses(deployment("blog", "blog.example/*")) == ("blog.example/*", "blog.fn.example")
    hosts.serve({"blog": Deployment("blog", 2)})
    assert hosts.find("blog.example", "/") is None


def test_an_account_takes_routes_below_its_own_hosts_alone_and_no_other_functions() -> None:
    hosts = made(accounts=[{"name": "acme", "hosts": ["acme.example", "*.acme.example"]}])
    acme = Account("acme")
    hosts.check("f", ["acme.example/*", "www.acme.example/x"], acme, "acme")
    hosts.check("f", ["anything.example/*"], None, "")
    with pytest.raises(ApiError, match=r"the account acme may not take the route evil.example/\*"):
        hosts.check("f", ["evil.example/*"], acme, "acme")
    with pytest.raises(ApiError, match="may not take"):
        hosts.check("f", ["*.example/*"], acme, "acme")
    with pytest.raises(ApiError, match="shop's already"):
        hosts.check("f", ["SHOP.example/*"], None, "")
    hosts.check("shop", ["shop.example/*"], None, "")
    hosts.serve({"first": deployment("first", "acme.example/*", account="acme")})
    with pytest.raises(ApiError, match="first's already"):
        hosts.check("f", ["acme.example/*"], acme, "acme")
    with pytest.raises(ApiError, match="begins with no host name"):
        hosts.check("f", [":80/*"], None, "")


def test_a_reloaded_file_keeps_deployments() -> None:
    hosts = made()
    hosts.serve({"blog": deployment("blog", "blog.example/*")})
    hosts.reload(network({"ams1": "http://127.0.0.1:1"}))
    assert (hosts.find("blog.example", "/"), hosts.find("shop.example", "/")) == ("blog", None)


@pytest.mark.parametrize("pattern", ["shop.example", "shop.example:80/*", "shop.example/a*b"])
def test_an_invalid_pattern_stops_the_start(pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        made([{"pattern": pattern, "function": "f"}])


class Seen:
    def __init__(self) -> None:
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)


async def asked(host: bytes, path: str = "/a%20b", kind: str = "http") -> tuple[list[Any], list[Any]]:
    inside, otherwise = Seen(), Seen()
    scope = {"type": kind, "path": "/a b", "raw_path": path.encode(), "headers": [(b"host", host)]}
    await FunctionMount(made(), inside, otherwise)(scope, None, None)
    return inside.scopes, otherwise.scopes


@pytest.mark.parametrize("host", [b"shop.example", b"Shop.Example:8443", b"shop.example."])
@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_request_to_a_functions_host_goes_below_its_path_by_its_own_spelling(host: bytes, kind: str) -> None:
    (scope,), others = await asked(host, kind=kind)
    assert (scope["path"], scope["raw_path"], scope[OWN_HOST], others) == (
        "/fn/shop/a b", b"/fn/shop/a%20b", True, [],
    )  # fmt: skip


@pytest.mark.parametrize("path", ["/api/../b%20c", "/api/%2E%2e/b%20c", "/api\\..\\b%20c", "/api/./.././b%20c"])
async def test_a_path_with_dot_segments_goes_to_the_function_of_the_resolved_path(path: str) -> None:
    (scope,), others = await asked(b"shop.example", path)
    assert (scope["path"], scope["raw_path"], others) == ("/fn/shop/b c", b"/fn/shop/b%20c", [])


@pytest.mark.parametrize("host", [b"other.example", b"127.0.0.1:8787", b"[::1]:80", b""])
async def test_any_other_host_is_the_routers(host: bytes) -> None:
    inside, (scope,) = await asked(host)
    assert (inside, scope["path"]) == ([], "/a b")
