"""A site's file: one location, its engine hosts, models and functions, and the limits of its door.

`load_site` is its only reader. Refuses to know what the values are used for, and the router's file.
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
from pilotlight.sites.images import ImagesConfig
from pilotlight.sites.rules import (
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


class EngineHostConfig(Table, frozen=True, kw_only=True):
    """One engine host of several."""

    rules: ClassVar[Rules] = {"device": is_a_device}

    device: (
        Annotated[str, Meta(description='"auto", "cpu", "cuda" or "cuda:N"', extra_json_schema={"default": "auto"})]
        | UnsetType
    ) = UNSET
    devices: Annotated[
        Annotated[tuple[str, ...], Meta(min_length=2)] | None,
        Meta(description="instead of device: those that share every model, as devices in brackets of their own do"),
    ] = None
    role: Annotated[
        Role,
        Meta(
            description="prefill: computes prompts, and hands their KV blocks to hosts that answer; decode: answers; both: either, as one host does"
        ),
    ] = "both"

    @property
    def group(self) -> tuple[str, ...]:
        """Its devices."""
        return self.devices or ("auto" if self.device is UNSET else self.device,)

    def agree(self) -> None:
        if self.devices is not None and self.device is not UNSET:
            raise ValueError("device and devices are both given: drop one of them")


class LenderConfig(Table, frozen=True, kw_only=True):
    """A site of the network that may compute prompts for this one."""

    rules: ClassVar[Rules] = {"url": is_http}

    site: Annotated[Name, Meta(description="its name, by which routers' rules on data know it, too")]
    url: Annotated[str, Meta(description="where it listens, and at whose host its engine hosts serve blocks (lend_at)")]


class EngineConfig(Table, frozen=True, kw_only=True):
    """Engine hosts: one process for each device, which holds several models. Sizes are each host's own, but for weights_host_gib, which all share."""

    rules: ClassVar[Rules] = {"device": is_a_device, "devices": can_stand_together}

    device: (  # unset is auto, and leaves devices its say
        Annotated[str, Meta(description='"auto", "cpu", "cuda" or "cuda:N"', extra_json_schema={"default": "auto"})]
        | UnsetType
    ) = UNSET
    devices: Annotated[
        Annotated[tuple[str | Annotated[tuple[str, ...], Meta(min_length=1)], ...], Meta(min_length=1)] | None,
        Meta(
            description='instead of device, where the site has several: ["cuda:0", "cuda:1"]; "cpu" may be repeated, and the cores are then divided. '
            'Devices in brackets of their own share every model: [["cuda:0", "cuda:1"], "cuda:2"]; of these all but the first may lie on other '
            'machines, where Ray finds them: ["cuda:0", "ray:cuda"]'
        ),
    ] = None
    ray_address: Annotated[
        Annotated[str, Meta(pattern=r"^(auto|[^\s/]+:[0-9]{1,5})\Z")],
        Meta(
            description="HOST:PORT of the Ray cluster that finds devices on other machines, of which this one is a node; auto: the one that it is a "
            "node of (pip install 'pilotlight[cluster]')"
        ),
    ] = "auto"
    stages: Annotated[
        Count,
        Meta(
            description="into which devices in brackets are divided, in their order: each has a run of a model's layers, and its devices share those"
        ),
    ] = 1
    expert_parallel: Annotated[
        bool,
        Meta(description="devices in brackets have some of each layer's experts, instead of a part of every one"),
    ] = False
    redundant_experts: Annotated[
        int,
        Meta(
            ge=0,
            description="with expert_parallel: copies of each layer's experts with most tokens, on the devices that share it together",
        ),
    ] = 0
    data_parallel: Annotated[
        Count,
        Meta(
            description="with expert_parallel: copies of a layer's attention, with sequences and KV cache of their own, each on as many of the "
            "devices that share the layer. Tokens go to their experts and back; kv_gib and kv_tokens are each device's"
        ),
    ] = 1
    hosts: Annotated[
        tuple[EngineHostConfig, ...],
        Meta(description="instead of device and devices: one table for each host, where they differ in what they do"),
    ] = ()
    shift_roles: Annotated[
        bool,
        Meta(
            description="let a host of hosts do both for a while where the side that is not its own waits for scale_up_wait_s, and go back to "
            "its role when for scale_down_after_s neither would wait without it"
        ),
    ] = False
    scale_up_wait_s: Annotated[
        NonNegative,
        Meta(
            description="a model whose next request would wait for so long, for a few seconds on end, wakes on a further device with room; 0: never"
        ),
    ] = 1.0
    scale_down_after_s: Annotated[
        Positive, Meta(description="a further copy sleeps when for so long the others would have done without it")
    ] = 30.0
    threads: Annotated[Count | None, Meta(description="CPU threads of one operation; unset: torch's choice")] = None
    kv_gib: Annotated[
        Positive | None,
        Meta(
            description="KV cache of all models together, in GiB, of each device; unset: 0.25 on a CPU, and all that weights and steps leave of a GPU"
        ),
    ] = None
    kv_host_gib: Annotated[
        NonNegative,
        Meta(description="shared memory where KV blocks outlive the device's and an engine restart; 0: none"),
    ] = 0.0
    kv_disk_dir: Annotated[
        str | None,
        Meta(
            description="directory where KV blocks outlive that as well; unset: none. Each site takes a part of its own"
        ),
    ] = None
    kv_disk_gib: Annotated[Positive, Meta(description="of kv_disk_dir, at most")] = 8.0
    kv_disk_write_mib_per_s: Annotated[
        Positive,
        Meta(description="written to it, at most, by each host: beyond that, blocks that were used again go first"),
    ] = 256.0
    kv_store: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s/]+:[0-9]{1,5}\Z")] | None,
        Meta(
            description="HOST:PORT of a Mooncake Store's master, such as pilotlight store runs: KV blocks of all hosts and sites that name it, which "
            "outlive them; its connections know no keys (pip install 'pilotlight[mooncake]'); unset: none",
        ),
    ] = None
    kv_transport: Annotated[
        Literal["shared_memory", "mooncake"],
        Meta(
            description="how KV blocks go from one host to another: through this machine's memory, or by Mooncake's transfer engine, "
            "whose connections know no keys (pip install 'pilotlight[mooncake]')"
        ),
    ] = "shared_memory"
    lend_at: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s/:]+:[0-9]{1,5}\Z")] | None,
        Meta(
            description="HOST:PORT where the first engine host serves KV blocks to other sites, the next ones at the ports behind it: their prompts "
            "are computed here while a host has nothing of this site's own to do; unset: for nobody"
        ),
    ] = None
    lenders: Annotated[
        tuple[LenderConfig, ...],
        Meta(
            description="sites that may compute prompts for this one, where that is predicted to take less time, link included, "
            "and a router has said that the request's data may go there"
        ),
    ] = ()
    weights_gib: Annotated[
        Positive | None,
        Meta(
            description="weights of awake models, at most; unset: no limit on a CPU, the device's memory beside the KV cache on CUDA"
        ),
    ] = None
    weights_host_gib: Annotated[
        NonNegative | None,
        Meta(
            description="shared memory where weights outlive sleep and an engine restart; 0: none; unset: up to half of what is available"
        ),
    ] = None
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens in one KV block")] = 16
    max_num_batched_tokens: Annotated[int, Meta(ge=16, description="token budget of one step")] = 2048
    max_decode_delay_ms: Annotated[
        NonNegative,
        Meta(description="by which a step's prompt tokens may hold up the streams beside them, as measured"),
    ] = 200.0
    max_num_seqs: Annotated[Count, Meta(description="sequences running at once")] = 64
    adapter_slots: Annotated[
        Count, Meta(description="of each model, on the device: different adapters that are computed at once")
    ] = 16
    adapters_host_gib: Annotated[
        NonNegative, Meta(description="of each model's adapters, kept in host memory for their next use")
    ] = 1.0
    max_waiting: Annotated[Count, Meta(description="sequences waiting, beyond which requests are refused")] = 1024
    start_timeout_s: Annotated[Positive, Meta(description="a host that could load no model by then is restarted")] = (
        60.0
    )
    step_deadline_s: Annotated[
        Positive,
        Meta(
            description="a host with work and no step for so long is restarted; where its largest step is measured to take more than a tenth of "
            "this, for ten times that"
        ),
    ] = 30.0

    standby: Annotated[
        bool | None,
        Meta(
            description="keep a second host, imported and without a model, that takes over when the first dies (160 MiB); "
            "unset: where 1.25 GiB of memory are available"
        ),
    ] = None
    standby_after_s: Annotated[
        NonNegative, Meta(description="how long the site has been without work before that host is prepared")
    ] = 5.0

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
        """The role of each device's host."""
        if self.hosts:
            return tuple([host.role for host in self.hosts])
        return tuple(["both" for _ in self.all_devices])

    @property
    def is_split(self) -> bool:
        """Tell whether some hosts compute prompts for others."""
        return len(set(self.roles)) > 1

    @property
    def first_lend_port(self) -> int | None:
        """The port of `lend_at`; None: the site lends nothing."""
        return None if self.lend_at is None else int(self.lend_at.rpartition(":")[2])

    @property
    def shares_blocks(self) -> bool:
        """Tell whether engine hosts fetch blocks of each other, here or at other sites."""
        return self.is_split or self.lend_at is not None or bool(self.lenders)

    def agree(self) -> None:
        if self.hosts and (self.devices is not None or self.device is not UNSET):
            raise ValueError("hosts is given beside device or devices: each host names its own, drop the others")
        if len(self.hosts) > 1 or any(host.devices for host in self.hosts):
            can_stand_together(self.device_groups)
        if "prefill" in self.roles and not {"decode", "both"} & set(self.roles):
            raise ValueError("no host answers: give one of hosts the role decode or both")
        if "decode" in self.roles and not {"prefill", "both"} & set(self.roles):
            raise ValueError("no host computes prompts: give one of hosts the role prefill or both")
        if self.is_split and not self.kv_host_gib:
            raise ValueError(
                "hosts of several roles need kv_host_gib above 0: KV blocks go from one to another through host memory"
            )
        if self.shift_roles and not (self.is_split and self.scale_up_wait_s):
            raise ValueError(
                "shift_roles is of hosts that have several roles, and of scale_up_wait_s above 0: set those, or drop it"
            )
        shared = [group for group in self.device_groups if len(group) > 1]
        if self.expert_parallel and not shared:
            raise ValueError(
                "expert_parallel is of devices in brackets of their own, which share every model: name some"
            )
        if self.redundant_experts and not self.expert_parallel:
            raise ValueError("redundant_experts are copies beside expert_parallel: set that, or drop them")
        if odd := [group for group in shared if self.redundant_experts % (len(group) // self.stages or 1)]:
            raise ValueError(
                f"redundant_experts is {self.redundant_experts}, and {len(odd[0]) // self.stages} devices share a layer's experts: make it a multiple"
            )
        if self.data_parallel > 1 and not self.expert_parallel:
            raise ValueError(
                "data_parallel spreads whole experts over its devices: set expert_parallel beside it, or leave it at 1"
            )
        if self.data_parallel > 1 and (odd := [g for g in shared if len(g) % (self.stages * self.data_parallel)]):
            raise ValueError(
                f"data_parallel is {self.data_parallel}, and {len(odd[0]) // self.stages} devices share a layer: "
                "as many of them have each copy of its attention, so make it a divisor"
            )
        if self.stages > 1 and not shared:
            raise ValueError("stages are of devices in brackets of their own, which share every model: name some")
        if odd := [group for group in shared if len(group) % self.stages]:
            raise ValueError(f"{len(odd[0])} devices cannot be divided into {self.stages} stages of as many each")
        if self.devices is not None and self.device is not UNSET:
            raise ValueError("device and devices are both given: drop one of them")
        if self.kv_disk_dir is not None and not self.kv_host_gib:
            raise ValueError("kv_disk_dir needs kv_host_gib above 0: KV blocks reach the disk through host memory")
        if (self.lend_at is not None or self.lenders) and not self.kv_host_gib:
            raise ValueError(
                "lend_at and lenders need kv_host_gib above 0: KV blocks go from site to site through host memory"
            )
        if (first := self.first_lend_port) is not None and not 0 < first <= 65536 - len(self.device_groups):
            raise ValueError(f"lend_at is at port {first}: each engine host needs one of its own from there to 65535")
        refuse_twice([lender.site for lender in self.lenders], "lender's site")
        if self.kv_store is not None and not self.kv_host_gib:
            raise ValueError("kv_store needs kv_host_gib above 0: KV blocks reach the store through host memory")


ToolFormatName = Literal[
    "hermes", "qwen3_coder", "llama3_json", "pythonic", "harmony", "kimi_k2", "deepseek_v3", "deepseek_v31", "mistral", "mistral_v11", "glm45",
]  # fmt: skip


class AdapterConfig(Table, frozen=True, kw_only=True):
    """A low-rank adapter of a model."""

    name: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z", description="requests ask for it as MODEL:NAME"),
    ]
    path: Annotated[
        str, Meta(description="directory as PEFT writes it: adapter_config.json, adapter_model.safetensors")
    ]


class ModelConfig(Table, frozen=True, kw_only=True):
    rules: ClassVar[Rules] = {"speculate": is_a_speculation}

    name: Annotated[str, Meta(min_length=1, max_length=200, description="what requests call it")]
    source: Annotated[
        str,
        Meta(
            description='"embedded:ember", a directory, a GGUF file, the URL of a packed one, or a Hugging Face hub id'
        ),
    ]
    aliases: Annotated[tuple[str, ...], Meta(description="further names for the same model")] = ()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lossless: Annotated[
        Literal["auto", "off", "always"],
        Meta(
            description="weights in bfloat16 kept in 12 bits, with the same answers: auto: on a CPU, where measured to be faster; always: on GPUs too"
        ),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="the KV cache's numbers: auto: as the model computes; fp8: in half the bytes of bfloat16, less exactly"
        ),
    ] = "auto"
    residency: Annotated[
        Literal["device", "auto", "host", "disk"],
        Meta(
            description="device: loaded at start, stays awake; auto: woken by its first request, sleeps in host memory when others need the room; "
            "host: the same, read into host memory at start and kept there; disk: woken by its first request, sleeps on disk"
        ),
    ] = "device"
    priority: Annotated[
        int, Meta(ge=-8, le=7, description="where room is needed, models of a higher one sleep last")
    ] = 0
    sleep_after_s: Annotated[
        Positive | None,
        Meta(description="asleep when unused for so long, whoever needs the room; unset: only when others need it"),
    ] = None
    kv_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(description="KV cache in tokens that is this model's alone; unset: it borrows what others leave"),
    ] = None
    context_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(description="prompt and answer of a request together; unset: what the model and its KV cache allow"),
    ] = None
    default_max_tokens: Annotated[
        Count | None,
        Meta(description="where a request names none; unset: what the context leaves, and at Workers AI's run 256"),
    ] = None
    adapters: Annotated[tuple[AdapterConfig, ...], Meta(description="low-rank adapters of the model")] = ()
    adapters_dir: Annotated[
        str | None,
        Meta(description="directory of adapters: each folder in it is one, by its name, as soon as it is there"),
    ] = None
    tool_format: Annotated[
        ToolFormatName | None, Meta(description="how the model writes tool calls; unset: as its chat template tells")
    ] = None
    speculate: Annotated[
        str,
        Meta(
            description="how tokens are guessed that a step then checks, which changes no token: auto, off, or drafters in the order in which they "
            "are asked: grammar (what a schema forces), suffix (what followed the same tokens before), and one of draft:DIRECTORY (a smaller one of "
            "the same vocabulary), eagle3:DIRECTORY (a head that was trained for the model), mtp (a layer of the model's own checkpoint)"
        ),
    ] = "off"


