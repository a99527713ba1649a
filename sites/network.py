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
    """Name of the site, as in its own file."""
    url: str
    """URL where the site listens."""
    place: PlaceConfig
    """Where the site is; first estimates of round-trip times come from it."""
    region: Name | None = None
    """Region of the site, which accounts and models can name in data."""

    rules: ClassVar[Rules] = {"url": is_http}

    def agree(self) -> None:
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))


class HealthConfig(Table, frozen=True, kw_only=True):
    interval_s: Positive = 1.0
    """Time between two probes of one site."""
    timeout_s: Positive = 1.0
    """Timeout of one probe."""
    unhealthy_after: Count = 3
    """Failed probes in a row after which a site is unhealthy."""
    stale_after_s: Positive = 10.0
    """Age after which a site's status is only an estimate."""


class RelayConfig(Table, frozen=True, kw_only=True):
    connect_timeout_s: Positive = 2.0
    """Timeout of a connection to a site."""
    first_byte_timeout_s: Positive = 120.0
    """Silence before a stream's first byte after which the next site is tried."""
    answer_timeout_s: Positive = 600.0
    """The same for an answer that is not streamed, which is generated as a whole before its first byte."""
    idle_timeout_s: Positive = 60.0
    """Silence within a stream after which its site counts as lost."""
    stall_s: Positive = 2.5
    """Silence within a stream (twice that before its first token) after which another healthy site continues it; longer if the site's published pace
    explains it."""
    max_tries: Count = 3
    """Sites tried for one request."""
    continue_within_s: NonNegative = 30.0
    """Time in which a stream must continue at another site after its site was lost; then it ends with an error."""
    max_losses: Annotated[int, Meta(ge=0)] = 3
    """Sites that one stream may lose; 0: streams are not continued. A site that drains does not count."""
    max_body_mib: Positive = 8.0
    """Size of a request's body."""
    max_finetune_mib: Positive = 300.0
    """Size of one uploaded file of an adapter."""
    max_hops: Count = 4
    """Routers and sites that one request may pass; more are taken for a loop."""
    session_entries: Count = 100_000
    """Conversation prefixes that the router remembers, two for each turn; the oldest is dropped first."""
    session_ttl_s: Positive = 3600.0
    """Time after which a conversation prefix is dropped."""
    drain_timeout_s: NonNegative = 30.0
    """Time that open requests have after SIGTERM."""


class DoorConfig(AccessConfig, frozen=True, kw_only=True):
    """Rules for the clients that are served, and limits of their connections."""

    max_head_kib: Annotated[int, Meta(ge=1, le=1024)] = 64
    """Size of a request's head."""
    max_headers: Annotated[int, Meta(ge=8)] = 128
    """Headers of a request."""
    head_timeout_s: Positive = 15.0
    """Time for a request's head, from its first byte."""
    body_timeout_s: Positive = 120.0
    """Time for a request's whole body."""
    max_bodies_mib: Positive = 512.0
    """Memory for the bodies of all requests in progress; above it, requests are refused with Retry-After."""
    max_unread_mib: Positive = 256.0
    """Memory for answers that clients have not read; one address may use a quarter. Above it, the connection that has used the most for the longest
    is closed."""
    keep_alive_s: Positive = 75.0
    """Time without a request after which a connection is closed."""
    stall_timeout_s: Positive = 60.0
    """Time after which a client that does not read its answer is disconnected."""
    max_connections: Count = 20_000
    """Connections of all clients."""
    max_connections_per_client: Count = 256
    """Connections of one address. A load balancer is one address for all its clients."""
    max_open_per_client: Count = 256
    """Requests in progress of one address. A load balancer is one address for all its clients."""


