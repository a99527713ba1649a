"""A router's configuration file: its network's sites, clients, accounts, limits and timeouts.

`load_network` reads it. Sites never import this module.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from pilotlight.sites.accounts import AllowedModels, KeyConfig, Moment, Name, check_accounts
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


class SiteRef(Table, frozen=True, kw_only=True):
    """A site in the router's file."""

    name: Annotated[Name, Meta(description="Name of the site, as in its own file.")]
    url: Annotated[str, Meta(description="URL where the site listens.")]
    place: Annotated[
        PlaceConfig, Meta(description="Where the site is; first estimates of round-trip times come from it.")
    ]
    region: Annotated[
        Name | None, Meta(description="Region of the site, which accounts and models can name in data.")
    ] = None

    rules: ClassVar[Rules] = {"url": is_http}

    def agree(self) -> None:
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))


class HealthConfig(Table, frozen=True, kw_only=True):
    interval_s: Annotated[Positive, Meta(description="Time between two probes of one site.")] = 1.0
    timeout_s: Annotated[Positive, Meta(description="Timeout of one probe.")] = 1.0
    unhealthy_after: Annotated[Count, Meta(description="Failed probes in a row after which a site is unhealthy.")] = 3
    stale_after_s: Annotated[Positive, Meta(description="Age after which a site's status is only an estimate.")] = 10.0


class RelayConfig(Table, frozen=True, kw_only=True):
    connect_timeout_s: Annotated[Positive, Meta(description="Timeout of a connection to a site.")] = 2.0
    first_byte_timeout_s: Annotated[
        Positive, Meta(description="Silence before a stream's first byte after which the next site is tried.")
    ] = 120.0
    answer_timeout_s: Annotated[
        Positive,
        Meta(
            description="The same for an answer that is not streamed, which is generated as a whole before its first byte."
        ),
    ] = 600.0
    idle_timeout_s: Annotated[
        Positive, Meta(description="Silence within a stream after which its site counts as lost.")
    ] = 60.0
    stall_s: Annotated[
        Positive,
        Meta(
            description=(
                "Silence within a stream (twice that before its first token) after which another healthy site continues "
                "it; longer if the site's published pace explains it."
            )
        ),
    ] = 2.5
    max_tries: Annotated[Count, Meta(description="Sites tried for one request.")] = 3
    continue_within_s: Annotated[
        NonNegative,
        Meta(
            description=(
                "Time in which a stream must continue at another site after its site was lost; then it ends with an "
                "error."
            )
        ),
    ] = 30.0
    max_losses: Annotated[
        int,
        Meta(
            ge=0,
            description="Sites that one stream may lose; 0: streams are not continued. A site that drains does not count.",
        ),
    ] = 3
    max_body_mib: Annotated[Positive, Meta(description="Size of a request's body.")] = 8.0
    max_finetune_mib: Annotated[Positive, Meta(description="Size of one uploaded file of an adapter.")] = 300.0
    max_hops: Annotated[
        Count, Meta(description="Routers and sites that one request may pass; more are taken for a loop.")
    ] = 4
    session_entries: Annotated[
        Count,
        Meta(
            description="Conversation prefixes that the router remembers, two for each turn; the oldest is dropped first."
        ),
    ] = 100_000
    session_ttl_s: Annotated[Positive, Meta(description="Time after which a conversation prefix is dropped.")] = 3600.0
    drain_timeout_s: Annotated[NonNegative, Meta(description="Time that open requests have after SIGTERM.")] = 30.0


