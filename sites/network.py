"""The router's file: which sites there are and where, what the router takes from clients and gives them, how long it waits for whom.

`load_network` is its only reader. Refuses to know what the values are used for, and sites' own files: a site that starts never imports it.
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
    """A site as the router's file names it."""

    name: Name
    url: str
    place: PlaceConfig
    region: Annotated[Name | None, Meta(description="by which accounts and models say where data may go")] = None

    rules: ClassVar[Rules] = {"url": is_http}

    def agree(self) -> None:
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))


class HealthConfig(Table, frozen=True, kw_only=True):
    interval_s: Annotated[Positive, Meta(description="between two probes of one site")] = 1.0
    timeout_s: Annotated[
        Positive, Meta(description="of a probe; a site that freezes is left after unhealthy_after of these")
    ] = 1.0
    unhealthy_after: Annotated[Count, Meta(description="failed probes in a row")] = 3
    stale_after_s: Annotated[Positive, Meta(description="a published status older than this is only a guess")] = 10.0


class RelayConfig(Table, frozen=True, kw_only=True):
    connect_timeout_s: Positive = 2.0
    first_byte_timeout_s: Annotated[
        Positive, Meta(description="silence before the first byte, after which the next site is tried")
    ] = 120.0
    answer_timeout_s: Annotated[
        Positive,
        Meta(description="the same for an answer that is not streamed: it is generated whole before its first byte"),
    ] = 600.0
    idle_timeout_s: Annotated[
        Positive, Meta(description="silence inside a stream, after which the upstream is lost")
    ] = 60.0
    stall_s: Annotated[
        Positive,
        Meta(
            description="silence inside a stream, or twice that before its first token, after which another healthy site goes on "
            "with it; longer where the site's own published pace explains it"
        ),
    ] = 2.5
    max_tries: Annotated[Count, Meta(description="sites tried for one request")] = 3
    continue_within_s: Annotated[
        NonNegative,
        Meta(description="a stream whose site was lost goes on at another one by then, or ends with an error"),
    ] = 30.0
    max_losses: Annotated[
        int, Meta(ge=0, description="sites one stream may lose; 0: none is continued. A site that drains is not lost")
    ] = 3
    max_body_mib: Positive = 8.0
    max_finetune_mib: Annotated[Positive, Meta(description="of one file of an adapter that an account uploads")] = 300.0
    max_hops: Count = 4
    session_entries: Annotated[
        Count, Meta(description="beginnings of conversations, two for each turn; the oldest is forgotten first")
    ] = 100_000
    session_ttl_s: Positive = 3600.0
    drain_timeout_s: NonNegative = 30.0


