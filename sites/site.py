"""The configuration file of a site: its engine hosts, models, functions and limits.

`load_site` reads it. The router's file is in network.py.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pilotlight.sites.accounts import AccountConfig, KeyConfig, KeysFile, Name, check_accounts
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
from pilotlight.sites.rules import (
    are_host_names,
    can_stand_together,
    is_a_device,
    is_a_speculation,
    is_http,
    is_http_place,
    refuse_twice,
)
from pilotlight.sites.table import Rules, Table

LOCAL = Path(__file__).parent / "local"


Role = Literal["prefill", "decode", "both"]
# unset: "auto", unless `devices` is set
Device = Annotated[str, Meta(extra_json_schema={"default": "auto"})] | UnsetType
DeviceGroup = Annotated[tuple[str, ...], Meta(min_length=1)]


class ImagesConfig(Table, frozen=True, kw_only=True):
    """Limits of images in requests.
    The whole body, including images in base64, is limited by limits.max_body_mib."""

    rules: ClassVar[Rules] = {"allowed_hosts": are_host_names}

    max_per_request: Count = 16
    """Maximum number of images in one request."""
    max_mib: Positive = 8.0
    """Maximum size of one image file."""
    max_megapixels: Annotated[float, Meta(gt=0, le=64)] = 50.0
    """Maximum number of pixels of one image, in millions."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts with public addresses from which https: URLs of images are fetched; empty: only data: URLs are accepted."""


class EngineHostConfig(Table, frozen=True, kw_only=True):
    """One engine host of a site that lists its hosts separately."""

    rules: ClassVar[Rules] = {"device": is_a_device}

    device: Device = UNSET
    """The device of this host: "auto", "cpu", "cuda" or "cuda:N"."""
    devices: Annotated[tuple[str, ...], Meta(min_length=2)] | None = None
    """The devices of this host, if several share every model. Replaces device."""
    role: Role = "both"
    """prefill: compute prompts, and send their KV blocks to other hosts; decode: generate answers; both: do both."""

    @property
    def group(self) -> tuple[str, ...]:
        """The devices of the host."""
        return self.devices or ("auto" if self.device is UNSET else self.device,)

    def agree(self) -> None:
        if self.devices is not None and self.device is not UNSET:
            raise ValueError("device and devices are both set: remove one of them")