class DoorConfig(AccessConfig, frozen=True, kw_only=True):
    """Rules for the clients that are served, and limits of their connections."""

    max_head_kib: Annotated[int, Meta(ge=1, le=1024, description="Size of a request's head.")] = 64
    max_headers: Annotated[int, Meta(ge=8, description="Headers of a request.")] = 128
    head_timeout_s: Annotated[Positive, Meta(description="Time for a request's head, from its first byte.")] = 15.0
    body_timeout_s: Annotated[Positive, Meta(description="Time for a request's whole body.")] = 120.0
    max_bodies_mib: Annotated[
        Positive,
        Meta(
            description="Memory for the bodies of all requests in progress; above it, requests are refused with Retry-After."
        ),
    ] = 512.0
    max_unread_mib: Annotated[
        Positive,
        Meta(
            description=(
                "Memory for answers that clients have not read; one address may use a quarter. Above it, the connection "
                "that has used the most for the longest is closed."
            )
        ),
    ] = 256.0
    keep_alive_s: Annotated[
        Positive, Meta(description="Time without a request after which a connection is closed.")
    ] = 75.0
    stall_timeout_s: Annotated[
        Positive, Meta(description="Time after which a client that does not read its answer is disconnected.")
    ] = 60.0
    max_connections: Annotated[Count, Meta(description="Connections of all clients.")] = 20_000
    max_connections_per_client: Annotated[
        Count, Meta(description="Connections of one address. A load balancer is one address for all its clients.")
    ] = 256
    max_open_per_client: Annotated[
        Count,
        Meta(description="Requests in progress of one address. A load balancer is one address for all its clients."),
    ] = 256


class ClientsConfig(Table, frozen=True, kw_only=True):
    """Locations of clients. A client with an unknown location counts as being near the router."""

    front_ends: Annotated[
        tuple[str, ...],
        Meta(
            description="Networks of CDNs and load balancers whose x-client-geo header (latitude,longitude) is believed."
        ),
    ] = ("127.0.0.0/8", "::1/128")
    geo_database: Annotated[
        str | None,
        Meta(
            description=(
                "File in MaxMind's format with coordinates, such as GeoLite2-City.mmdb; unset: other clients count as "
                "being near the router. Replace the file by renaming."
            )
        ),
    ] = None

    rules: ClassVar[Rules] = {"front_ends": are_networks}


class TenantLimitsConfig(Table, frozen=True, kw_only=True):
    """Limits of one tenant: an account, or an unknown key."""

    requests_per_min: Annotated[Positive | None, Meta(description="Requests per minute; unset: no limit.")] = None
    tokens_per_min: Annotated[
        Positive | None,
        Meta(
            description=(
                "Tokens of prompts (as the router estimates them) and answers per minute. A request reserves its prompt "
                "and max_tokens, or 256. Unset: no limit."
            )
        ),
    ] = None
    max_open: Annotated[Count | None, Meta(description="Requests in progress; unset: no limit.")] = None


class PlacesConfig(Table, frozen=True, kw_only=True):
    """The sites to which data may go: the named sites, and all sites of the named regions."""

    sites: Annotated[tuple[Name, ...], Meta(description="Names of sites.")] = ()
    regions: Annotated[tuple[Name, ...], Meta(description="Regions of sites.")] = ()

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

    name: Annotated[Name, Meta(description="Name of the account.")]
    models: AllowedModels = None
    functions: Annotated[
        tuple[str, ...],
        Meta(
            description="Names, with *, of functions that the account's keys may deploy, unless another account owns them."
        ),
    ] = ("*",)
    tokens_per_day: Annotated[
        Count | None,
        Meta(
            description=(
                "Tokens of prompts and answers per day (UTC). Each router counts by its own ledger, unless quotas.store "
                "is set."
            )
        ),
    ] = None
    cost_per_day: Annotated[Positive | None, Meta(description="Cost per day (UTC), in the ledger's currency.")] = None
    hosts: Annotated[
        tuple[HostName, ...],
        Meta(description="Host names that routes of its functions may name, such as shop.example or *.acme.example."),
    ] = ()
    data: Annotated[
        PlacesConfig | None, Meta(description="Sites and regions to which its data may go; unset: all.")
    ] = None


class FunctionHostConfig(Table, frozen=True, kw_only=True):
    """A host name whose requests a function answers."""

    pattern: Annotated[
        str,
        Meta(
            pattern=r"^(\*\.?)?[A-Za-z0-9][A-Za-z0-9.-]*/(\*|[^*?]+\*?)?\Z",
            max_length=300,
            description="Host and path, such as shop.example/* or *.shop.example/api/*; of several that fit, the most specific counts.",
        ),
    ]
    function: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z", description="Name of the function.")]


class NetworkFunctionsConfig(Table, frozen=True, kw_only=True):
    """The names of functions in the network."""

    domain: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)+\Z")] | None,
        Meta(
            description="Domain such as fn.example: NAME.fn.example is the function NAME. DNS must lead *.fn.example to this router."
        ),
    ] = None


