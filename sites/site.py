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
    """One engine host of a site that lists its hosts one by one."""

    rules: ClassVar[Rules] = {"device": is_a_device}

    device: (
        Annotated[
            str,
            Meta(
                description='One device of this host: "auto", "cpu", "cuda" or "cuda:N".',
                extra_json_schema={"default": "auto"},
            ),
        ]
        | UnsetType
    ) = UNSET
    devices: Annotated[
        Annotated[tuple[str, ...], Meta(min_length=2)] | None,
        Meta(description="Several devices of this host, which share every model. Replaces device."),
    ] = None
    role: Annotated[
        Role,
        Meta(
            description=(
                "prefill: compute prompts and send their KV blocks to hosts that answer; decode: generate answers; both: "
                "do both."
            )
        ),
    ] = "both"

    @property
    def group(self) -> tuple[str, ...]:
        """The devices of the host."""
        return self.devices or ("auto" if self.device is UNSET else self.device,)

    def agree(self) -> None:
        if self.devices is not None and self.device is not UNSET:
            raise ValueError("device and devices are both set: remove one of them")


class LenderConfig(Table, frozen=True, kw_only=True):
    """A site of the network that may compute prompts for this one."""

    rules: ClassVar[Rules] = {"url": is_http}

    site: Annotated[Name, Meta(description="Name of the other site, as routers' data rules use it.")]
    url: Annotated[
        str,
        Meta(description="URL where that site listens. Its engine hosts serve KV blocks at the same host (lend_at)."),
    ]