class EngineConfig(Table, frozen=True, kw_only=True):
    """Engine hosts: one process per device, or per group of devices.
    It holds several models. Sizes are for one host, except weights_host_gib, which is for all."""

    rules: ClassVar[Rules] = {"device": is_a_device, "devices": can_stand_together}

    device: Device = UNSET
    """The device of the engine host: "auto", "cpu", "cuda" or "cuda:N"."""
    devices: Annotated[tuple[str | DeviceGroup, ...], Meta(min_length=1)] | None = None
    """Devices with one engine host each. Devices in inner brackets share every model: [["cuda:0", "cuda:1"], "cuda:2"]. All but the first of such a
    group may be on other machines, found by Ray: ["cuda:0", "ray:cuda"]."""
    ray_address: Annotated[str, Meta(pattern=r"^(auto|[^\s/]+:[0-9]{1,5})\Z")] = "auto"
    """HOST:PORT of the Ray cluster that provides devices of other machines; auto: the cluster that includes this machine. Needs
    pilotlight-inference[cluster]."""
    stages: Count = 1
    """Number of pipeline stages into which a group of devices is divided, in order. Each stage computes consecutive layers."""
    expert_parallel: bool = False
    """Give each device of a group whole experts of each layer, instead of a part of every expert."""
    redundant_experts: Annotated[int, Meta(ge=0)] = 0
    """With expert_parallel: number of extra copies of each layer's busiest experts."""
    data_parallel: Count = 1
    """With expert_parallel: number of copies of a layer's attention. Each has its own sequences and KV cache, on an equal share of the group's
    devices. kv_gib and kv_tokens are then sizes per device."""
    hosts: tuple[EngineHostConfig, ...] = ()
    """One table per engine host, if hosts have different roles. Replaces device and devices."""
    shift_roles: bool = False
    """Let a host take on the other role as well while that role's requests would wait longer than scale_up_wait_s. It returns to its own role after
    scale_down_after_s without such a wait."""
    scale_up_wait_s: NonNegative = 1.0
    """Wake a model on one more device if its next request would wait longer than this for a few seconds; 0: never."""
    scale_down_after_s: Positive = 30.0
    """Put an extra copy of a model to sleep if the others would have sufficed for this long."""
    threads: Count | None = None
    """Number of CPU threads of one operation; unset: PyTorch's default."""
    kv_gib: Positive | None = None
    """Size of the KV cache of all models on one device; unset: 0.25 on a CPU, and the memory left by weights and steps on a GPU."""
    kv_host_gib: NonNegative = 0.0
    """Shared memory for KV blocks that the device evicts. Their contents survive a restart of the engine host. 0: off."""
    kv_disk_dir: str | None = None
    """Directory for KV blocks that host memory evicts; each site uses a subfolder with its name. Unset: off."""
    kv_disk_gib: Positive = 8.0
    """Maximum size of kv_disk_dir."""
    kv_disk_write_mib_per_s: Positive = 256.0
    """Maximum write rate of each host to kv_disk_dir. Above it, only blocks that were used more than once are written."""
    kv_store: Annotated[str, Meta(pattern=r"^[^\s/]+:[0-9]{1,5}\Z")] | None = None
    """HOST:PORT of a Mooncake Store's master (`pilotlight store`), shared by all hosts and sites that name it. Its connections are not authenticated.
    Needs pilotlight-inference[mooncake]. Unset: off."""
    kv_transport: Literal["shared_memory", "mooncake"] = "shared_memory"
    """How KV blocks move between hosts: through this machine's shared memory, or by Mooncake's transfer engine, whose connections are not
    authenticated (needs pilotlight-inference[mooncake])."""
    weights_gib: Positive | None = None
    """Maximum size of the weights of awake models on one device; unset: the memory left by the KV cache on a GPU, no limit on a CPU."""
    weights_host_gib: NonNegative | None = None
    """Shared memory for the weights of sleeping models. They survive a restart of the engine host. 0: off; unset: up to half of the available
    memory."""
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    """Number of tokens in one KV block."""
    max_num_batched_tokens: Annotated[int, Meta(ge=16)] = 2048
    """Maximum number of tokens that one engine step computes."""
    max_decode_delay_ms: NonNegative = 200.0
    """Maximum measured delay of running streams by the prompt tokens of one step."""
    max_num_seqs: Count = 64
    """Maximum number of sequences that run at the same time."""
    adapter_slots: Count = 16
    """Number of adapters of one model that a device can use in one batch."""
    adapters_host_gib: NonNegative = 1.0
    """Host memory in which adapters of one model are kept for their next use."""
    max_waiting: Count = 1024
    """Maximum number of waiting sequences; further requests are refused."""
    start_timeout_s: Positive = 60.0
    """Time limit for a host to load its first model; it is restarted if it takes longer."""
    step_deadline_s: Positive = 30.0
    """Time without a completed step after which a busy host is restarted. At least ten times the measured duration of its largest step is allowed."""

    standby: bool | None = None
    """Keep a standby: a second engine host without a model (160 MiB), which takes over when the first one dies. Unset: if 1.25 GiB of memory are
    available."""
    standby_after_s: NonNegative = 5.0
    """Idle time after which the standby is prepared."""

    @property
    def device_groups(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each engine host."""
        if self.hosts:
            return tuple(host.group for host in self.hosts)
        if self.devices is not None:
            return tuple((group,) if isinstance(group, str) else group for group in self.devices)
        return (("auto" if self.device is UNSET else self.device,),)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """The first device of each engine host."""
        return tuple(group[0] for group in self.device_groups)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each engine host."""
        if self.hosts:
            return tuple([host.role for host in self.hosts])
        return tuple(["both" for _ in self.all_devices])

    @property
    def is_split(self) -> bool:
        """Tell whether hosts have different roles."""
        return len(set(self.roles)) > 1

    def agree(self) -> None:
        if self.hosts and (self.devices is not None or self.device is not UNSET):
            raise ValueError(
                "hosts and device or devices are both set: each host names its own devices, so remove the others"
            )
        if len(self.hosts) > 1 or any(host.devices for host in self.hosts):
            can_stand_together(self.device_groups)
        if "prefill" in self.roles and not {"decode", "both"} & set(self.roles):
            raise ValueError("no host can answer: give one of hosts the role decode or both")
        if "decode" in self.roles and not {"prefill", "both"} & set(self.roles):
            raise ValueError("no host can compute prompts: give one of hosts the role prefill or both")
        if self.is_split and not self.kv_host_gib:
            raise ValueError(
                "hosts with different roles need kv_host_gib above 0, because KV blocks move between them through host memory"
            )
        if self.shift_roles and not (self.is_split and self.scale_up_wait_s):
            raise ValueError(
                "shift_roles needs hosts with different roles and scale_up_wait_s above 0: set both, or remove shift_roles"
            )
        shared = [group for group in self.device_groups if len(group) > 1]
        if self.expert_parallel and not shared:
            raise ValueError(
                "expert_parallel needs a group of devices that share every model: write them in inner brackets"
            )
        if self.redundant_experts and not self.expert_parallel:
            raise ValueError("redundant_experts needs expert_parallel: set it, or remove redundant_experts")
        if odd := [group for group in shared if self.redundant_experts % (len(group) // self.stages or 1)]:
            raise ValueError(
                f"redundant_experts is {self.redundant_experts}, but must be a multiple of {len(odd[0]) // self.stages}, "
                "the number of devices that share a layer's experts"
            )
        if self.data_parallel > 1 and not self.expert_parallel:
            raise ValueError("data_parallel needs expert_parallel: set it, or leave data_parallel at 1")
        if self.data_parallel > 1 and (odd := [g for g in shared if len(g) % (self.stages * self.data_parallel)]):
            raise ValueError(
                f"data_parallel is {self.data_parallel}, but must divide the {len(odd[0]) // self.stages} devices that share a layer"
            )
        if self.stages > 1 and not shared:
            raise ValueError("stages needs a group of devices that share every model: write them in inner brackets")
        if odd := [group for group in shared if len(group) % self.stages]:
            raise ValueError(f"{len(odd[0])} devices cannot be divided into {self.stages} equal stages")
        if self.devices is not None and self.device is not UNSET:
            raise ValueError("device and devices are both set: remove one of them")
        if self.kv_disk_dir is not None and not self.kv_host_gib:
            raise ValueError(
                "kv_disk_dir needs kv_host_gib above 0, because KV blocks reach the disk through host memory"
            )
        if self.kv_store is not None and not self.kv_host_gib:
            raise ValueError(
                "kv_store needs kv_host_gib above 0, because KV blocks reach the store through host memory"
            )


ToolFormatName = Literal[
    "hermes", "qwen3_coder", "llama3_json", "pythonic", "harmony", "kimi_k2", "deepseek_v3", "deepseek_v31", "mistral", "mistral_v11", "glm45",
    "gemma4", "granite", "nemotron_json", "hunyuan_a13b", "apertus", "lfm2", "olmo3", "apriel", "solar_open", "minimax_m3",
    "minimax_m2", "seed_oss", "deepseek_v32", "deepseek_v4", "cohere_command3", "cohere_command4",
]  # fmt: skip


class AdapterConfig(Table, frozen=True, kw_only=True):
    """A low-rank adapter of a model."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
    """Name of the adapter; requests use MODEL:NAME."""
    path: str
    """PEFT directory: adapter_config.json and adapter_model.safetensors."""


class ModelConfig(Table, frozen=True, kw_only=True):
    rules: ClassVar[Rules] = {"speculate": is_a_speculation}

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    """Name that requests use."""
    source: str
    """"embedded:ember", a directory, a GGUF file, the URL of a packed model, or a Hugging Face id."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which the model computes; auto: the checkpoint's type."""
    lossless: Literal["auto", "off", "always"] = "auto"
    """Store bfloat16 weights in 12 bits, without changing answers. auto: on a CPU, if measured to be faster; always: on GPUs too."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache. auto: the type in which the model computes; fp8: half the size of bfloat16, less exact."""
    residency: Literal["device", "auto", "host", "disk"] = "device"
    """device: loaded at start, always awake; auto: woken by its first request, sleeps in host memory while others need the device; host: like auto,
    but loaded into host memory at start; disk: woken by its first request, sleeps on disk."""
    priority: Annotated[int, Meta(ge=-8, le=7)] = 0
    """Models with a higher priority are put to sleep later."""
    sleep_after_s: Positive | None = None
    """Put the model to sleep after this time without use; unset: only if others need the device."""
    max_devices: Count | None = None
    """Maximum number of devices that serve the model at once; unset: as many as its load needs, if they have room."""
    kv_tokens: Annotated[int, Meta(ge=16)] | None = None
    """Number of tokens of KV cache that are reserved for this model; unset: it shares the unreserved part."""
    context_tokens: Annotated[int, Meta(ge=16)] | None = None
    """Maximum tokens of a prompt and its answer together; unset: the limit of the model and its KV cache."""
    default_max_tokens: Count | None = None
    """Maximum output tokens of requests that set no maximum; unset: the rest of the context, and 256 for Workers AI's run."""
    adapters: tuple[AdapterConfig, ...] = ()
    """Low-rank adapters of the model."""
    adapters_dir: str | None = None
    """Directory of adapters. Each folder in it is one adapter, available as soon as it is there."""
    tool_format: ToolFormatName | None = None
    """Format of the model's tool calls; unset: detected from its chat template."""
    speculate: str = "off"
    """How tokens are drafted for verification; output tokens do not change. auto, off, or drafters in order, separated by commas: grammar (tokens
    that a schema forces), suffix (tokens that followed the same text before), and one of draft:DIRECTORY (a smaller model with the same vocabulary),
    eagle3:DIRECTORY (a head trained for the model), mtp (a layer in the model's checkpoint)."""


class FunctionConfig(Table, frozen=True, kw_only=True):
    name: Name
    """Name of the function, served at /fn/NAME/."""
    path: str
    """Directory with a wrangler.toml or wrangler.jsonc."""
    environment: str | None = None
    """Environment of the manifest to use: an [env.NAME] table."""
    layer: str | None = None
    """Directory with the packages that the function imports; unset: the site installs them."""


class R2StoreConfig(Table, frozen=True, kw_only=True):
    """An R2 bucket whose objects are stored at an S3 endpoint.
    The site has its credentials; functions never see them."""

    rules: ClassVar[Rules] = {"endpoint": is_http_place}

    endpoint: str
    """URL of the S3 endpoint, such as https://s3.eu-west-1.amazonaws.com."""
    region: str = "auto"
    """Region in request signatures."""
    bucket: str | None = None
    """Name of the bucket at the endpoint, if it differs from the name in manifests."""
    path_style: bool = True
    """Put the bucket's name in the path; false: in the host name."""
    access_key_id_env: str = "AWS_ACCESS_KEY_ID"
    """Environment variable, of the site's process, with the access key id."""
    secret_access_key_env: str = "AWS_SECRET_ACCESS_KEY"
    """Environment variable, of the site's process, with the secret access key."""
    session_token_env: str = "AWS_SESSION_TOKEN"
    """Environment variable, of the site's process, with the session token, if there is one."""
    credentials_file: str | None = None
    """File such as ~/.aws/credentials, read at each request. Replaces the environment variables."""
    profile: str = "default"
    """Section of credentials_file."""


Shareable = Annotated[str, Meta(pattern=r"^(kv|d1|r2|queue|rate_limit|service|props|durable_object):.+\Z")]


class FunctionsConfig(Table, frozen=True, kw_only=True):
    """The functions of a site, and the limits of each function."""

    rules: ClassVar[Rules] = {"deployments": is_http, "logs_otlp": is_http}

    serve: tuple[FunctionConfig, ...] = ()
    """Functions from directories of this machine."""
    directory: str | None = None
    """Directory of functions: each folder with a manifest is served."""
    deployments: str | None = None
    """URL of the router whose deployed functions (`pilotlight deploy`) this site serves. The router also answers their calls to models that this site
    does not have."""
    state_dir: str | None = None
    """Directory for the data of bindings; unset: ~/.local/state/pilotlight/SITE."""
    shared: dict[Shareable, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Resources that deployed functions may use although these belong to the site or to another function: KIND:ID (kv, d1, r2, queue, rate_limit;
    service, props and durable_object with a function's name), and the names of the functions that may use them; * matches any text."""
    r2: dict[str, R2StoreConfig] = msgspec.field(default_factory=dict)
    """R2 buckets, by their names in manifests, whose objects are stored at an S3 endpoint."""
    min_tier: Literal[1, 2, 3] = 1
    """Weakest isolation with which functions are served. 1: resource limits and no privileges; 2: namespaces, seccomp, Landlock; 3: one container per
    function."""
    oci_runtime: str | None = None
    """Program that creates the containers of tier 3, such as `crun` or `runc`. The site must be started as root."""
    show_errors: bool = False
    """Include the traceback in the response if a request fails."""
    egress_allow: tuple[str, ...] = ()
    """Hosts, or host:port, that functions may fetch although their addresses are not public."""
    cpu_ms: Count = 30_000
    """Maximum CPU time of one request, if the manifest sets no lower limit."""
    wall_s: Positive = 300.0
    """Maximum duration of one request, including its stream."""
    blocked_s: Positive = 10.0
    """Maximum time for which an event loop may be blocked; then its process is ended."""
    memory_mib: Annotated[int, Meta(ge=64)] = 256
    """Maximum memory of one process. Python itself takes 30 MiB."""
    disk_mib: Count = 64
    """Maximum scratch space of one process."""
    threads: Annotated[int, Meta(ge=4)] = 64
    """Maximum number of threads of one function."""
    open_files: Annotated[int, Meta(ge=32)] = 256
    """Maximum number of file descriptors of one process."""
    subrequests: Count = 1000
    """Maximum number of binding calls and fetches of one request."""
    request_mib: Positive = 100.0
    """Maximum size of a request's body."""
    response_mib: Positive = 1024.0
    """Maximum size of a response's body."""
    response_mib_per_s: Positive = 64.0
    """Maximum rate of all response streams of one function together."""
    concurrency: Count = 64
    """Maximum number of open requests of one process; for more, another process is started."""
    max_isolates: Count = 4
    """Maximum number of processes of one function."""
    idle_s: Positive = 60.0
    """Time without a request after which a process is ended."""
    sockets: Annotated[int, Meta(ge=1, le=900)] = 512
    """Maximum number of open WebSockets of one process; for more, another process is started."""
    socket_idle_s: Positive = 3600.0
    """Time without a message after which a WebSocket is closed."""
    socket_message_mib: Annotated[float, Meta(gt=0, le=16)] = 1.0
    """Maximum size of one WebSocket message, in either direction."""
    zygotes_mib: Annotated[int, Meta(ge=0)] = 1024
    """Memory for the processes of idle functions: per function one that has imported its packages, and a spare one forked from it."""

    logs_days: NonNegative = 7.0
    """Time for which invocations and their output are stored (`pilotlight logs`)."""
    logs_mib: Annotated[int, Meta(ge=0)] = 256
    """Maximum size of stored invocations. Above it, the oldest of the function with the most are deleted. 0: none are stored."""
    logs_otlp: str | None = None
    """URL of a collector that accepts OTLP over HTTP and gets invocations and their output, too. Needs pilotlight-inference[telemetry]."""
    history_days: NonNegative = 7.0
    """How far back D1 databases (`pilotlight d1 time-travel`) and Durable Objects can be restored. 0: not at all; the existing history is deleted."""
    layers_mib: Annotated[int, Meta(ge=0)] = 4096
    """Maximum disk space for installed packages that no function uses any more. The least recently used are deleted first."""
    layers_days: NonNegative = 30.0
    """Age after which unused packages are deleted in any case."""

    @property
    def are_served(self) -> bool:
        return bool(self.serve) or self.directory is not None or self.deployments is not None

    def agree(self) -> None:
        refuse_twice([function.name for function in self.serve], "function name")


class FinetunesConfig(Table, frozen=True, kw_only=True):
    """Adapters that accounts upload through Workers AI's /ai/finetunes, and their limits."""

    directory: str | None = None
    """Directory for uploaded adapters; each site uses a subfolder with its name. Unset: uploads are refused."""
    per_account: Count = 30
    """Maximum number of adapters of one account, or of one unknown key."""
    max_rank: Annotated[int, Meta(ge=1, le=64)] = 32
    """Maximum rank of an uploaded adapter."""
    max_mib: Positive = 300.0
    """Maximum size of one uploaded file."""


class CatalogueConfig(Table, frozen=True, kw_only=True):
    """Models that an operator can add while the site runs (on the page, or by `pilotlight manage run`)."""

    directories: tuple[str, ...] = ("~/models",)
    """Directories of checkpoints and GGUF files that the catalogue offers, besides downloaded models."""
    state_dir: str | None = None
    """Directory in which added models are stored; unset: ~/.local/state/pilotlight/SITE."""


class LimitsConfig(Table, frozen=True, kw_only=True):
    max_body_mib: Positive = 8.0
    """Maximum size of a request's body."""
    strict_fields: bool = False
    """Refuse requests with unknown fields; false: list these in the header x-ignored-fields."""
    max_waking: Count = 128
    """Maximum number of requests that wait for one model to wake; further ones are refused with 503."""
    max_inflight: Count = 256
    """Maximum number of requests in progress; further ones are refused with 503."""
    request_timeout_s: Positive = 600.0
    """Maximum duration of a request; then it is ended with an error."""
    continue_within_s: Positive = 9.0
    """Time that an answer whose host died waits for another engine host, or longer where starts take longer (at most 60 s)."""
    drain_timeout_s: NonNegative = 30.0
    """Time that open streams may take to finish after SIGTERM."""
    heartbeat_s: Positive = 10.0
    """Silence in a stream after which a comment is sent, so that proxies keep the connection."""

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)


class SiteListenConfig(ListenConfig, frozen=True, kw_only=True):
    require_hop: bool = False
    """Answer only requests that a router of the network has signed (with PILOTLIGHT_HOP_SECRET)."""


class SiteConfig(Table, frozen=True, kw_only=True):
    """One location: a runtime with its engine hosts, models and functions."""

    name: Name
    """Name of the site: an airport code and a number, such as ams1."""
    place: PlaceConfig
    """Location of the site."""
    listen: SiteListenConfig
    """Address of the site's HTTP server."""
    hop: HopConfig = HopConfig()
    """Authentication between the site and its routers."""
    door: AccessConfig = AccessConfig()
    """Rules for clients."""
    accounts: tuple[AccountConfig, ...] = ()
    """Accounts and the models that they may use."""
    keys: tuple[KeyConfig, ...] = ()
    """API keys, by their digests (`pilotlight keys create`)."""
    engine: EngineConfig = EngineConfig()
    """Devices, KV cache and weights."""
    models: tuple[ModelConfig, ...] = ()
    """Models that the site serves; without models it only serves functions."""
    functions: FunctionsConfig = msgspec.field(default_factory=FunctionsConfig)
    """Functions that the site serves, and their limits."""
    catalogue: CatalogueConfig = CatalogueConfig()
    """Models that an operator can add while the site runs."""
    images: ImagesConfig = ImagesConfig()
    """Images in requests."""
    finetunes: FinetunesConfig = FinetunesConfig()
    """Adapters that accounts upload."""
    responses: ResponsesConfig = ResponsesConfig()
    """Stored responses (POST /v1/responses)."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of requests."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logs and traces."""

    def agree(self) -> None:
        if not self.models and not self.functions.are_served:
            raise ValueError(
                "the file has nothing to serve: add a model under [[models]], or functions under [functions]"
            )
        for model in self.models:
            if model.residency == "host" and any(len(group) > 1 for group in self.engine.device_groups):
                raise ValueError(
                    f"model {model.name!r} has residency host, but devices that share a model read their parts from disk: use auto or disk"
                )
            if model.residency == "host" and self.engine.weights_host_gib == 0:
                raise ValueError(
                    f"model {model.name!r} has residency host, but engine.weights_host_gib is 0: raise it, or use auto or disk"
                )
            if model.residency == "device" and model.sleep_after_s is not None:
                raise ValueError(
                    f"model {model.name!r} has residency device, which never sleeps: remove sleep_after_s, or use residency auto"
                )
        for model in self.models:
            refuse_twice([adapter.name for adapter in model.adapters], f"adapter of {model.name}")
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        refuse_twice(names, "model name")
        check_accounts([account.name for account in self.accounts], self.keys)
        check_access(self.listen.host, self.door, len(self.keys), requires_hop=self.listen.require_hop)


def load_keys(path: Path) -> KeysFile:
    return parse(KeysFile, read(path), str(path))


def load_site(path: Path) -> SiteConfig:
    return parse(SiteConfig, read(path), str(path))