class NetworkModelConfig(Table, frozen=True, kw_only=True):
    """A rule for models at all sites."""

    model: Annotated[str, Meta(min_length=1, description="Name of the models, with *.")]
    data: Annotated[
        PlacesConfig | None, Meta(description="Sites and regions to which requests for it may go; unset: all.")
    ] = None


class DurableConfig(Table, frozen=True, kw_only=True):
    """Streams that can be read again.
    Their events are stored in the router's memory, and in a directory that routers may share."""

    directory: Annotated[
        str | None,
        Meta(
            description=(
                "Directory that routers may share: each continues a stream that another one started. Unset: a stream ends"
                " with its router."
            )
        ),
    ] = None
    max_stream_mib: Annotated[Positive, Meta(description="Size of one stream; a longer one is ended.")] = 8.0
    max_total_mib: Annotated[
        Positive, Meta(description="Size of all streams; those that ended first are dropped first.")
    ] = 256.0
    keep_s: Annotated[Positive, Meta(description="Time for which a stream can be read after its end.")] = 300.0
    max_age_s: Annotated[Positive, Meta(description="Time after which a stream that has not ended is ended.")] = 3600.0


class LedgerConfig(Table, frozen=True, kw_only=True):
    """The record of each account's usage.
    Needs PILOTLIGHT_HOP_SECRET, with which sites sign what they report."""

    directory: Annotated[
        str | None,
        Meta(description="Directory of this router only, on a disk that outlives it; unset: usage is not recorded."),
    ] = None
    store: Annotated[
        Annotated[str, Meta(pattern=r"^postgres(ql)?://")] | None,
        Meta(
            description=(
                "PostgreSQL database that routers may share, as postgresql://USER@HOST/DATABASE, with the password in "
                "PGPASSWORD or ~/.pgpass; unset: a SQLite file in the directory."
            )
        ),
    ] = None
    when_failing: Annotated[
        Literal["refuse", "serve"],
        Meta(
            description=(
                "While the store cannot be written: refuse new requests, or serve up to max_unwritten of them and write "
                "their usage later."
            )
        ),
    ] = "refuse"
    max_unwritten: Annotated[
        int, Meta(ge=16, le=1_000_000, description="Requests whose usage is not written yet, of 1 KiB each.")
    ] = 16_384
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z", description="Currency of all prices (ISO 4217).")] = "USD"


class SharedResponsesConfig(ResponsesConfig, frozen=True, kw_only=True):
    """Stored responses (POST /v1/responses) of this router, or of all routers that share a store."""

    store: Annotated[
        Annotated[str, Meta(pattern=r"^postgres(ql)?://")] | None,
        Meta(
            description=(
                "PostgreSQL database in which all routers that name it store responses, as ledger.store; unset: a SQLite "
                "file in the directory."
            )
        ),
    ] = None


class QuotasConfig(Table, frozen=True, kw_only=True):
    """Limits of accounts that all routers of a network enforce together."""

    store: Annotated[
        Annotated[str, Meta(pattern=r"^postgres(ql)?://")] | None,
        Meta(
            description=(
                "PostgreSQL database through which routers share accounts' limits, as ledger.store; unset: each router "
                "grants the whole limit."
            )
        ),
    ] = None
    when_failing: Annotated[
        Literal["refuse", "serve"],
        Meta(
            description=(
                "While the store cannot be reached: serve by the router's own counts, or refuse accounts with limits once"
                " the router has used what it had leased."
            )
        ),
    ] = "serve"


class PriceConfig(Table, frozen=True, kw_only=True):
    """The price of a million tokens. Of several that fit a model, the newest valid one counts."""

    model: Annotated[str, Meta(min_length=1, description="Name of the models, with *.")]
    input: Annotated[NonNegative, Meta(description="Price of a million prompt tokens.")]
    output: Annotated[NonNegative, Meta(description="Price of a million output tokens, reasoning included.")]
    cached_input: Annotated[
        NonNegative | None,
        Meta(description="Price of a million prompt tokens that were cached; unset: the same as input."),
    ] = None
    valid_from: Annotated[
        Moment | None, Meta(description="Start of requests from which the price counts; unset: always.")
    ] = None


Share = Annotated[float, Meta(gt=0.0, lt=1.0)]