class RouterListenConfig(ListenConfig, frozen=True, kw_only=True):
    tls_certificate: Annotated[
        str | None,
        Meta(
            description="PEM file with the chain, leaf first; with tls_key, the router speaks HTTPS. Read again when it changes"
        ),
    ] = None
    tls_key: Annotated[str | None, Meta(description="PEM file with its private key")] = None

    def agree(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")


class DoorConfig(AccessConfig, frozen=True, kw_only=True):
    """The clients that may come in, what the router takes from one client connection, and for how long it waits for one."""

    max_head_kib: Annotated[int, Meta(ge=1, le=1024, description="of a request's head")] = 64
    max_headers: Annotated[int, Meta(ge=8)] = 128
    head_timeout_s: Annotated[Positive, Meta(description="for a request's head, from its first byte")] = 15.0
    body_timeout_s: Annotated[Positive, Meta(description="for a request's whole body")] = 120.0
    max_bodies_mib: Annotated[
        Positive,
        Meta(description="of all requests that are not answered yet; whoever sends more is told to come again"),
    ] = 512.0
    max_unread_mib: Annotated[
        Positive,
        Meta(
            description="of all answers that clients leave unread, of one address a quarter; who has for the longest is cut off"
        ),
    ] = 256.0
    keep_alive_s: Annotated[Positive, Meta(description="a connection without a request is closed after so long")] = 75.0
    stall_timeout_s: Annotated[
        Positive, Meta(description="a client that leaves what waits for it unread is cut off after so long")
    ] = 60.0
    max_connections: Count = 20_000
    max_connections_per_client: Annotated[
        Count, Meta(description="of one address; where a load balancer stands in front, that is one for all clients")
    ] = 256
    max_open_per_client: Annotated[Count, Meta(description="requests of one address at work at once; likewise")] = 256


class ClientsConfig(Table, frozen=True, kw_only=True):
    """Places of clients. A client that is not known to stand elsewhere stands where the router does."""

    front_ends: Annotated[
        tuple[str, ...],
        Meta(
            description="networks of CDNs and load balancers, whose x-client-geo header (latitude,longitude) is believed"
        ),
    ] = ("127.0.0.0/8", "::1/128")
    geo_database: Annotated[
        str | None,
        Meta(
            description="a file in MaxMind's format with coordinates, such as GeoLite2-City.mmdb; replace it by renaming"
        ),
    ] = None

    rules: ClassVar[Rules] = {"front_ends": are_networks}


class TenantLimitsConfig(Table, frozen=True, kw_only=True):
    """Limits of one tenant: an account, or a key that is not known; what is unset is not limited here."""

    requests_per_min: Positive | None = None
    tokens_per_min: Annotated[
        Positive | None,
        Meta(
            description="of prompts, as the router estimates them, and answers; a request reserves its prompt and max_tokens, or 256"
        ),
    ] = None
    max_open: Annotated[Count | None, Meta(description="requests at work at once")] = None


class PlacesConfig(Table, frozen=True, kw_only=True):
    """The sites where data may go: those that are named, and those of the regions that are named."""

    sites: tuple[Name, ...] = ()
    regions: tuple[Name, ...] = ()

    def check(self, sites: Sequence[SiteRef], whose: str) -> None:
        """Raise ValueError for a site or a region that is none of the network's."""
        for named, known, what in (
            (self.sites, {site.name for site in sites}, "site"),
            (self.regions, {site.region for site in sites}, "region"),
        ):
            for name in named:
                if name not in known:
                    raise ValueError(f"data of {whose} may go to the {what} {name!r}, and no [[sites]] is that")
        if not (self.sites or self.regions):
            raise ValueError(f"data of {whose} may go nowhere: name sites or regions, or leave data out")


HostName = Annotated[
    str, Meta(pattern=r"^(\*\.?)?[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)*\Z", max_length=253)
]


class CustomerConfig(TenantLimitsConfig, frozen=True, kw_only=True):
    """An account with limits of its own, for all its keys together."""

    name: Name
    models: AllowedModels = None
    functions: Annotated[
        tuple[str, ...],
        Meta(description="names, with *, of the functions that its keys may deploy, where they are not another's"),
    ] = ("*",)
    tokens_per_day: Annotated[
        Count | None,
        Meta(
            description="of prompts and answers, by UTC; each router counts by its own ledger, unless quotas.store is set"
        ),
    ] = None
    cost_per_day: Annotated[Positive | None, Meta(description="likewise, in the ledger's currency")] = None
    hosts: Annotated[
        tuple[HostName, ...],
        Meta(description="host names, as shop.example or *.acme.example, that routes of its functions may name"),
    ] = ()
    data: Annotated[PlacesConfig | None, Meta(description="where its data may go; unset: to every site")] = None


class HostConfig(Table, frozen=True, kw_only=True):
    """A host name whose requests a function answers."""

    pattern: Annotated[
        str,
        Meta(
            pattern=r"^(\*\.?)?[A-Za-z0-9][A-Za-z0-9.-]*/(\*|[^*?]+\*?)?\Z",
            max_length=300,
            description="host and path, as shop.example/* or *.shop.example/api/*; of several the most specific counts",
        ),
    ]
    function: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z", description="its name")]


class NetworkFunctionsConfig(Table, frozen=True, kw_only=True):
    """The names of functions in the network."""

    domain: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9][A-Za-z0-9-]*)+\Z")] | None,
        Meta(
            description="as fn.example: NAME.fn.example is the function NAME, for every function; the name *.fn.example leads to this router"
        ),
    ] = None


class NetworkModelConfig(Table, frozen=True, kw_only=True):
    """A rule for models, wherever they are served."""

    model: Annotated[str, Meta(min_length=1, description="a name, with *")]
    data: Annotated[PlacesConfig | None, Meta(description="where requests for it may go; unset: to every site")] = None


class DurableConfig(Table, frozen=True, kw_only=True):
    """Streams that can be read again. Their events are kept in this router's memory, and in a directory that routers may share."""

    directory: Annotated[
        str | None,
        Meta(
            description="in which each router that has it goes on with what another one began; unset: a stream ends with its router"
        ),
    ] = None
    max_stream_mib: Annotated[Positive, Meta(description="of one stream, beyond which it is ended")] = 8.0
    max_total_mib: Annotated[Positive, Meta(description="of all; the ones that ended first are forgotten first")] = (
        256.0
    )
    keep_s: Annotated[Positive, Meta(description="how long a stream can be read after its end")] = 300.0
    max_age_s: Annotated[Positive, Meta(description="a stream that has not ended by then is ended")] = 3600.0


class LedgerConfig(Table, frozen=True, kw_only=True):
    """The record of what each account has used. Needs the network's secret, by which sites tell."""

    directory: Annotated[
        str | None, Meta(description="of this router alone, on a disk that outlives it; unset: nothing is written down")
    ] = None
    store: Annotated[
        Annotated[str, Meta(pattern=r"^postgres(ql)?://")] | None,
        Meta(
            description="a PostgreSQL database that routers may share, as postgresql://USER@HOST/DATABASE, its password in PGPASSWORD or ~/.pgpass; "
            "unset: a SQLite file in the directory"
        ),
    ] = None
    when_failing: Annotated[
        Literal["refuse", "serve"],
        Meta(
            description="while the store cannot be written: refuse new requests, or serve as many as the directory's meters can keep for it"
        ),
    ] = "refuse"
    max_unwritten: Annotated[
        int, Meta(ge=16, le=1_000_000, description="requests under way or not written yet, of 1 KiB each")
    ] = 16_384
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z", description="of all prices")] = "USD"


