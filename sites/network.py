"""A router's configuration file: its network's sites, clients, accounts, limits and timeouts.

`load_network` reads it. Sites never import this module.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from pilotlight.sites.accounts import KeyConfig, Moment, Name, check_accounts
from pilotlight.sites.config import (
    AccessConfig,
    Count,
    HopConfig,
    ListenConfig,
    NonNegative,
    PlaceConfig,
    Positive,
    ResponsesConfig,
    TelemetryConfig,
    check_access,
    parse,
    read,
)
from pilotlight.sites.rules import are_networks, is_http, refuse_twice
from pilotlight.sites.table import Rules, Table

NETWORK_FILE = Path(__file__).parent / "network.toml"
PostgresUrl = Annotated[str, Meta(pattern=r"^postgres(ql)?://")]


class SiteRef(Table, frozen=True, kw_only=True):
    """A site in the router's file."""

    name: Name
    """Name of the site, which must equal the name in the site's own file."""
    url: str
    """URL of the site's HTTP server."""
    place: PlaceConfig
    """Location of the site, for the first estimates of round-trip times."""
    region: Name | None = None
    """Region of the site, to which the data rules of accounts and models can refer."""

    rules: ClassVar[Rules] = {"url": is_http}

    def agree(self) -> None:
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))


class HealthConfig(Table, frozen=True, kw_only=True):
    interval_s: Positive = 1.0
    """Interval between two probes of one site."""
    timeout_s: Positive = 1.0
    """Timeout of one probe."""
    unhealthy_after: Count = 3
    """Number of failed probes in a row after which a site is unhealthy."""
    stale_after_s: Positive = 10.0
    """Age after which a site's status is treated as an estimate."""


class RelayConfig(Table, frozen=True, kw_only=True):
    connect_timeout_s: Positive = 2.0
    """Timeout of connecting to a site."""
    first_byte_timeout_s: Positive = 120.0
    """Silence before a stream's first byte after which the next site is tried."""
    answer_timeout_s: Positive = 600.0
    """The same for an answer that is not streamed. It is complete before its first byte is sent."""
    idle_timeout_s: Positive = 60.0
    """Silence within a stream after which its site counts as lost."""
    stall_s: Positive = 2.5
    """Silence within a stream (twice that before its first token) after which another healthy site continues it. It is longer if the site's published
    speed explains the silence."""
    max_tries: Count = 3
    """Maximum number of sites that are tried for one request."""
    continue_within_s: NonNegative = 30.0
    """Time limit for continuing a stream at another site after its site was lost; later it ends with an error."""
    max_losses: Annotated[int, Meta(ge=0)] = 3
    """Number of sites that one stream may lose; 0: streams are not continued. A site that drains does not count."""
    max_body_mib: Positive = 8.0
    """Maximum size of a request's body."""
    max_function_body_mib: Positive = 100.0
    """Maximum size of the body of a function's request. It is held in memory (max_bodies_mib) until the site has answered."""
    max_finetune_mib: Positive = 300.0
    """Maximum size of one uploaded file of an adapter."""
    max_hops: Count = 4
    """Maximum number of routers and sites that one request may pass; with more, it is refused as a loop."""
    session_entries: Count = 100_000
    """Number of conversation prefixes that the router remembers, two for each turn; the oldest are dropped first."""
    session_ttl_s: Positive = 3600.0
    """Age after which an unused conversation prefix is dropped."""
    drain_timeout_s: NonNegative = 30.0
    """Time that open requests may take to finish after SIGTERM."""