class ObjectiveConfig(Table, frozen=True, kw_only=True):
    """A service-level objective over 30 days.
    A request counts for the first objective that fits its model."""

    model: Annotated[str, Meta(min_length=1, description="Name of the models, with *.")]
    answered: Annotated[Share | None, Meta(description="Share of requests that must not fail, such as 0.999.")] = None
    first_token: Annotated[
        Share | None, Meta(description="Share of streams whose first token must come within first_token_ms.")
    ] = None
    first_token_ms: Annotated[
        Positive | None, Meta(description="Time to the first token, from the request's arrival at the router.")
    ] = None

    def agree(self) -> None:
        if (self.first_token is None) != (self.first_token_ms is None):
            raise ValueError("first_token and first_token_ms belong together: set both or neither")
        if self.answered is None and self.first_token is None:
            raise ValueError("an objective needs answered, or first_token with first_token_ms")


class JoinConfig(Table, frozen=True, kw_only=True):
    """Machines that become sites by a token (`pilotlight join`)."""

    directory: Annotated[
        str | None,
        Meta(description="The network's folder, which `pilotlight network init` makes; unset: no machine may join."),
    ] = None


class NetworkConfig(Table, frozen=True, kw_only=True):
    """The router's file."""

    listen: Annotated[ListenConfig, Meta(description="Address of the router's HTTP server, and its TLS certificate.")]
    hop: Annotated[HopConfig, Meta(description="What the router and its sites know each other by.")] = HopConfig()
    join: Annotated[JoinConfig, Meta(description="Machines that may join as sites.")] = JoinConfig()
    door: Annotated[DoorConfig, Meta(description="Which clients are served, and limits of their connections.")] = (
        DoorConfig()
    )
    clients: Annotated[ClientsConfig, Meta(description="Where clients are.")] = ClientsConfig()
    tenant_limits: Annotated[
        TenantLimitsConfig, Meta(description="Limits of every account without its own, and of unknown keys.")
    ] = TenantLimitsConfig()
    accounts: Annotated[tuple[CustomerConfig, ...], Meta(description="Accounts with their limits.")] = ()
    keys: Annotated[
        tuple[KeyConfig, ...], Meta(description="API keys, by their digests (`pilotlight keys create`).")
    ] = ()
    durable: Annotated[DurableConfig, Meta(description="Streams that can be read again.")] = DurableConfig()
    responses: Annotated[SharedResponsesConfig, Meta(description="Stored responses (POST /v1/responses).")] = (
        SharedResponsesConfig()
    )
    ledger: Annotated[LedgerConfig, Meta(description="Record of each account's usage.")] = LedgerConfig()
    quotas: Annotated[QuotasConfig, Meta(description="Limits that routers share.")] = QuotasConfig()
    telemetry: Annotated[TelemetryConfig, Meta(description="Logs and traces.")] = TelemetryConfig()
    prices: Annotated[
        tuple[PriceConfig, ...],
        Meta(
            description="Prices, shown in /v1/models and GET /usage. Of several that fit, the newest valid one counts."
        ),
    ] = ()
    models: Annotated[tuple[NetworkModelConfig, ...], Meta(description="Rules for models, by name.")] = ()
    functions: Annotated[NetworkFunctionsConfig, Meta(description="Names of functions in the network.")] = (
        NetworkFunctionsConfig()
    )
    hosts: Annotated[tuple[FunctionHostConfig, ...], Meta(description="Host names that functions answer.")] = ()
    objectives: Annotated[tuple[ObjectiveConfig, ...], Meta(description="Service-level objectives.")] = ()
    place: Annotated[PlaceConfig, Meta(description="Where the router is.")]
    sites: Annotated[
        tuple[SiteRef, ...], Meta(description="The sites of the network; at least one, unless machines may join.")
    ] = ()
    health: Annotated[HealthConfig, Meta(description="Probes of sites.")] = HealthConfig()
    relay: Annotated[RelayConfig, Meta(description="Timeouts, retries and continuation.")] = RelayConfig()

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

    accounts: Annotated[tuple[CustomerConfig, ...], Meta(description="Accounts with their limits.")] = ()
    keys: Annotated[tuple[KeyConfig, ...], Meta(description="API keys, by their digests.")] = ()


def load_network(path: Path) -> NetworkConfig:
    return parse(NetworkConfig, read(path), str(path))