class FunctionConfig(Table, frozen=True, kw_only=True):
    name: Annotated[Name, Meta(description="served at /fn/NAME/")]
    path: Annotated[str, Meta(description="directory with a wrangler.toml or wrangler.jsonc")]
    environment: Annotated[str | None, Meta(description="an [env.NAME] of that file")] = None
    layer: Annotated[str | None, Meta(description="directory with the packages that it imports")] = None


class R2StoreConfig(Table, frozen=True, kw_only=True):
    """A bucket of R2 whose objects lie at an S3 endpoint. Its credentials are the site's; functions never see them."""

    rules: ClassVar[Rules] = {"endpoint": is_http_place}

    endpoint: Annotated[str, Meta(description="such as https://s3.eu-west-1.amazonaws.com")]
    region: Annotated[str, Meta(description="as the endpoint wants it signed")] = "auto"
    bucket: Annotated[str | None, Meta(description="its name there, where that is another one")] = None
    path_style: Annotated[bool, Meta(description="the bucket in the path; false: in the host's name")] = True
    access_key_id_env: Annotated[str, Meta(description="environment variable of the site's process")] = (
        "AWS_ACCESS_KEY_ID"
    )
    secret_access_key_env: str = "AWS_SECRET_ACCESS_KEY"
    session_token_env: str = "AWS_SESSION_TOKEN"
    credentials_file: Annotated[
        str | None,
        Meta(description="instead of the environment: a file such as ~/.aws/credentials, read for each request"),
    ] = None
    profile: Annotated[str, Meta(description="section of that file")] = "default"


