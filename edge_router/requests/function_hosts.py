"""Host names of functions: a request for one goes to its function, as if its path began with /fn/NAME."""

from collections.abc import Coroutine, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from pilotlight.sites.network import NetworkConfig
from pilotlight.wire.credentials import Account
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.deployments import Deployment, Version
from pilotlight.wire.host_patterns import HostPattern, covers, parse_pattern
from pilotlight.wire.http.exchange import Application
from pilotlight.wire.paths import without_dot_segments

OWN_HOST = "pilotlight.own_host"  # key in a scope: the client used a host name of the function
Places = dict[str, list[tuple[HostPattern, str]]]
"""Routes by host, the most specific first."""


class FunctionHosts:
    def __init__(self, network: NetworkConfig) -> None:
        self._deployed: dict[str, Deployment] = {}
        self._places: Places = {}
        self._subdomains_off: frozenset[str] = frozenset()
        self.reload(network)

    def reload(self, network: NetworkConfig) -> None:
        """Apply the current configuration of the router's file."""
        self._domain = (network.functions.domain or "").lower()
        self._fixed = [(parse_pattern(each.pattern), each.function) for each in network.hosts]
        self._allowed = {
            account.name: [parse_pattern(host, is_custom_domain="*" not in host) for host in account.hosts]
            for account in network.accounts
        }
        self.serve(self._deployed)

    def serve(self, deployed: Mapping[str, Deployment]) -> None:
        """Apply the routes of all deployed functions."""
        self._deployed = dict(deployed)
        live = {name: version for name, each in deployed.items() if (version := _live(each)) is not None}
        routes = [(parse_pattern(route), name) for name, version in live.items() for route in version.routes]
        places: Places = {}
        for pattern, name in sorted([*self._fixed, *routes], key=lambda place: place[0].rank):
            places.setdefault(pattern.host, []).append((pattern, name))
        self._places = places
        self._subdomains_off = frozenset(name for name, version in live.items() if not version.has_subdomain)

    def find(self, host: str, path: str) -> str | None:
        """Return the function for a host (lower case, without a port) and a path, or None."""
        name, is_apex = host, True
        while name:
            for pattern, function in self._places.get(name, ()):
                if (pattern.has_apex if is_apex else pattern.has_subdomains) and pattern.takes_path(path):
                    return function
            name, is_apex = name.partition(".")[2], False
        label, dot, domain = host.partition(".")
        if self._domain and dot and domain == self._domain and label not in self._subdomains_off:
            return label
        return None

    def check(self, name: str, routes: Iterable[str], account: Account | None, owner: str) -> None:
        """Check the routes of a new version of a function.

        `account` is the caller's, None for the operator; `owner` is the account that owns the function. Raises ApiError for a route that is invalid,
        belongs to another function, or is not allowed for the owner.
        """
        allowed = self._allowed.get(owner, []) if account is not None or owner else None
        taken = {(pattern, function) for places in self._places.values() for pattern, function in places}
        for route in routes:
            try:
                pattern = parse_pattern(route)
            except ValueError as error:
                raise ApiError("invalid_request", f"routes: {error}") from None
            if allowed is not None and not any(covers(each, pattern) for each in allowed):
                sentence = f"the account {owner} may not take the route {route}: `hosts` of its [[accounts]] in the router's file says which it may"
                raise ApiError("forbidden", sentence)
            for other, function in taken:
                if other == pattern and function != name:
                    raise ApiError("conflict", f"the route {route} is the function {function}'s already")

    def addresses(self, deployment: Deployment) -> tuple[str, ...]:
        """Return the hosts and paths of a deployed function besides /fn/NAME."""
        version = _live(deployment)
        if version is None:
            return ()
        subdomain = (f"{deployment.name}.{self._domain}",) if self._domain and version.has_subdomain else ()
        return (*version.routes, *subdomain)

    def __bool__(self) -> bool:
        return bool(self._places or self._domain)


class FunctionMount:
    """An ASGI application that sends requests for hosts of functions to `inside`, under /fn/NAME.

    Other requests go to `otherwise`.
    """

    def __init__(self, hosts: FunctionHosts, inside: Application, otherwise: Application) -> None:
        self._hosts = hosts
        self._inside = inside
        self._otherwise = otherwise

    def __call__(self, scope: Any, receive: Any, send: Any) -> Coroutine[Any, Any, None]:
        if not self._hosts or scope["type"] not in ("http", "websocket"):
            return self._otherwise(scope, receive, send)
        raw = without_dot_segments(scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0])
        path = unquote(raw)
        if (name := self._function(scope, path)) is None:
            return self._otherwise(scope, receive, send)
        mounted = {
            **scope,
            "path": f"/fn/{name}{path}",
            "raw_path": f"/fn/{name}{raw}".encode("latin-1"),
            OWN_HOST: True,
        }
        return self._inside(mounted, receive, send)

    def _function(self, scope: Any, path: str) -> str | None:
        host = next((value for key, value in scope["headers"] if key == b"host"), b"")
        name = host.decode("latin-1").lower().rpartition(":")[0] if b":" in host else host.decode("latin-1").lower()
        return self._hosts.find(name.removesuffix("."), path)


def _live(deployment: Deployment) -> Version | None:
    """Return the newest version with traffic, whose routes apply; None for a deleted function."""
    return deployment.version(deployment.shares[0].number) if deployment.shares else None
