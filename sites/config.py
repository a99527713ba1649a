"""The typed form of a site file and of a network file: frozen values with units in their names.

`load_site` and `load_network` are the only readers. An unknown key, a wrong type or a missing value stops the start with a sentence that names
the file, the key and the nearest valid one (invariant I7). The module refuses to know what the values are used for.
"""

import difflib
import ipaddress
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

LOCAL = Path(__file__).parent / "local"
NETWORK_FILE = Path(__file__).parent / "network.toml"

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class ConfigError(ValueError):
    """A configuration file cannot be used; the message says which, where and what to change."""


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlaceConfig(Table):
    """Where it stands; routers seed round-trip times from the coordinates."""

    city: str
    latitude: float = Field(ge=-90, le=90, description="degrees, north positive")
    longitude: float = Field(ge=-180, le=180, description="degrees, east positive")


class ListenConfig(Table):
    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535, description="0: any free port")
    require_hop: bool = Field(False, description="answer only requests signed by one of the network's routers")


class EngineConfig(Table):
    """Engine hosts: one process for each device, which holds several models. Sizes are each host's own, but for weights_host_gib, which all share."""

    device: str = Field("auto", description='"auto", "cpu", "cuda" or "cuda:N"')
    devices: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description='instead of device, where the site has several: ["cuda:0", "cuda:1"]; "cpu" may be repeated, and the cores are then divided',
    )
    scale_up_wait_s: float = Field(
        1.0,
        ge=0,
        description="a model whose next request would wait for so long, for a few seconds on end, wakes on a further device with room; 0: never",
    )
    scale_down_after_s: float = Field(
        30.0, gt=0, description="a further copy sleeps when for so long the others would have done without it"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of one operation; unset: torch's choice")
    kv_gib: float = Field(0.25, gt=0, description="KV cache of all models together, in GiB")
    kv_host_gib: float = Field(
        0.0, ge=0, description="shared memory where KV blocks outlive the device's and an engine restart; 0: none"
    )
    kv_disk_dir: str | None = Field(
        None,
        description="directory where KV blocks outlive that as well; unset: none. Each site takes a part of its own",
    )
    kv_disk_gib: float = Field(8.0, gt=0, description="of kv_disk_dir, at most")
    weights_gib: float | None = Field(
        None,
        gt=0,
        description="weights of awake models, at most; unset: no limit on a CPU, the device's memory beside the KV cache on CUDA",
    )
    weights_host_gib: float | None = Field(
        None,
        ge=0,
        description="shared memory where weights outlive sleep and an engine restart; 0: none; unset: up to half of what is available",
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in one KV block")
    max_num_batched_tokens: int = Field(2048, ge=16, description="token budget of one step")
    max_num_seqs: int = Field(64, ge=1, description="sequences running at once")
    max_waiting: int = Field(1024, ge=1, description="sequences waiting, beyond which requests are refused")
    start_timeout_s: float = Field(60.0, gt=0, description="a host that has not answered by then is restarted")
    step_deadline_s: float = Field(30.0, gt=0, description="a host with work and no step for so long is restarted")

    standby: bool | None = Field(
        None,
        description="keep a second host, imported and without a model, that takes over when the first dies (160 MiB); "
        "unset: where 1.25 GiB of memory are available",
    )
    standby_after_s: float = Field(
        5.0, ge=0, description="how long the site has been without work before that host is prepared"
    )

    @property
    def all_devices(self) -> tuple[str, ...]:
        return (self.device,) if self.devices is None else self.devices

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is no device; say auto, cpu, cuda or cuda:N")
        return device

    @field_validator("devices")
    @classmethod
    def _can_stand_together(cls, devices: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for device in devices or ():
            if not re.fullmatch(r"cpu|cuda:\d+", device):
                raise ValueError(f"{device!r} does not say which device it is; say cpu or cuda:N")
            if device != "cpu" and (devices or ()).count(device) > 1:
                raise ValueError(f"{device!r} is named twice, and one engine host has a GPU to itself: name each once")
        if len({device.partition(":")[0] for device in devices or ()}) > 1:
            raise ValueError(
                "a model's weights lie in host memory as one kind of device wants them: name CPUs or GPUs, not both"
            )
        return devices

    @model_validator(mode="after")
    def _devices_are_named_once(self) -> "EngineConfig":
        if self.devices is not None and "device" in self.model_fields_set:
            raise ValueError("device and devices are both given: drop one of them")
        return self

    @model_validator(mode="after")
    def _the_disk_is_fed_by_the_host(self) -> "EngineConfig":
        if self.kv_disk_dir is not None and not self.kv_host_gib:
            raise ValueError("kv_disk_dir needs kv_host_gib above 0: KV blocks reach the disk through host memory")
        return self


class ModelConfig(Table):
    name: str = Field(min_length=1, max_length=200, description="what requests call it")
    source: str = Field(description='"embedded:ember", a directory, the URL of a packed one, or a Hugging Face hub id')
    aliases: tuple[str, ...] = Field((), description="further names for the same model")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    residency: Literal["device", "auto", "host", "disk"] = Field(
        "device",
        description="device: loaded at start, stays awake; auto: woken by its first request, sleeps in host memory when others need the room; "
        "host: the same, read into host memory at start and kept there; disk: woken by its first request, sleeps on disk",
    )
    priority: int = Field(0, ge=-8, le=7, description="where room is needed, models of a higher one sleep last")
    sleep_after_s: float | None = Field(
        None,
        gt=0,
        description="asleep when unused for so long, whoever needs the room; unset: only when others need it",
    )
    kv_tokens: int | None = Field(
        None, ge=16, description="KV cache in tokens that is this model's alone; unset: it borrows what others leave"
    )
    default_max_tokens: int | None = Field(
        None, ge=1, description="where a request names none; unset: what the context leaves"
    )


class FunctionConfig(Table):
    name: Name = Field(description="served at /fn/NAME/")
    path: str = Field(description="directory with a wrangler.toml or wrangler.jsonc")
    environment: str | None = Field(None, description="an [env.NAME] of that file")
    layer: str | None = Field(None, description="directory with the packages that it imports")


class R2StoreConfig(Table):
    """A bucket of R2 whose objects lie at an S3 endpoint. Its credentials are the site's; functions never see them."""

    endpoint: str = Field(pattern="^https?://[^/]+", description="such as https://s3.eu-west-1.amazonaws.com")
    region: str = Field("auto", description="as the endpoint wants it signed")
    bucket: str | None = Field(None, description="its name there, where that is another one")
    path_style: bool = Field(True, description="the bucket in the path; false: in the host's name")
    access_key_id_env: str = Field("AWS_ACCESS_KEY_ID", description="environment variable of the site's process")
    secret_access_key_env: str = "AWS_SECRET_ACCESS_KEY"
    session_token_env: str = "AWS_SESSION_TOKEN"
    credentials_file: str | None = Field(
        None, description="instead of the environment: a file such as ~/.aws/credentials, read for each request"
    )
    profile: str = Field("default", description="section of that file")


class FunctionsConfig(Table):
    """The functions of a site, and what each of them may use."""

    serve: tuple[FunctionConfig, ...] = ()
    directory: str | None = Field(
        None, description="of deployed functions: each folder in it with a manifest is served"
    )
    deployments: str | None = Field(
        None, description="URL of the router whose deployed functions (`pilotlight deploy`) are served here"
    )
    state_dir: str | None = Field(
        None, description="where bindings keep their data; unset: in ~/.local/state/pilotlight/SITE"
    )
    r2: dict[str, R2StoreConfig] = Field(
        {}, description="buckets, by their name in manifests, that lie at an S3 endpoint"
    )
    min_tier: Literal[1, 2, 3] = Field(
        1,
        description="isolation below which nothing is served: 1 limits and no privileges, 2 namespaces, seccomp, Landlock, "
        "3 a container for each function",
    )
    oci_runtime: str | None = Field(
        None,
        description="program that makes the containers of tier 3, as `crun` or `runc`; the site must be started as root",
    )
    show_errors: bool = Field(False, description="answer a failed request with its traceback")
    egress_allow: tuple[str, ...] = Field(
        (), description="hosts, or host:port, that functions may fetch although their address is not public"
    )
    cpu_ms: int = Field(30_000, ge=1, description="CPU time of one request, where the manifest sets none")
    wall_s: float = Field(300.0, gt=0, description="of one request, its stream included")
    blocked_s: float = Field(10.0, gt=0, description="an event loop blocked for so long ends its process")
    memory_mib: int = Field(256, ge=64, description="of one process, Python's own 30 included")
    disk_mib: int = Field(64, ge=1, description="of scratch space")
    threads: int = Field(64, ge=4, description="of one function")
    open_files: int = Field(256, ge=32)
    subrequests: int = Field(1000, ge=1, description="of one request: calls of bindings and fetches")
    request_mib: float = Field(100.0, gt=0)
    response_mib: float = Field(1024.0, gt=0)
    response_mib_per_s: float = Field(64.0, gt=0, description="of all streams of one function together")
    concurrency: int = Field(64, ge=1, description="requests open in one process, beyond which another one is started")
    max_isolates: int = Field(4, ge=1, description="processes of one function")
    idle_s: float = Field(60.0, gt=0, description="without a request, after which a process is ended")
    sockets: int = Field(
        512, ge=1, le=900, description="WebSockets open in one process, beyond which another is started"
    )
    socket_idle_s: float = Field(3600.0, gt=0, description="a WebSocket without a message for so long is closed")
    socket_message_mib: float = Field(
        1.0, gt=0, le=16, description="of one message of a WebSocket, in either direction"
    )
    zygotes_mib: int = Field(
        1024, ge=0, description="memory for functions that sleep with all they import, so that they wake quickly"
    )

    layers_mib: int = Field(
        4096, ge=0, description="of installed packages that no function uses any more; the longest unused go first"
    )
    layers_days: float = Field(30.0, ge=0, description="after which such packages are deleted in any case")

    @model_validator(mode="after")
    def _names_are_unique(self) -> "FunctionsConfig":
        _refuse_twice([function.name for function in self.serve], "function name")
        return self


class LimitsConfig(Table):
    max_body_mib: float = Field(8.0, gt=0)
    max_waking: int = Field(
        128, ge=1, description="requests that wait for one model to wake, beyond which they are refused with 503"
    )
    max_inflight: int = Field(256, ge=1, description="requests at work at once, beyond which they are refused with 503")
    request_timeout_s: float = Field(
        600.0, gt=0, description="a request that has not ended by then is ended with an error"
    )
    continue_within_s: float = Field(
        9.0,
        gt=0,
        description="an answer whose engine host died has its next token by then, from the next host, or ends with an error",
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="how long open streams may finish after SIGTERM")
    heartbeat_s: float = Field(
        10.0, gt=0, description="a stream silent for so long gets a comment, so that proxies keep it"
    )


class SiteConfig(Table):
    """One location: a runtime, its engine hosts, its models and functions."""

    name: Name = Field(description="airport code and number, such as ams1")
    place: PlaceConfig
    listen: ListenConfig
    engine: EngineConfig = EngineConfig()
    models: tuple[ModelConfig, ...] = Field(min_length=1)
    functions: FunctionsConfig = Field(default_factory=FunctionsConfig)
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _sleepers_have_a_place(self) -> "SiteConfig":
        for model in self.models:
            if model.residency == "host" and self.engine.weights_host_gib == 0:
                raise ValueError(
                    f"model {model.name!r} is to sleep in host memory, and engine.weights_host_gib is 0: raise it, or say auto or disk"
                )
            if model.residency == "device" and model.sleep_after_s is not None:
                raise ValueError(f"model {model.name!r} is to stay on the device: drop sleep_after_s, or say auto")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> "SiteConfig":
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        _refuse_twice(names, "model name")
        return self


class SiteRef(Table):
    """A site as the router's file names it."""

    name: Name
    url: str
    place: PlaceConfig

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError("must be http(s)://host[:port] without a path")
        return url.rstrip("/")


class HealthConfig(Table):
    interval_s: float = Field(1.0, gt=0, description="between two probes of one site")
    timeout_s: float = Field(
        1.0, gt=0, description="of a probe; a site that freezes is left after unhealthy_after of these"
    )
    unhealthy_after: int = Field(3, ge=1, description="failed probes in a row")
    stale_after_s: float = Field(10.0, gt=0, description="a published status older than this is only a guess")


class RelayConfig(Table):
    connect_timeout_s: float = Field(2.0, gt=0)
    first_byte_timeout_s: float = Field(
        120.0, gt=0, description="silence before the first byte, after which the next site is tried"
    )
    answer_timeout_s: float = Field(
        600.0,
        gt=0,
        description="the same for an answer that is not streamed: it is generated whole before its first byte",
    )
    idle_timeout_s: float = Field(60.0, gt=0, description="silence inside a stream, after which the upstream is lost")
    max_tries: int = Field(3, ge=1, description="sites tried for one request")
    continue_within_s: float = Field(
        30.0, ge=0, description="a stream whose site was lost goes on at another one by then, or ends with an error"
    )
    max_losses: int = Field(
        3, ge=0, description="sites one stream may lose; 0: none is continued. A site that drains is not lost"
    )
    max_body_mib: float = Field(8.0, gt=0)
    max_hops: int = Field(4, ge=1)
    session_entries: int = Field(100_000, ge=1, description="remembered sessions; the oldest is forgotten first")
    session_ttl_s: float = Field(3600.0, gt=0)
    drain_timeout_s: float = Field(30.0, ge=0)


class RouterListenConfig(ListenConfig):
    tls_certificate: str | None = Field(
        None,
        description="PEM file with the chain, leaf first; with tls_key, the router speaks HTTPS. Read again when it changes",
    )
    tls_key: str | None = Field(None, description="PEM file with its private key")

    @model_validator(mode="after")
    def _both_or_neither(self) -> "RouterListenConfig":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")
        return self


class DoorConfig(Table):
    """What the router takes from one client connection, and for how long it waits for one."""

    max_head_kib: int = Field(64, ge=1, le=1024, description="of a request's head")
    max_headers: int = Field(128, ge=8)
    head_timeout_s: float = Field(15.0, gt=0, description="for a request's head, from its first byte")
    body_timeout_s: float = Field(120.0, gt=0, description="for a request's whole body")
    keep_alive_s: float = Field(75.0, gt=0, description="a connection without a request is closed after so long")
    stall_timeout_s: float = Field(
        60.0, gt=0, description="a client that leaves what waits for it unread is cut off after so long"
    )
    max_connections: int = Field(20_000, ge=1)
    max_connections_per_client: int = Field(20_000, ge=1, description="of one address")
    max_open_per_client: int = Field(20_000, ge=1, description="requests of one address at work at once")


class ClientsConfig(Table):
    """Where clients stand. Whoever is not known to stand elsewhere stands where the router does."""

    front_ends: tuple[str, ...] = Field(
        ("127.0.0.0/8", "::1/128"),
        description="networks of CDNs and load balancers, whose x-client-geo header (latitude,longitude) is believed",
    )
    geo_database: str | None = Field(
        None,
        description="a file in MaxMind's format with coordinates, such as GeoLite2-City.mmdb; replace it by renaming",
    )

    @field_validator("front_ends")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"{error}; write 10.1.0.0/16 or 2001:db8::/32") from None
        return networks


class TenantLimitsConfig(Table):
    """What one tenant may have; what is unset is not limited here."""

    requests_per_min: float | None = Field(None, gt=0)
    tokens_per_min: float | None = Field(
        None, gt=0, description="of prompts, as the router estimates them, and answers"
    )
    max_open: int | None = Field(None, ge=1, description="requests at work at once")


class TenantConfig(TenantLimitsConfig):
    """A tenant with limits of its own. Its key is not written down, only a digest by which it is known."""

    name: Name
    key_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of its bearer token, in hexadecimal digits")


class DurableConfig(Table):
    """Streams that can be read again. Their events are kept in this router's memory."""

    max_stream_mib: float = Field(8.0, gt=0, description="of one stream, beyond which it is ended")
    max_total_mib: float = Field(256.0, gt=0, description="of all; the ones that ended first are forgotten first")
    keep_s: float = Field(300.0, gt=0, description="how long a stream can be read after its end")
    max_age_s: float = Field(3600.0, gt=0, description="a stream that has not ended by then is ended")


class NetworkConfig(Table):
    """The router's file: where it listens, where it stands and which sites it may choose from."""

    listen: RouterListenConfig
    door: DoorConfig = DoorConfig()
    clients: ClientsConfig = ClientsConfig()
    tenant_limits: TenantLimitsConfig = TenantLimitsConfig()
    tenants: tuple[TenantConfig, ...] = ()
    durable: DurableConfig = DurableConfig()
    place: PlaceConfig
    sites: tuple[SiteRef, ...] = Field(min_length=1)
    health: HealthConfig = HealthConfig()
    relay: RelayConfig = RelayConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> "NetworkConfig":
        _refuse_twice([site.name for site in self.sites], "site name")
        _refuse_twice([tenant.name for tenant in self.tenants], "tenant name")
        _refuse_twice([tenant.key_sha256 for tenant in self.tenants], "tenant key")
        return self


def load_site(path: Path) -> SiteConfig:
    return parse(SiteConfig, _read(path), str(path))


def load_network(path: Path) -> NetworkConfig:
    return parse(NetworkConfig, _read(path), str(path))


TableT = TypeVar("TableT", bound=Table)


def parse(table: type[TableT], values: dict[str, Any], origin: str) -> TableT:
    """Raises ConfigError with one line per mistake; `origin` is the file's name for the message."""
    try:
        return table.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        lines = [_sentence(table, mistake) for mistake in mistakes if not _follows_from_another(mistake, mistakes)]
        raise ConfigError("\n".join(f"{origin}: {line}" for line in lines)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _follows_from_another(mistake: Any, mistakes: Any) -> bool:
    """An array whose only entry is wrong is also reported as too short, which would send its reader the wrong way."""
    where = mistake["loc"]
    return mistake["type"] == "too_short" and any(
        len(other["loc"]) > len(where) and other["loc"][: len(where)] == where for other in mistakes
    )


def _sentence(table: type[Table], mistake: Any) -> str:
    where = ".".join(str(part) for part in mistake["loc"]) or "the file"
    if mistake["type"] != "extra_forbidden":
        return f"{where}: {mistake['msg'].removeprefix('Value error, ')}"
    valid = _keys_at(table, mistake["loc"][:-1])
    nearest = difflib.get_close_matches(str(mistake["loc"][-1]), valid, n=1, cutoff=0.0)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown key {where!r}; {hint}Valid here: {', '.join(valid)}"


def _keys_at(table: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """The keys of the table that `location` leads to; an integer in it is a position in an array of tables."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = table.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        table = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return sorted(table.model_fields)


def _refuse_twice(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"the {what} {name!r} is used twice")
        seen.add(name)