Shareable = Annotated[str, Meta(pattern=r"^(kv|d1|r2|queue|rate_limit|service|props|durable_object):.+\Z")]


class FunctionsConfig(Table, frozen=True, kw_only=True):
    """The functions of a site, and what each of them may use."""

    rules: ClassVar[Rules] = {"deployments": is_http}

    serve: tuple[FunctionConfig, ...] = ()
    directory: Annotated[
        str | None, Meta(description="of deployed functions: each folder in it with a manifest is served")
    ] = None
    deployments: Annotated[
        str | None,
        Meta(
            description="URL of the router whose deployed functions (`pilotlight deploy`) are served here, and that asks other sites for models "
            "which functions want and this site lacks"
        ),
    ] = None
    state_dir: Annotated[
        str | None, Meta(description="where bindings keep their data; unset: in ~/.local/state/pilotlight/SITE")
    ] = None
    shared: Annotated[
        dict[Shareable, tuple[str, ...]],
        Meta(
            description="what deployed functions may use that is the site's or another's, by KIND:ID (kv, d1, r2, queue, rate_limit; service, props "
            "and durable_object by their function's name): the functions that may, with *"
        ),
    ] = msgspec.field(default_factory=dict)
    r2: Annotated[
        dict[str, R2StoreConfig], Meta(description="buckets, by their name in manifests, that lie at an S3 endpoint")
    ] = msgspec.field(default_factory=dict)
    min_tier: Annotated[
        Literal[1, 2, 3],
        Meta(
            description="isolation below which nothing is served: 1 limits and no privileges, 2 namespaces, seccomp, Landlock, "
            "3 a container for each function"
        ),
    ] = 1
    oci_runtime: Annotated[
        str | None,
        Meta(
            description="program that makes the containers of tier 3, as `crun` or `runc`; the site must be started as root"
        ),
    ] = None
    show_errors: Annotated[bool, Meta(description="answer a failed request with its traceback")] = False
    egress_allow: Annotated[
        tuple[str, ...],
        Meta(description="hosts, or host:port, that functions may fetch although their address is not public"),
    ] = ()
    cpu_ms: Annotated[Count, Meta(description="CPU time of one request, where the manifest sets none")] = 30_000
    wall_s: Annotated[Positive, Meta(description="of one request, its stream included")] = 300.0
    blocked_s: Annotated[Positive, Meta(description="an event loop blocked for so long ends its process")] = 10.0
    memory_mib: Annotated[int, Meta(ge=64, description="of one process, Python's own 30 included")] = 256
    disk_mib: Annotated[Count, Meta(description="of scratch space")] = 64
    threads: Annotated[int, Meta(ge=4, description="of one function")] = 64
    open_files: Annotated[int, Meta(ge=32)] = 256
    subrequests: Annotated[Count, Meta(description="of one request: calls of bindings and fetches")] = 1000
    request_mib: Positive = 100.0
    response_mib: Positive = 1024.0
    response_mib_per_s: Annotated[Positive, Meta(description="of all streams of one function together")] = 64.0
    concurrency: Annotated[
        Count, Meta(description="requests open in one process, beyond which another one is started")
    ] = 64
    max_isolates: Annotated[Count, Meta(description="processes of one function")] = 4
    idle_s: Annotated[Positive, Meta(description="without a request, after which a process is ended")] = 60.0
    sockets: Annotated[
        int, Meta(ge=1, le=900, description="WebSockets open in one process, beyond which another is started")
    ] = 512
    socket_idle_s: Annotated[Positive, Meta(description="a WebSocket without a message for so long is closed")] = 3600.0
    socket_message_mib: Annotated[
        float, Meta(gt=0, le=16, description="of one message of a WebSocket, in either direction")
    ] = 1.0
    zygotes_mib: Annotated[
        int, Meta(ge=0, description="memory for functions that sleep with all they import, so that they wake quickly")
    ] = 1024

    layers_mib: Annotated[
        int, Meta(ge=0, description="of installed packages that no function uses any more; the longest unused go first")
    ] = 4096
    layers_days: Annotated[NonNegative, Meta(description="after which such packages are deleted in any case")] = 30.0

    @property
    def are_served(self) -> bool:
        return bool(self.serve) or self.directory is not None or self.deployments is not None

    def agree(self) -> None:
        refuse_twice([function.name for function in self.serve], "function name")