class ClientsConfig(Table, frozen=True, kw_only=True):
    """Locations of clients. A client with an unknown location counts as being near the router."""

    front_ends: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks of CDNs and load balancers whose x-client-geo header (latitude,longitude) is believed."""
    geo_database: str | None = None
    """File in MaxMind's format with coordinates, such as GeoLite2-City.mmdb; unset: other clients count as being near the router. Replace the file by
    renaming."""

    rules: ClassVar[Rules] = {"front_ends": are_networks}


class TenantLimitsConfig(Table, frozen=True, kw_only=True):
    """Limits of one tenant: an account, or an unknown key."""

    requests_per_min: Positive | None = None
    """Requests per minute; unset: no limit."""
    tokens_per_min: Positive | None = None
    """Tokens of prompts (as the router estimates them) and answers per minute. A request reserves its prompt and max_tokens, or 256. Unset: no
    limit."""
    max_open: Count | None = None
    """Requests in progress; unset: no limit."""


class PlacesConfig(Table, frozen=True, kw_only=True):
    """The sites to which data may go: the named sites, and all sites of the named regions."""

    sites: tuple[Name, ...] = ()
    """Names of sites."""
    regions: tuple[Name, ...] = ()
    """Regions of sites."""

    def check(self, sites: Sequence[SiteRef], whose: str) -> None:
        """Raise ValueError for an unknown site or region; `whose` names the owner of the rule in the message."""
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
    """Names, with *, of models that the account may use; unset: all."""
    functions: tuple[str, ...] = ("*",)
    """Names, with *, of functions that the account's keys may deploy, unless another account owns them."""
    tokens_per_day: Count | None = None
    """Tokens of prompts and answers per day (UTC). Each router counts by its own ledger, unless quotas.store is set."""
    cost_per_day: Positive | None = None
    """Cost per day (UTC), in the ledger's currency."""
    hosts: tuple[HostName, ...] = ()
    """Host names that routes of its functions may name, such as shop.example or *.acme.example."""
    data: PlacesConfig | None = None
    """Sites and regions to which its data may go; unset: all."""


class FunctionHostConfig(Table, frozen=True, kw_only=True):
    """A host name whose requests a function answers."""

    pattern: Annotated[str, Meta(pattern=r"^(\*\.?)?[A-Za-z0-9][A-Za-z0-9.-]*/(\*|[^*?]+\*?)?\Z", max_length=300)]
    """Host and path, such as shop.example/* or *.shop.example/api/*; of several that fit, the most specific counts."""
    function: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z")]
    """Name of the function."""


class NetworkFunctionsConfig(Table, frozen=True, kw_only=True):
    """The names of functions in the network."""

    domain: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)+\Z")] | None = None
    """Domain such as fn.example: NAME.fn.example is the function NAME. DNS must lead *.fn.example to this router."""


class NetworkModelConfig(Table, frozen=True, kw_only=True):
    """A rule for models at all sites."""

    model: Annotated[str, Meta(min_length=1)]
    """Name of the models, with *."""
    data: PlacesConfig | None = None
    """Sites and regions to which requests for it may go; unset: all."""


class DurableConfig(Table, frozen=True, kw_only=True):
    """Streams that can be read again.
    Their events are stored in the router's memory, and in a directory that routers may share."""

    directory: str | None = None
    """Directory that routers may share: each continues a stream that another one started. Unset: a stream ends with its router."""
    max_stream_mib: Positive = 8.0
    """Size of one stream; a longer one is ended."""
    max_total_mib: Positive = 256.0
    """Size of all streams; those that ended first are dropped first."""
    keep_s: Positive = 300.0
    """Time for which a stream can be read after its end."""
    max_age_s: Positive = 3600.0
    """Time after which a stream that has not ended is ended."""


class LedgerConfig(Table, frozen=True, kw_only=True):
    """The record of each account's usage.
    Needs PILOTLIGHT_HOP_SECRET, with which sites sign what they report."""

    directory: str | None = None
    """Directory of this router only, on a disk that outlives it; unset: usage is not recorded."""
    store: PostgresUrl | None = None
    """PostgreSQL database that routers may share, as postgresql://USER@HOST/DATABASE, with the password in PGPASSWORD or ~/.pgpass; unset: a SQLite
    file in the directory."""
    when_failing: Literal["refuse", "serve"] = "refuse"
    """While the store cannot be written: refuse new requests, or serve up to max_unwritten of them and write their usage later."""
    max_unwritten: Annotated[int, Meta(ge=16, le=1_000_000)] = 16_384
    """Requests whose usage is not written yet, of 1 KiB each."""
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z")] = "USD"
    """Currency of all prices (ISO 4217)."""


class SharedResponsesConfig(ResponsesConfig, frozen=True, kw_only=True):
    """Stored responses (POST /v1/responses) of this router, or of all routers that share a store."""

    store: PostgresUrl | None = None
    """PostgreSQL database in which all routers that name it store responses, as ledger.store; unset: a SQLite file in the directory."""