class DoorConfig(AccessConfig, frozen=True, kw_only=True):
    """Rules for the clients that are served, and limits of their connections."""

    max_head_kib: Annotated[int, Meta(ge=1, le=1024)] = 64
    """Maximum size of a request's head."""
    max_headers: Annotated[int, Meta(ge=8)] = 128
    """Maximum number of headers of a request."""
    head_timeout_s: Positive = 15.0
    """Time limit for receiving a request's head, from its first byte."""
    body_timeout_s: Positive = 120.0
    """Time limit for receiving a request's whole body."""
    max_bodies_mib: Positive = 512.0
    """Memory for the bodies of all requests in progress; above it, requests are refused with Retry-After."""
    max_unread_mib: Positive = 256.0
    """Memory for responses that clients have not read; one address may use a quarter. Above it, the connection is closed that has used the most for
    the longest time."""
    keep_alive_s: Positive = 75.0
    """Time without a request after which a connection is closed."""
    stall_timeout_s: Positive = 60.0
    """Time after which a client that does not read its answer is disconnected."""
    max_connections: Count = 20_000
    """Maximum number of connections of all clients."""
    max_connections_per_client: Count = 256
    """Maximum number of connections from one address. A load balancer is one address for all its clients."""
    max_open_per_client: Count = 256
    """Maximum number of requests in progress from one address. A load balancer is one address for all its clients."""


class ClientsConfig(Table, frozen=True, kw_only=True):
    """Locations of clients. A client whose location is unknown is assumed to be near the router."""

    front_ends: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks of CDNs and load balancers whose header x-client-geo (latitude,longitude) is trusted."""
    geo_database: str | None = None
    """File with coordinates in MaxMind's format, such as GeoLite2-City.mmdb; unset: other clients are assumed to be near the router. Replace the file
    by renaming."""

    rules: ClassVar[Rules] = {"front_ends": are_networks}


class TenantLimitsConfig(Table, frozen=True, kw_only=True):
    """Limits of one tenant: an account, or an unknown key."""

    requests_per_min: Positive | None = None
    """Maximum number of requests per minute; unset: no limit."""
    tokens_per_min: Positive | None = None
    """Maximum number of tokens per minute, of prompts (as the router estimates them) and answers. A request reserves its prompt and max_tokens, or
    256 if unset. Unset: no limit."""
    max_open: Count | None = None
    """Maximum number of requests in progress; unset: no limit."""


class PlacesConfig(Table, frozen=True, kw_only=True):
    """The sites to which data may go: the named sites, and all sites of the named regions."""

    sites: tuple[Name, ...] = ()
    """Names of sites."""
    regions: tuple[Name, ...] = ()
    """Regions of sites."""

    def check(self, sites: Sequence[SiteRef], whose: str) -> None:
        """Raise ValueError for an unknown site or region, or if none is named.
        `whose` is the rule's owner in the message."""
        for named, known, what in (
            (self.sites, {site.name for site in sites}, "site"),
            (self.regions, {site.region for site in sites}, "region"),
        ):
            for name in named:
                if name not in known:
                    raise ValueError(f"data of {whose} names the {what} {name!r}, which no entry of [[sites]] has")
        if not (self.sites or self.regions):
            raise ValueError(f"data of {whose} names no site: name sites or regions, or remove data")


HostName = Annotated[
    str, Meta(pattern=r"^(\*\.?)?[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)*\Z", max_length=253)
]


class CustomerConfig(TenantLimitsConfig, frozen=True, kw_only=True):
    """An account with its own limits, which all its keys share."""

    name: Name
    """Name of the account."""
    models: tuple[str, ...] | None = None
    """Names of the models that the account may use; * matches any text. Unset: all models."""
    functions: tuple[str, ...] = ("*",)
    """Names of the functions that the account's keys may deploy, unless another account owns them; * matches any text."""
    tokens_per_day: Count | None = None
    """Maximum number of tokens per day (UTC), of prompts and answers. Each router counts in its own ledger, unless quotas.store is set."""
    cost_per_day: Positive | None = None
    """Maximum cost per day (UTC), in the ledger's currency."""
    hosts: tuple[HostName, ...] = ()
    """Host names that the routes of its functions may use, such as shop.example or *.acme.example."""
    data: PlacesConfig | None = None
    """Sites and regions to which its data may go; unset: all."""