class FinetunesConfig(Table, frozen=True, kw_only=True):
    """The adapters that accounts upload (Workers AI's /ai/finetunes), and what is taken of each."""

    directory: Annotated[
        str | None,
        Meta(description="where they are kept; unset: nobody may upload any. Each site takes a part of its own"),
    ] = None
    per_account: Annotated[Count, Meta(description="of one account, or of one key that is not known")] = 30
    max_rank: Annotated[int, Meta(ge=1, le=64)] = 32
    max_mib: Annotated[Positive, Meta(description="of one file")] = 300.0


class LimitsConfig(Table, frozen=True, kw_only=True):
    max_body_mib: Positive = 8.0
    strict_fields: Annotated[
        bool, Meta(description="refuse requests with unknown fields, instead of naming these in x-ignored-fields")
    ] = False
    max_waking: Annotated[
        Count, Meta(description="requests that wait for one model to wake, beyond which they are refused with 503")
    ] = 128
    max_inflight: Annotated[
        Count, Meta(description="requests at work at once, beyond which they are refused with 503")
    ] = 256
    request_timeout_s: Annotated[
        Positive, Meta(description="a request that has not ended by then is ended with an error")
    ] = 600.0
    continue_within_s: Annotated[
        Positive,
        Meta(
            description="an answer whose engine host died has its next token by then, from the next host, or ends with an error"
        ),
    ] = 9.0
    drain_timeout_s: Annotated[NonNegative, Meta(description="how long open streams may finish after SIGTERM")] = 30.0
    heartbeat_s: Annotated[
        Positive, Meta(description="a stream silent for so long gets a comment, so that proxies keep it")
    ] = 10.0


