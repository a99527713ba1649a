"""SiteStatus: what a site publishes at /status, and all a router may know of it.
Also the process table that `pilotlight status` prints.

Rates are tokens per second, times are milliseconds, counts are current values unless called counters.
"""

from typing import Literal

import msgspec

# failed: a recent wake failed. After a while it is "disk" or "host" again, and may be requested again.
Residency = Literal["device", "host", "disk", "loading", "failed"]


class Place(msgspec.Struct, frozen=True):
    """The location of a site or a router."""

    city: str
    latitude: float  # degrees, north positive
    longitude: float  # degrees, east positive


class ModelStatus(msgspec.Struct, frozen=True):
    name: str
    residency: Residency
    loaded: float = 0.0  # share of the weights that is read, from 0 to 1
    context_length: int = 0  # tokens
    running: int = 0  # sequences
    waiting: int = 0
    queued_tokens: int = 0  # prompt tokens accepted and not yet computed, on the device with the fewest
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    prefill_tokens_per_s: float = 0.0  # rate of one device; 0 if not measured yet
    decode_tokens_per_s: float = 0.0  # rate of one sequence
    # measured time to wake it from its current residency, without waits for memory; while it is awake, that of the last wake; 0 if not measured
    wake_ms: float = 0.0
    detail: str = ""  # why it failed, or how far it is loaded
    aliases: tuple[str, ...] = ()  # further names that requests may use
    weights_bytes: int = 0  # bytes while awake; an estimate until the first wake
    wakes: int = 0  # times that it woke since the site's start (counter)
    evictions: int = 0  # times that it was put to sleep, for another model or because it was idle (counter)
    copies: int = 0  # devices on which it is awake
    is_added: bool = False  # an operator added it while the site ran, so it can be removed
    # its weights are in host memory, whether it is awake or not: it wakes fastest from there
    in_host_memory: bool = False
    arriving_per_s: float = 0.0  # requests per second, a moving average
    arriving_tokens_per_s: float = 0.0  # prompt tokens per second that had to be computed, a moving average
    prompt_tokens: int = 0  # tokens of all prompts since the site's start (counter)
    cached_tokens: int = 0  # prompt tokens found in the prefix cache (counter)
    kv_store: str = ""  # name of the KV store that its prefix cache shares with other sites; "" if none answers
    kv_store_tokens_per_s: float = 0.0  # rate at which prompts are read from the store; 0 if not measured yet
    # digest of its cached prefixes (wire/hop/prefixes.py); in an incremental status, those that were added
    prefixes: bytes = b""
    prefixes_dropped: bytes = b""  # in an incremental status: the prefixes that were removed
    prefixes_complete: bool = False  # the digest has all cached prefixes that routers have named to the site


class ProcessStatus(msgspec.Struct, frozen=True):
    """One operating-system process of a deployment."""

    role: Literal["router", "site", "engine", "standby"]
    pid: int
    site: str | None = None
    url: str | None = None
    device: str | None = None  # device of an engine host
    computes: Literal["prefill", "decode", "both"] | None = None  # current role of an engine host


class FunctionStatus(msgspec.Struct, frozen=True):
    name: str
    isolates: int = 0  # current processes; 0 if asleep
    inflight: int = 0
    started: int = 0  # processes started since the site's start (counter)
    sockets: int = 0  # open WebSockets
    asked: int = 0  # requests, WebSockets and calls of crons and queues since the site's start (counter)
    failed: int = 0  # requests that the isolate did not answer (counter)


class FunctionsStatus(msgspec.Struct, frozen=True):
    isolation_tier: int  # the isolation tier in use; 0 if functions are not served
    why_not_more: str = ""
    functions: tuple[FunctionStatus, ...] = ()
    takes_deployed: bool = False  # it also serves functions deployed at a router


class SiteStatus(msgspec.Struct, frozen=True):
    site: str
    version: str  # version of Pilotlight
    place: Place
    sequence: int  # number of this publication in the life of its process; routers ignore older ones
    ready: bool
    draining: bool
    inflight: int  # requests that hold a permit
    max_inflight: int
    models: tuple[ModelStatus, ...]
    processes: tuple[ProcessStatus, ...]
    functions: FunctionsStatus | None = None  # None if the site has no functions
    uptime_s: float = 0.0
    digests: int = 0  # revision of its models' prefixes, which changes with them; 0 if it is not counted
    digests_since: int = 0  # the models' prefixes are changes since this revision; 0 if they are complete
    finetunes: str | None = None  # changes whenever uploaded adapters change; None if the site accepts no uploads
    fallbacks: tuple[
        str, ...
    ] = ()  # operations that its engine hosts compute more slowly than the machine allows, a sentence each


class RouterStatus(msgspec.Struct, frozen=True):
    """The status that a router publishes at /status."""

    version: str
    place: Place
    process: ProcessStatus
    sites: tuple["SiteView", ...]


class SiteView(msgspec.Struct, frozen=True):
    """A site as a router sees it now."""

    site: str
    url: str
    state: Literal["unknown", "healthy", "unhealthy", "draining"]
    rtt_ms: float
    inflight: int  # this router's requests in progress there
    status: SiteStatus | None = None


_status_decoder = msgspec.json.Decoder(SiteStatus)


def encode_status(status: SiteStatus | RouterStatus) -> bytes:
    return msgspec.json.encode(status)


def decode_status(body: bytes) -> SiteStatus:
    """Decode a status.
    Raises msgspec.ValidationError or msgspec.DecodeError on anything that is not a SiteStatus."""
    return _status_decoder.decode(body)