class EngineConfig(Table, frozen=True, kw_only=True):
    """Engine hosts: one process for each device, which holds several models.
    Sizes are each host's own, but for weights_host_gib, which all share."""

    rules: ClassVar[Rules] = {"device": is_a_device, "devices": can_stand_together}

    device: (  # unset is auto, and leaves devices its say
        Annotated[
            str,
            Meta(
                description='The device of the engine host: "auto", "cpu", "cuda" or "cuda:N".',
                extra_json_schema={"default": "auto"},
            ),
        ]
        | UnsetType
    ) = UNSET
    devices: Annotated[
        Annotated[tuple[str | Annotated[tuple[str, ...], Meta(min_length=1)], ...], Meta(min_length=1)] | None,
        Meta(
            description=(
                'Several devices, with one engine host each. Devices in inner brackets share every model: [["cuda:0", '
                '"cuda:1"], "cuda:2"]. All but the first of such a group may be on other machines, found by Ray: '
                '["cuda:0", "ray:cuda"].'
            )
        ),
    ] = None
    ray_address: Annotated[
        Annotated[str, Meta(pattern=r"^(auto|[^\s/]+:[0-9]{1,5})\Z")],
        Meta(
            description=(
                "HOST:PORT of the Ray cluster that finds devices on other machines; auto: the cluster that this machine "
                "is a node of. Needs pilotlight-inference[cluster]."
            )
        ),
    ] = "auto"
    stages: Annotated[
        Count,
        Meta(
            description=(
                "Number of pipeline stages into which a group of devices is divided, in order. Each stage has consecutive"
                " layers."
            )
        ),
    ] = 1
    expert_parallel: Annotated[
        bool,
        Meta(description="Give each device of a group whole experts of each layer, instead of a part of every expert."),
    ] = False
    redundant_experts: Annotated[
        int,
        Meta(
            ge=0,
            description="With expert_parallel: number of extra copies of each layer's busiest experts.",
        ),
    ] = 0
    data_parallel: Annotated[
        Count,
        Meta(
            description=(
                "With expert_parallel: number of copies of a layer's attention, each with its own sequences and KV cache,"
                " on an equal share of the group's devices. kv_gib and kv_tokens then count for each device."
            )
        ),
    ] = 1
    hosts: Annotated[
        tuple[EngineHostConfig, ...],
        Meta(
            description="One table for each engine host, where hosts have different roles. Replaces device and devices."
        ),
    ] = ()
    shift_roles: Annotated[
        bool,
        Meta(
            description=(
                "Let a host take both roles while the other role's requests would wait longer than scale_up_wait_s. It "
                "returns to its own role after scale_down_after_s without such a wait."
            )
        ),
    ] = False
    scale_up_wait_s: Annotated[
        NonNegative,
        Meta(
            description=(
                "Wake a model on one more device when its next request would wait longer than this for a few seconds; 0: "
                "never."
            )
        ),
    ] = 1.0
    scale_down_after_s: Annotated[
        Positive,
        Meta(description="Put an extra copy of a model to sleep when the others would have sufficed for this long."),
    ] = 30.0
    threads: Annotated[Count | None, Meta(description="CPU threads of one operation; unset: PyTorch's default.")] = None
    kv_gib: Annotated[
        Positive | None,
        Meta(
            description=(
                "KV cache of all models of one device; unset: 0.25 on a CPU, and what weights and steps leave free on a "
                "GPU."
            )
        ),
    ] = None
    kv_host_gib: Annotated[
        NonNegative,
        Meta(
            description="Shared memory for KV blocks that the device evicts. They survive a restart of the engine host. 0: off."
        ),
    ] = 0.0
    kv_disk_dir: Annotated[
        str | None,
        Meta(
            description="Directory for KV blocks that host memory evicts; each site uses a subfolder with its name. Unset: off."
        ),
    ] = None
    kv_disk_gib: Annotated[Positive, Meta(description="Maximum size of kv_disk_dir.")] = 8.0
    kv_disk_write_mib_per_s: Annotated[
        Positive,
        Meta(
            description=(
                "Maximum write rate of each host to kv_disk_dir. Above it, only blocks that were used more than once are "
                "written."
            )
        ),
    ] = 256.0
    kv_store: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s/]+:[0-9]{1,5}\Z")] | None,
        Meta(
            description=(
                "HOST:PORT of a Mooncake Store's master (`pilotlight store`), shared by all hosts and sites that name it."
                " Its connections are not authenticated. Needs pilotlight-inference[mooncake]. Unset: off."
            ),
        ),
    ] = None
    kv_transport: Annotated[
        Literal["shared_memory", "mooncake"],
        Meta(
            description=(
                "How KV blocks move between hosts: through this machine's shared memory, or by Mooncake's transfer "
                "engine, whose connections are not authenticated (pilotlight-inference[mooncake])."
            )
        ),
    ] = "shared_memory"
    lend_at: Annotated[
        Annotated[str, Meta(pattern=r"^[^\s/:]+:[0-9]{1,5}\Z")] | None,
        Meta(
            description=(
                "HOST:PORT where the first engine host serves KV blocks to other sites; further hosts use the next ports."
                " Idle hosts then compute prompts for those sites. Unset: off."
            )
        ),
    ] = None
    lenders: Annotated[
        tuple[LenderConfig, ...],
        Meta(
            description=(
                "Sites that may compute prompts for this one, when that is predicted to be faster, transfer included, and"
                " the router has confirmed that the request's data may go there."
            )
        ),
    ] = ()
    weights_gib: Annotated[
        Positive | None,
        Meta(
            description=(
                "Maximum size of the weights of awake models on one device; unset: what the KV cache leaves free on a "
                "GPU, no limit on a CPU."
            )
        ),
    ] = None
    weights_host_gib: Annotated[
        NonNegative | None,
        Meta(
            description=(
                "Shared memory for weights of sleeping models, kept across a restart of the engine host; 0: off; unset: "
                "up to half of the available memory."
            )
        ),
    ] = None
    block_size: Annotated[int, Meta(ge=1, le=256, description="Tokens in one KV block.")] = 16
    max_num_batched_tokens: Annotated[int, Meta(ge=16, description="Token budget of one engine step.")] = 2048
    max_decode_delay_ms: Annotated[
        NonNegative,
        Meta(description="Longest time by which a step's prompt tokens may delay running streams, as measured."),
    ] = 200.0
    max_num_seqs: Annotated[Count, Meta(description="Sequences that run at the same time.")] = 64
    adapter_slots: Annotated[
        Count, Meta(description="Adapters of one model that a device can compute in one batch.")
    ] = 16
    adapters_host_gib: Annotated[
        NonNegative, Meta(description="Host memory for the adapters of one model, kept for their next use.")
    ] = 1.0
    max_waiting: Annotated[Count, Meta(description="Sequences that may wait; further requests are refused.")] = 1024
    start_timeout_s: Annotated[
        Positive, Meta(description="Time in which a host must have loaded its first model; then it is restarted.")
    ] = 60.0
    step_deadline_s: Annotated[
        Positive,
        Meta(
            description=(
                "Time without a finished step after which a host with work is restarted; at least ten times the measured "
                "duration of its largest step."
            )
        ),
    ] = 30.0

    standby: Annotated[
        bool | None,
        Meta(
            description=(
                "Keep a second engine host without a model, which takes over when the first one dies (160 MiB); unset: if"
                " 1.25 GiB of memory are available."
            )
        ),
    ] = None
    standby_after_s: Annotated[
        NonNegative, Meta(description="Time without work after which that host is prepared.")
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
        """The port of `lend_at`; None if the site does not lend."""
        return None if self.lend_at is None else int(self.lend_at.rpartition(":")[2])

    @property
    def shares_blocks(self) -> bool:
        """Tell whether engine hosts fetch KV blocks from each other, here or at other sites."""
        return self.is_split or self.lend_at is not None or bool(self.lenders)

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
        if (self.lend_at is not None or self.lenders) and not self.kv_host_gib:
            raise ValueError(
                "lend_at and lenders need kv_host_gib above 0, because KV blocks move between sites through host memory"
            )
        if (first := self.first_lend_port) is not None and not 0 < first <= 65536 - len(self.device_groups):
            raise ValueError(
                f"lend_at has port {first}, but each engine host needs a separate port, from there up to 65535"
            )
        refuse_twice([lender.site for lender in self.lenders], "lender's site")
        if self.kv_store is not None and not self.kv_host_gib:
            raise ValueError(
                "kv_store needs kv_host_gib above 0, because KV blocks reach the store through host memory"
            )


ToolFormatName = Literal[
    "hermes", "qwen3_coder", "llama3_json", "pythonic", "harmony", "kimi_k2", "deepseek_v3", "deepseek_v31", "mistral", "mistral_v11", "glm45",
]  # fmt: skip


class AdapterConfig(Table, frozen=True, kw_only=True):
    """A low-rank adapter of a model."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z", description="Name of the adapter; requests use MODEL:NAME."
        ),
    ]
    path: Annotated[str, Meta(description="PEFT directory: adapter_config.json and adapter_model.safetensors.")]


class ModelConfig(Table, frozen=True, kw_only=True):
    rules: ClassVar[Rules] = {"speculate": is_a_speculation}

    name: Annotated[str, Meta(min_length=1, max_length=200, description="Name that requests use.")]
    source: Annotated[
        str,
        Meta(
            description='"embedded:ember", a directory, a GGUF file, the URL of a packed model, or a Hugging Face id.'
        ),
    ]
    aliases: Annotated[tuple[str, ...], Meta(description="Further names of the same model.")] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Type in which the model computes; auto: the type of the checkpoint."),
    ] = "auto"
    lossless: Annotated[
        Literal["auto", "off", "always"],
        Meta(
            description=(
                "Keep bfloat16 weights in 12 bits, with the same answers. auto: on a CPU, if measured to be faster; "
                "always: on GPUs too."
            )
        ),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="Type of the KV cache. auto: as the model computes; fp8: half the bytes of bfloat16, less exact."
        ),
    ] = "auto"
    residency: Annotated[
        Literal["device", "auto", "host", "disk"],
        Meta(
            description=(
                "device: loaded at start, always awake; auto: woken by its first request, sleeps in host memory when "
                "others need the device; host: like auto, read into host memory at start; disk: woken by its first "
                "request, sleeps on disk."
            )
        ),
    ] = "device"
    priority: Annotated[int, Meta(ge=-8, le=7, description="Models with a higher number are put to sleep last.")] = 0
    sleep_after_s: Annotated[
        Positive | None,
        Meta(
            description="Put the model to sleep after this time without use; unset: only when others need the device."
        ),
    ] = None
    kv_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(description="KV cache in tokens that is reserved for this model; unset: it shares what is free."),
    ] = None
    context_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="Maximum tokens of a prompt and its answer together; unset: what the model and its KV cache allow."
        ),
    ] = None
    default_max_tokens: Annotated[
        Count | None,
        Meta(
            description=(
                "Maximum output tokens of requests that name none; unset: the rest of the context, and 256 for Workers "
                "AI's run."
            )
        ),
    ] = None
    adapters: Annotated[tuple[AdapterConfig, ...], Meta(description="Low-rank adapters of the model.")] = ()
    adapters_dir: Annotated[
        str | None,
        Meta(description="Directory of adapters: each folder in it is one adapter, available as soon as it is there."),
    ] = None
    tool_format: Annotated[
        ToolFormatName | None,
        Meta(description="Format of the model's tool calls; unset: detected from its chat template."),
    ] = None
    speculate: Annotated[
        str,
        Meta(
            description=(
                "How tokens are drafted for verification; no output token changes. auto, off, or drafters in order, "
                "separated by commas: grammar (tokens that a schema forces), suffix (what followed the same tokens "
                "before), and one of draft:DIRECTORY (a smaller model with the same vocabulary), eagle3:DIRECTORY (a head"
                " trained for the model), mtp (a layer of the model's checkpoint)."
            )
        ),
    ] = "off"


class FunctionConfig(Table, frozen=True, kw_only=True):
    name: Annotated[Name, Meta(description="Name of the function, served at /fn/NAME/.")]
    path: Annotated[str, Meta(description="Directory with a wrangler.toml or wrangler.jsonc.")]
    environment: Annotated[str | None, Meta(description="Environment of the manifest to use: an [env.NAME] table.")] = (
        None
    )
    layer: Annotated[
        str | None,
        Meta(
            description="Directory with the installed packages that the function imports; unset: the site installs them."
        ),
    ] = None


class R2StoreConfig(Table, frozen=True, kw_only=True):
    """An R2 bucket whose objects are stored at an S3 endpoint.
    The site has its credentials; functions never see them."""

    rules: ClassVar[Rules] = {"endpoint": is_http_place}

    endpoint: Annotated[str, Meta(description="URL of the S3 endpoint, such as https://s3.eu-west-1.amazonaws.com.")]
    region: Annotated[str, Meta(description="Region that signatures name.")] = "auto"
    bucket: Annotated[str | None, Meta(description="Name of the bucket at the endpoint, if it differs.")] = None
    path_style: Annotated[bool, Meta(description="Put the bucket in the path; false: in the host name.")] = True
    access_key_id_env: Annotated[str, Meta(description="Environment variable of the site with the access key id.")] = (
        "AWS_ACCESS_KEY_ID"
    )
    secret_access_key_env: Annotated[
        str, Meta(description="Environment variable of the site with the secret access key.")
    ] = "AWS_SECRET_ACCESS_KEY"
    session_token_env: Annotated[
        str, Meta(description="Environment variable of the site with the session token, if there is one.")
    ] = "AWS_SESSION_TOKEN"
    credentials_file: Annotated[
        str | None,
        Meta(description="File such as ~/.aws/credentials, read for each request. Replaces the environment."),
    ] = None
    profile: Annotated[str, Meta(description="Section of that file.")] = "default"


Shareable = Annotated[str, Meta(pattern=r"^(kv|d1|r2|queue|rate_limit|service|props|durable_object):.+\Z")]


class FunctionsConfig(Table, frozen=True, kw_only=True):
    """The functions of a site, and the limits of each."""

    rules: ClassVar[Rules] = {"deployments": is_http}

    serve: Annotated[tuple[FunctionConfig, ...], Meta(description="Functions from directories of this machine.")] = ()
    directory: Annotated[
        str | None, Meta(description="Directory of functions: each folder with a manifest is served.")
    ] = None
    deployments: Annotated[
        str | None,
        Meta(
            description=(
                "URL of the router whose deployed functions (`pilotlight deploy`) this site serves. The router also "
                "answers their calls of models that this site does not have."
            )
        ),
    ] = None
    state_dir: Annotated[
        str | None, Meta(description="Directory for the data of bindings; unset: ~/.local/state/pilotlight/SITE.")
    ] = None
    shared: Annotated[
        dict[Shareable, tuple[str, ...]],
        Meta(
            description=(
                "Resources that deployed functions may use although they belong to the site or to another function: "
                "KIND:ID (kv, d1, r2, queue, rate_limit; service, props and durable_object with a function's name) and "
                "the names of the functions, with *."
            )
        ),
    ] = msgspec.field(default_factory=dict)
    r2: Annotated[
        dict[str, R2StoreConfig],
        Meta(description="R2 buckets, by their names in manifests, whose objects are stored at an S3 endpoint."),
    ] = msgspec.field(default_factory=dict)
    min_tier: Annotated[
        Literal[1, 2, 3],
        Meta(
            description=(
                "Lowest isolation with which functions are served. 1: resource limits and no privileges; 2: namespaces, "
                "seccomp, Landlock; 3: one container for each function."
            )
        ),
    ] = 1
    oci_runtime: Annotated[
        str | None,
        Meta(
            description=(
                "Program that creates the containers of tier 3, such as `crun` or `runc`. The site must be started as "
                "root."
            )
        ),
    ] = None
    show_errors: Annotated[bool, Meta(description="Answer a failed request with its traceback.")] = False
    egress_allow: Annotated[
        tuple[str, ...],
        Meta(description="Hosts, or host:port, that functions may fetch although their address is not public."),
    ] = ()
    cpu_ms: Annotated[Count, Meta(description="CPU time of one request, if the manifest sets no lower limit.")] = 30_000
    wall_s: Annotated[Positive, Meta(description="Duration of one request, its stream included.")] = 300.0
    blocked_s: Annotated[
        Positive, Meta(description="Time for which an event loop may be blocked; then its process is ended.")
    ] = 10.0
    memory_mib: Annotated[
        int, Meta(ge=64, description="Memory of one process, of which Python itself takes 30 MiB.")
    ] = 256
    disk_mib: Annotated[Count, Meta(description="Scratch space of one process.")] = 64
    threads: Annotated[int, Meta(ge=4, description="Threads of one function.")] = 64
    open_files: Annotated[int, Meta(ge=32, description="File descriptors of one process.")] = 256
    subrequests: Annotated[Count, Meta(description="Binding calls and fetches of one request.")] = 1000
    request_mib: Annotated[Positive, Meta(description="Size of a request's body.")] = 100.0
    response_mib: Annotated[Positive, Meta(description="Size of a response's body.")] = 1024.0
    response_mib_per_s: Annotated[
        Positive, Meta(description="Rate of all response streams of one function together.")
    ] = 64.0
    concurrency: Annotated[
        Count, Meta(description="Open requests of one process; for more, another process is started.")
    ] = 64
    max_isolates: Annotated[Count, Meta(description="Processes of one function.")] = 4
    idle_s: Annotated[Positive, Meta(description="Time without a request after which a process is ended.")] = 60.0
    sockets: Annotated[
        int, Meta(ge=1, le=900, description="Open WebSockets of one process; for more, another process is started.")
    ] = 512
    socket_idle_s: Annotated[
        Positive, Meta(description="Time without a message after which a WebSocket is closed.")
    ] = 3600.0
    socket_message_mib: Annotated[
        float, Meta(gt=0, le=16, description="Size of one WebSocket message, in either direction.")
    ] = 1.0
    zygotes_mib: Annotated[
        int,
        Meta(ge=0, description="Memory for idle functions with their imports, from which new processes are forked."),
    ] = 1024

    logs_days: Annotated[
        NonNegative, Meta(description="for which invocations and their output are kept (`pilotlight logs`)")
    ] = 7.0
    logs_mib: Annotated[
        int,
        Meta(
            ge=0, description="of them; the function that takes the most room loses its oldest first. 0: none are kept"
        ),
    ] = 256
    history_days: Annotated[
        NonNegative,
        Meta(description="Time back to which D1 databases can be restored (`pilotlight d1 time-travel`). 0: none."),
    ] = 7.0
    layers_mib: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Disk space for installed packages that no function uses any more; the least recently used are deleted "
                "first."
            ),
        ),
    ] = 4096
    layers_days: Annotated[
        NonNegative, Meta(description="Age after which unused packages are deleted in any case.")
    ] = 30.0

    @property
    def are_served(self) -> bool:
        return bool(self.serve) or self.directory is not None or self.deployments is not None

    def agree(self) -> None:
        refuse_twice([function.name for function in self.serve], "function name")


class FinetunesConfig(Table, frozen=True, kw_only=True):
    """Adapters that accounts upload through Workers AI's /ai/finetunes, and their limits."""

    directory: Annotated[
        str | None,
        Meta(
            description="Directory for uploaded adapters; each site uses a subfolder with its name. Unset: uploads are refused."
        ),
    ] = None
    per_account: Annotated[Count, Meta(description="Adapters of one account, or of one unknown key.")] = 30
    max_rank: Annotated[int, Meta(ge=1, le=64, description="Highest rank of an uploaded adapter.")] = 32
    max_mib: Annotated[Positive, Meta(description="Size of one uploaded file.")] = 300.0


class CatalogueConfig(Table, frozen=True, kw_only=True):
    """Models that an operator can add while the site runs (the page, `pilotlight network run`)."""

    directories: Annotated[
        tuple[str, ...],
        Meta(
            description="Directories of checkpoints and GGUF files that the catalogue offers, beside what is downloaded."
        ),
    ] = ("~/models",)
    state_dir: Annotated[
        str | None,
        Meta(description="Directory where added models are remembered; unset: ~/.local/state/pilotlight/SITE."),
    ] = None


class LimitsConfig(Table, frozen=True, kw_only=True):
    max_body_mib: Annotated[Positive, Meta(description="Size of a request's body.")] = 8.0
    strict_fields: Annotated[
        bool, Meta(description="Refuse requests with unknown fields; false: list these in the header x-ignored-fields.")
    ] = False
    max_waking: Annotated[
        Count, Meta(description="Requests that may wait for one model to wake; further ones are refused with 503.")
    ] = 128
    max_inflight: Annotated[Count, Meta(description="Requests in progress; further ones are refused with 503.")] = 256
    request_timeout_s: Annotated[
        Positive, Meta(description="Duration after which a request is ended with an error.")
    ] = 600.0
    continue_within_s: Annotated[
        Positive,
        Meta(
            description=(
                "Time in which an answer must continue on another engine host after its host died; then it ends with an "
                "error."
            )
        ),
    ] = 9.0
    drain_timeout_s: Annotated[NonNegative, Meta(description="Time that open streams have after SIGTERM.")] = 30.0
    heartbeat_s: Annotated[
        Positive, Meta(description="Silence after which a stream gets a comment, so that proxies keep the connection.")
    ] = 10.0


class SiteListenConfig(ListenConfig, frozen=True, kw_only=True):
    require_hop: Annotated[
        bool, Meta(description="Answer only requests that a router of the network has signed (PILOTLIGHT_HOP_SECRET).")
    ] = False


class SiteConfig(Table, frozen=True, kw_only=True):
    """One location: a runtime, its engine hosts, its models and functions."""

    name: Annotated[Name, Meta(description="Name of the site: an airport code and a number, such as ams1.")]
    place: Annotated[PlaceConfig, Meta(description="Where the site is.")]
    listen: Annotated[SiteListenConfig, Meta(description="Address of the site's HTTP server.")]
    hop: Annotated[HopConfig, Meta(description="What the site and its routers know each other by.")] = HopConfig()
    door: Annotated[AccessConfig, Meta(description="Which clients are served.")] = AccessConfig()
    accounts: Annotated[tuple[AccountConfig, ...], Meta(description="Accounts and the models that they may use.")] = ()
    keys: Annotated[
        tuple[KeyConfig, ...], Meta(description="API keys, by their digests (`pilotlight keys create`).")
    ] = ()
    engine: Annotated[EngineConfig, Meta(description="Devices, KV cache and weights.")] = EngineConfig()
    models: Annotated[
        tuple[ModelConfig, ...], Meta(description="Models that the site serves; without any, it serves functions only.")
    ] = ()
    functions: Annotated[FunctionsConfig, Meta(description="Functions that the site serves, and their limits.")] = (
        msgspec.field(default_factory=FunctionsConfig)
    )
    catalogue: Annotated[CatalogueConfig, Meta(description="Models that an operator can add while the site runs.")] = (
        CatalogueConfig()
    )
    images: Annotated[ImagesConfig, Meta(description="Images in requests.")] = ImagesConfig()
    finetunes: Annotated[FinetunesConfig, Meta(description="Adapters that accounts upload.")] = FinetunesConfig()
    responses: Annotated[ResponsesConfig, Meta(description="Stored responses (POST /v1/responses).")] = (
        ResponsesConfig()
    )
    limits: Annotated[LimitsConfig, Meta(description="Limits of requests.")] = LimitsConfig()
    telemetry: Annotated[TelemetryConfig, Meta(description="Logs and traces.")] = TelemetryConfig()

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
        if any(lender.site == self.name for lender in self.engine.lenders):
            raise ValueError(f"engine.lenders names {self.name!r}, which is this site: remove it")
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