class FunctionHostConfig(Table, frozen=True, kw_only=True):
    """A host name whose requests a function answers."""

    pattern: Annotated[str, Meta(pattern=r"^(\*\.?)?[A-Za-z0-9][A-Za-z0-9.-]*/(\*|[^*?]+\*?)?\Z", max_length=300)]
    """Host and path, such as shop.example/* or *.shop.example/api/*. If several patterns match, the most specific one applies."""
    function: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z")]
    """Name of the function."""


class NetworkFunctionsConfig(Table, frozen=True, kw_only=True):
    """Host names of functions in the network."""

    domain: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)+\Z")] | None = None
    """Domain such as fn.example: NAME.fn.example is then the function NAME. DNS must resolve *.fn.example to this router."""


class NetworkModelConfig(Table, frozen=True, kw_only=True):
    """A rule for models at all sites."""

    model: Annotated[str, Meta(min_length=1)]
    """Model name, or a pattern in which * matches any text."""
    data: PlacesConfig | None = None
    """Sites and regions to which requests for these models may go; unset: all."""


class LedgerConfig(Table, frozen=True, kw_only=True):
    """The record of each account's usage.
    Needs PILOTLIGHT_HOP_SECRET, with which sites sign the usage that they report."""

    directory: str | None = None
    """Directory for this router only, on persistent storage; unset: usage is not recorded."""
    store: PostgresUrl | None = None
    """PostgreSQL database that routers may share, as postgresql://USER@HOST/DATABASE, with the password in PGPASSWORD or ~/.pgpass; unset: a SQLite
    file in the directory."""
    when_failing: Literal["refuse", "serve"] = "refuse"
    """What to do while the store cannot be written. refuse: refuse new requests; serve: serve up to max_unwritten of them, and write their usage
    later."""
    max_unwritten: Annotated[int, Meta(ge=16, le=1_000_000)] = 16_384
    """Maximum number of requests whose usage is not written yet. Each takes 1 KiB."""
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z")] = "USD"
    """Currency of all prices (ISO 4217)."""


class SharedResponsesConfig(ResponsesConfig, frozen=True, kw_only=True):
    """Stored responses (POST /v1/responses) of this router, or of all routers that share a store."""

    store: PostgresUrl | None = None
    """PostgreSQL database in which several routers store responses (URL as in ledger.store); unset: a SQLite file in the directory."""


class QuotasConfig(Table, frozen=True, kw_only=True):
    """Limits of accounts that all routers of a network enforce together."""

    store: PostgresUrl | None = None
    """PostgreSQL database through which routers share accounts' limits (URL as in ledger.store); unset: each router grants the whole limit."""
    when_failing: Literal["refuse", "serve"] = "serve"
    """What to do while the store cannot be reached. serve: apply the router's own counts; refuse: refuse accounts with limits once the router has
    used up what it had leased."""


class PriceConfig(Table, frozen=True, kw_only=True):
    """The price of a million tokens. If several match a model, the newest valid one applies."""

    model: Annotated[str, Meta(min_length=1)]
    """Model name, or a pattern in which * matches any text."""
    input: NonNegative
    """Price of a million prompt tokens."""
    output: NonNegative
    """Price of a million output tokens, including reasoning."""
    cached_input: NonNegative | None = None
    """Price of a million cached prompt tokens; unset: the same as input."""
    valid_from: Moment | None = None
    """The price applies to requests that start at this time or later; unset: to all."""


Share = Annotated[float, Meta(gt=0.0, lt=1.0)]


class ObjectiveConfig(Table, frozen=True, kw_only=True):
    """A service-level objective over 30 days.
    A request counts for the first objective that matches its model."""

    model: Annotated[str, Meta(min_length=1)]
    """Model name, or a pattern in which * matches any text."""
    answered: Share | None = None
    """Required share of requests that do not fail, such as 0.999."""
    first_token: Share | None = None
    """Required share of streams whose first token arrives within first_token_ms."""
    first_token_ms: Positive | None = None
    """Limit of the time to the first token, from the request's arrival at the router."""

    def agree(self) -> None:
        if (self.first_token is None) != (self.first_token_ms is None):
            raise ValueError("first_token and first_token_ms belong together: set both or neither")
        if self.answered is None and self.first_token is None:
            raise ValueError("an objective needs answered, or first_token with first_token_ms")