class SiteListenConfig(ListenConfig, frozen=True, kw_only=True):
    require_hop: Annotated[bool, Meta(description="answer only requests signed by one of the network's routers")] = (
        False
    )


class SiteConfig(Table, frozen=True, kw_only=True):
    """One location: a runtime, its engine hosts, its models and functions."""

    name: Annotated[Name, Meta(description="airport code and number, such as ams1")]
    place: PlaceConfig
    listen: SiteListenConfig
    hop: HopConfig = HopConfig()
    door: AccessConfig = AccessConfig()
    accounts: tuple[AccountConfig, ...] = ()
    keys: tuple[KeyConfig, ...] = ()
    engine: EngineConfig = EngineConfig()
    models: tuple[ModelConfig, ...] = ()
    functions: FunctionsConfig = msgspec.field(default_factory=FunctionsConfig)
    images: ImagesConfig = ImagesConfig()
    finetunes: FinetunesConfig = FinetunesConfig()
    responses: ResponsesConfig = ResponsesConfig()
    limits: LimitsConfig = LimitsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def agree(self) -> None:
        if not self.models and not self.functions.are_served:
            raise ValueError("there is nothing to serve: name a model under [[models]], or functions under [functions]")
        for model in self.models:
            if model.residency == "host" and any(len(group) > 1 for group in self.engine.device_groups):
                raise ValueError(
                    f"model {model.name!r} is to sleep in host memory, and devices that share a model read their parts from disk: say auto or disk"
                )
            if model.residency == "host" and self.engine.weights_host_gib == 0:
                raise ValueError(
                    f"model {model.name!r} is to sleep in host memory, and engine.weights_host_gib is 0: raise it, or say auto or disk"
                )
            if model.residency == "device" and model.sleep_after_s is not None:
                raise ValueError(f"model {model.name!r} is to stay on the device: drop sleep_after_s, or say auto")
        if any(lender.site == self.name for lender in self.engine.lenders):
            raise ValueError(f"engine.lenders names {self.name!r}, which is this site: name others")
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