class SharedResponsesConfig(ResponsesConfig, frozen=True, kw_only=True):
    """Responses (POST /v1/responses) that are kept for the clients of this router, or of all that share a store."""

    store: Annotated[
        Annotated[str, Meta(pattern=r"^postgres(ql)?://")] | None,
        Meta(
            description="a PostgreSQL database of the network's routers, named as ledger.store is, of which each then knows what the others keep; "
            "unset: a SQLite file in the directory"
        ),
    ] = None


class QuotasConfig(Table, frozen=True, kw_only=True):
    """Accounts' limits that all routers of a network keep to together, instead of each for itself."""

    store: Annotated[
        Annotated[str, Meta(pattern=r"^postgres(ql)?://")] | None,
        Meta(
            description="a PostgreSQL database of theirs, named as ledger.store is; unset: each router gives what an account may have"
        ),
    ] = None
    when_failing: Annotated[
        Literal["refuse", "serve"],
        Meta(
            description="while the store cannot be asked: refuse accounts that have limits once the router has given what it had leased, "
            "or serve them by the router's own counts"
        ),
    ] = "serve"


class PriceConfig(Table, frozen=True, kw_only=True):
    """The price of a million tokens. Of several that fit a model the newest that is valid counts."""

    model: Annotated[str, Meta(min_length=1, description="a name, with *")]
    input: Annotated[NonNegative, Meta(description="of prompts")]
    output: Annotated[NonNegative, Meta(description="of answers, reasoning included")]
    cached_input: Annotated[
        NonNegative | None, Meta(description="of prompts' tokens that were cached; unset: as input")
    ] = None
    valid_from: Annotated[Moment | None, Meta(description="for requests that begin then or later; unset: always")] = (
        None
    )


Share = Annotated[float, Meta(gt=0.0, lt=1.0)]


class ObjectiveConfig(Table, frozen=True, kw_only=True):
    """A promise for requests of models over 30 days. A request counts for the first objective that fits its model."""

    model: Annotated[str, Meta(min_length=1, description="a name, with *")]
    answered: Annotated[Share | None, Meta(description="share of requests that do not fail, as 0.999")] = None
    first_token: Annotated[
        Share | None, Meta(description="share of streams whose first token comes within first_token_ms")
    ] = None
    first_token_ms: Annotated[Positive | None, Meta(description="from the request's arrival at the router")] = None

    def agree(self) -> None:
        if (self.first_token is None) != (self.first_token_ms is None):
            raise ValueError("first_token and first_token_ms belong together: set both or neither")
        if self.answered is None and self.first_token is None:
            raise ValueError("an objective needs answered, or first_token with first_token_ms")


class NetworkConfig(Table, frozen=True, kw_only=True):
    """The router's file: where it listens, where it stands and which sites it may choose from."""

    listen: RouterListenConfig
    door: DoorConfig = DoorConfig()
    clients: ClientsConfig = ClientsConfig()
    tenant_limits: TenantLimitsConfig = TenantLimitsConfig()
    accounts: tuple[CustomerConfig, ...] = ()
    keys: tuple[KeyConfig, ...] = ()
    durable: DurableConfig = DurableConfig()
    responses: SharedResponsesConfig = SharedResponsesConfig()
    ledger: LedgerConfig = LedgerConfig()
    quotas: QuotasConfig = QuotasConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    prices: tuple[PriceConfig, ...] = ()
    models: tuple[NetworkModelConfig, ...] = ()
    functions: NetworkFunctionsConfig = NetworkFunctionsConfig()
    hosts: tuple[HostConfig, ...] = ()
    objectives: tuple[ObjectiveConfig, ...] = ()
    place: PlaceConfig
    sites: Annotated[tuple[SiteRef, ...], Meta(min_length=1)]
    health: HealthConfig = HealthConfig()
    relay: RelayConfig = RelayConfig()

    def agree(self) -> None:
        refuse_twice([site.name for site in self.sites], "site name")
        refuse_twice([host.pattern.lower() for host in self.hosts], "host pattern")
        refuse_twice([objective.model for objective in self.objectives], "objective's model")
        check_accounts([account.name for account in self.accounts], self.keys)
        for account in self.accounts:
            if account.data is not None:
                account.data.check(self.sites, f"the account {account.name}")
            if self.ledger.directory is None and (account.tokens_per_day or account.cost_per_day):
                raise ValueError(
                    f"the account {account.name} has a quota for a day: say where it is kept, in ledger.directory"
                )
        for model in self.models:
            if model.data is not None:
                model.data.check(self.sites, f"the model {model.model}")
        check_access(self.listen.host, self.door, len(self.keys))


def load_network(path: Path) -> NetworkConfig:
    return parse(NetworkConfig, read(path), str(path))