class JoinConfig(Table, frozen=True, kw_only=True):
    """Joining of machines as sites, by tokens (`pilotlight join`)."""

    directory: str | None = None
    """The network's folder, made by `pilotlight network init`; unset: no machine may join."""


class NetworkConfig(Table, frozen=True, kw_only=True):
    """The router's file."""

    listen: ListenConfig
    """Address of the router's HTTP server, and its TLS certificate."""
    hop: HopConfig = HopConfig()
    """Authentication between the router and its sites."""
    join: JoinConfig = JoinConfig()
    """Joining of machines as sites."""
    door: DoorConfig = DoorConfig()
    """Rules for clients, and limits of their connections."""
    clients: ClientsConfig = ClientsConfig()
    """Locations of clients."""
    tenant_limits: TenantLimitsConfig = TenantLimitsConfig()
    """Limits of every account that sets no limits, and of unknown keys."""
    accounts: tuple[CustomerConfig, ...] = ()
    """Accounts with their limits."""
    keys: tuple[KeyConfig, ...] = ()
    """API keys, by their digests (`pilotlight keys create`)."""
    responses: SharedResponsesConfig = SharedResponsesConfig()
    """Stored responses (POST /v1/responses)."""
    ledger: LedgerConfig = LedgerConfig()
    """Record of each account's usage."""
    quotas: QuotasConfig = QuotasConfig()
    """Limits of accounts that routers share."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logs and traces."""
    prices: tuple[PriceConfig, ...] = ()
    """Prices, shown in /v1/models and GET /usage. If several match, the newest valid one applies."""
    models: tuple[NetworkModelConfig, ...] = ()
    """Rules for models, by their names."""
    functions: NetworkFunctionsConfig = NetworkFunctionsConfig()
    """Host names of functions in the network."""
    hosts: tuple[FunctionHostConfig, ...] = ()
    """Host names whose requests functions answer."""
    objectives: tuple[ObjectiveConfig, ...] = ()
    """Service-level objectives."""
    place: PlaceConfig
    """Location of the router."""
    sites: tuple[SiteRef, ...] = ()
    """The sites of the network; at least one, unless machines may join."""
    health: HealthConfig = HealthConfig()
    """Probes of sites."""
    relay: RelayConfig = RelayConfig()
    """Timeouts, retries and continuation."""

    def agree(self) -> None:
        refuse_twice([site.name for site in self.sites], "site name")
        if not self.sites and self.join.directory is None:
            raise ValueError(
                "there is no site: name one under [[sites]], or let machines join (`pilotlight network init`)"
            )
        refuse_twice([host.pattern.lower() for host in self.hosts], "host pattern")
        refuse_twice([objective.model for objective in self.objectives], "objective's model")
        check_accounts([account.name for account in self.accounts], self.keys)
        for account in self.accounts:
            if account.data is not None:
                account.data.check(self.sites, f"the account {account.name}")
            if self.ledger.directory is None and (account.tokens_per_day or account.cost_per_day):
                raise ValueError(
                    f"the account {account.name} has a daily quota, which needs a ledger: set ledger.directory"
                )
        for model in self.models:
            if model.data is not None:
                model.data.check(self.sites, f"the model {model.model}")
        check_access(self.listen.host, self.door, len(self.keys))


class IssuedKeysFile(Table, frozen=True, kw_only=True):
    """Keys and accounts that were made while the router ran.
    A key may name an account of the router's file."""

    accounts: tuple[CustomerConfig, ...] = ()
    """Accounts with their limits."""
    keys: tuple[KeyConfig, ...] = ()
    """API keys, by their digests."""


def load_network(path: Path) -> NetworkConfig:
    return parse(NetworkConfig, read(path), str(path))
