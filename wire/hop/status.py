"""SiteStatus: what a site publishes at /status, and all a router may know of it.
Also the process table that `pilotlight status` prints.

Rates are tokens per second, times are milliseconds, counts are current values unless called counters.
"""

from typing import Literal

import msgspec

# failed: its last wake failed a short while ago. Later it has its place again, and may be requested again.
Residency = Literal["device", "host", "disk", "loading", "failed"]


class Place(msgspec.Struct, frozen=True):
    """The location of a site or a router."""

    city: str
    latitude: float  # degrees, north positive
    longitude: float  # degrees, east positive


class ModelStatus(msgspec.Struct, frozen=True):
    name: str
    residency: Residency
    loaded: float = 0.0  # share of the weights read so far, 0 to 1
    context_length: int = 0  # tokens
    running: int = 0  # sequences
    waiting: int = 0
    queued_tokens: int = 0  # prompt tokens accepted and not yet computed, on the device where they are fewest
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    prefill_tokens_per_s: float = 0.0  # rate of one device; 0 if not measured yet
    decode_tokens_per_s: float = 0.0  # of one sequence
    wake_ms: float = 0.0  # measured time to wake it from its present place (if awake: the last time), without waiting for room; 0 if not measured
    detail: str = ""  # why it failed, or how far it has loaded
    aliases: tuple[str, ...] = ()  # further names that requests may use
    weights_bytes: int = 0  # bytes while awake; an estimate until the first wake
    wakes: int = 0  # since the site's start (counter)
    evictions: int = 0  # put to sleep since then, for another's sake or for being idle (counter)
    copies: int = 0  # devices on which it is awake
    is_added: bool = False  # by an operator, while the site ran: it can be removed
    in_host_memory: bool = False  # its weights are in host memory, awake or not: it wakes fastest from there
    arriving_per_s: float = 0.0  # requests, a moving average
    arriving_tokens_per_s: float = 0.0  # prompt tokens that had to be computed, likewise
    prompt_tokens: int = 0  # of prompts that were computed or found, since the site's start (counter)
    cached_tokens: int = 0  # of these, found in the prefix cache (counter)
    kv_store: str = ""  # the KV store of its prefix cache, by the name that all members know; "" if none answers
    kv_store_tokens_per_s: float = 0.0  # rate of prompts read from the store; 0 if not measured yet
    prefixes: bytes = (
        b""  # digest of its cached prefixes (wire/hop/prefixes.py); in an incremental status, those that were added
    )
    prefixes_dropped: bytes = b""  # in an incremental status: the prefixes that were removed
    prefixes_complete: bool = False  # nothing that routers named to the site is cached and left out


class ProcessStatus(msgspec.Struct, frozen=True):
    """One operating-system process of a deployment."""

    role: Literal["router", "site", "engine", "standby"]
    pid: int
    site: str | None = None
    url: str | None = None
    device: str | None = None  # an engine host's
    computes: Literal["prefill", "decode", "both"] | None = None  # an engine host's role at present


class FunctionStatus(msgspec.Struct, frozen=True):
    name: str
    isolates: int = 0  # processes now; 0 if asleep
    inflight: int = 0
    started: int = 0  # counter: processes since the site's start
    sockets: int = 0  # WebSockets that are open
    asked: int = 0  # counter: requests, WebSockets and calls of crons and queues since the site's start
    failed: int = 0  # counter: of these, requests that the isolate did not answer


class FunctionsStatus(msgspec.Struct, frozen=True):
    isolation_tier: int  # the reached tier; 0 if functions are not served
    why_not_more: str = ""
    functions: tuple[FunctionStatus, ...] = ()
    takes_deployed: bool = False  # it also serves functions deployed at a router


class LenderStatus(msgspec.Struct, frozen=True):
    """A site that may compute prompts for this one."""

    site: str
    why_not: str = ""  # it would compute none now
    rtt_ms: float = 0.0
    mbit_per_s: float = 0.0  # the link's measured rate, by blocks and probes; 0 if not measured yet
    borrowed: int = 0  # counter: prompts that the other site accepted
    declined: int = 0  # counter: prompts that it was asked for and has not


class SiteStatus(msgspec.Struct, frozen=True):
    site: str
    version: str  # of the software
    place: Place
    sequence: int  # grows with every publication of one process's life: a router ignores an older one
    ready: bool
    draining: bool
    inflight: int  # requests holding a permit
    max_inflight: int
    models: tuple[ModelStatus, ...]
    processes: tuple[ProcessStatus, ...]
    functions: FunctionsStatus | None = None  # None if the site has no functions
    uptime_s: float = 0.0
    digests: int = 0  # the revision of its models' prefixes, which changes with them; 0 if it is not counted
    digests_since: int = 0  # the models' prefixes are changes since that edition; 0 if they are complete
    finetunes: str | None = (
        None  # a word that changes with every change of uploaded adapters; None if the site accepts no uploads
    )
    lenders: tuple[LenderStatus, ...] = ()
    fallbacks: tuple[
        str, ...
    ] = ()  # operations that its engine hosts compute more slowly than the machine could, one sentence each


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