class QuotasConfig(Table, frozen=True, kw_only=True):
    """Limits of accounts that all routers of a network enforce together."""

    store: PostgresUrl | None = None
    """PostgreSQL database through which routers share accounts' limits, as ledger.store; unset: each router grants the whole limit."""
    when_failing: Literal["refuse", "serve"] = "serve"
    """While the store cannot be reached: serve by the router's own counts, or refuse accounts with limits once the router has used what it had
    leased."""


class PriceConfig(Table, frozen=True, kw_only=True):
    """The price of a million tokens. Of several that fit a model, the newest valid one counts."""

    model: Annotated[str, Meta(min_length=1)]
    """Name of the models, with *."""
    input: NonNegative
    """Price of a million prompt tokens."""
    output: NonNegative
    """Price of a million output tokens, reasoning included."""
    cached_input: NonNegative | None = None
    """Price of a million prompt tokens that were cached; unset: the same as input."""
    valid_from: Moment | None = None
    """Start of requests from which the price counts; unset: always."""


Share = Annotated[float, Meta(gt=0.0, lt=1.0)]


class ObjectiveConfig(Table, frozen=True, kw_only=True):
    """A service-level objective over 30 days.
    A request counts for the first objective that fits its model."""

    model: Annotated[str, Meta(min_length=1)]
    """Name of the models, with *."""
    answered: Share | None = None
    """Share of requests that must not fail, such as 0.999."""
    first_token: Share | None = None
    """Share of streams whose first token must come within first_token_ms."""
    first_token_ms: Positive | None = None
    """Time to the first token, from the request's arrival at the router."""

    def agree(self) -> None:
        if (self.first_token is None) != (self.first_token_ms is None):
            raise ValueError("first_token and first_token_ms belong together: set both or neither")
        if self.answered is None and self.first_token is None:
            raise ValueError("an objective needs answered, or first_token with first_token_ms")


class JoinConfig(Table, frozen=True, kw_only=True):
    """Machines that become sites by a token (`pilotlight join`)."""

    directory: str | None = None
    """The network's folder, which `pilotlight network init` makes; unset: no machine may join."""


class NetworkConfig(Table, frozen=True, kw_only=True):
    """The router's file."""

    listen: ListenConfig
    """Address of the router's HTTP server, and its TLS certificate."""
    hop: HopConfig = HopConfig()
    """What the router and its sites know each other by."""
    join: JoinConfig = JoinConfig()
    """Machines that may join as sites."""
    door: DoorConfig = DoorConfig()
    """Which clients are served, and limits of their connections."""
    clients: ClientsConfig = ClientsConfig()
    """Where clients are."""
    tenant_limits: TenantLimitsConfig = TenantLimitsConfig()
    """Limits of every account without its own, and of unknown keys."""
    accounts: tuple[CustomerConfig, ...] = ()
    """Accounts with their limits."""
    keys: tuple[KeyConfig, ...] = ()
    """API keys, by their digests (`pilotlight keys create`)."""
    durable: DurableConfig = DurableConfig()
    """Streams that can be read again."""
    responses: SharedResponsesConfig = SharedResponsesConfig()
    """Stored responses (POST /v1/responses)."""
    ledger: LedgerConfig = LedgerConfig()
    """Record of each account's usage."""
    quotas: QuotasConfig = QuotasConfig()
    """Limits that routers share."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logs and traces."""
    prices: tuple[PriceConfig, ...] = ()
    """Prices, shown in /v1/models and GET /usage. Of several that fit, the newest valid one counts."""
    models: tuple[NetworkModelConfig, ...] = ()
    """Rules for models, by name."""
    functions: NetworkFunctionsConfig = NetworkFunctionsConfig()
    """Names of functions in the network."""
    hosts: tuple[FunctionHostConfig, ...] = ()
    """Host names that functions answer."""
    objectives: tuple[ObjectiveConfig, ...] = ()
    """Service-level objectives."""
    place: PlaceConfig
    """Where the router is."""
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
    """Keys and accounts that a router made while it ran; a key may name an account of the router's file."""

    accounts: tuple[CustomerConfig, ...] = ()
    """Accounts with their limits."""
    keys: tuple[KeyConfig, ...] = ()
    """API keys, by their digests."""


def load_network(path: Path) -> NetworkConfig:
    return parse(NetworkConfig, read(path), str(path))
