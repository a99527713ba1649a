"""Messages of routers to sites beside clients' requests, signed as hops.

POST WAKE_PATH hints that a request for a model is on its way. For operators: GET CATALOGUE_PATH, POST OPERATION_PATH, which returns 202 when the
operation has started, GET REQUESTS_PATH, the newest generations, and POST HUB_PATH, which searches the hub from the site's machine.
GET STORES_PATH lists the databases and key-value namespaces of a site's functions, POST reads a page of one.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pilotlight.wire.hop.status import Residency

WAKE_PATH = "/internal/wake"
CATALOGUE_PATH = "/internal/catalogue"
OPERATION_PATH = "/internal/operation"
REQUESTS_PATH = "/internal/requests"
HUB_PATH = "/internal/hub"
STORES_PATH = "/internal/functions/stores"
MAX_STORE_ROWS = 200

ModelKind = Literal["embedded", "package", "directory", "gguf", "packed", "hub"]
SleepsOn = Literal["auto", "host", "disk"]
StoreKind = Literal["d1", "kv"]


class WakeHint(msgspec.Struct, frozen=True):
    model: str


class WakeAnswer(msgspec.Struct, frozen=True):
    model: str  # its own name
    residency: Residency  # the present state: "loading" if this hint or an earlier request started its wake


class Fit(msgspec.Struct, frozen=True):
    """The plan of a model on a site's devices."""

    fits: bool
    reason: str
    devices: str = ""  # as 2xh100
    dtype: str = ""  # type in which it computes
    weights_bytes: int = 0
    kv_tokens: int = 0  # tokens of all sequences that fit beside the weights
    tokens_per_s: float = 0.0  # predicted, of all sequences together
    batch: int = 0  # sequences of that prediction
    first_token_ms: float = 0.0  # predicted, of a prompt of `prompt_tokens`
    prompt_tokens: int = 0


class CatalogueModel(msgspec.Struct, frozen=True):
    """A model that a site could serve, or serves."""

    source: str  # as a site's file names it
    name: str  # name for requests
    kind: ModelKind
    is_here: bool  # its files are on the site's machine
    how: str = ""  # how to get it, if it is not here
    file_bytes: int = 0
    context_length: int = 0  # tokens; 0 if unknown before the download
    architecture: str = ""
    license: str = ""  # license as its files state it; empty if they state none
    served_as: tuple[str, ...] = ()  # names of models that the site serves from this source
    fit: Fit | None = None  # None if unknown before its files are here


class HubQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    words: Annotated[str, Meta(min_length=1, max_length=200)]


class HubModel(msgspec.Struct, frozen=True):
    """A model that the hub has found."""

    source: str  # ORG/NAME
    architecture: str = ""  # the supported one that its config.json names; empty: none
    parameters: int = 0  # 0: the hub does not know
    license: str = ""
    downloads: int = 0  # of the last 30 days, as the hub counts them
    is_gated: bool = False  # its terms must be accepted at the hub first


class Download(msgspec.Struct, frozen=True):
    """A download in progress, or the last one of its source."""

    source: str
    state: Literal["running", "done", "failed", "cancelled"]
    done_bytes: int = 0
    total_bytes: int = 0  # 0: not known yet
    error: str = ""


class DeviceReading(msgspec.Struct, frozen=True):
    """A device's state now; 0: it does not say."""

    name: str
    used_bytes: int = 0
    total_bytes: int = 0
    power_w: float = 0.0
    celsius: float = 0.0


class Catalogue(msgspec.Struct, frozen=True):
    models: tuple[CatalogueModel, ...] = ()
    downloads: tuple[Download, ...] = ()
    devices: tuple[DeviceReading, ...] = ()


class SiteOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation of an operator.
    `model` is for wake, sleep and remove; `source` for pull, cancel and run, which reads the rest too."""

    action: Literal["wake", "sleep", "drain", "resume", "pull", "cancel", "run", "remove"]
    model: str = ""  # for `run`: the name in requests; empty for the source's own
    source: str = ""
    residency: SleepsOn = "auto"
    lossless: Literal["auto", "off", "always"] = "auto"
    kv_dtype: Literal["auto", "fp8"] = "auto"
    context_tokens: int | None = None
    sleep_after_s: float | None = None
    max_devices: int | None = None


class GenerationTimes(msgspec.Struct, frozen=True):
    """The phases of a generation at its site, in ms."""

    request_id: str
    model: str
    at_s: float  # of its beginning, since the epoch
    wake_ms: float  # until the model was awake
    admission_ms: float  # time from admission until the engine had the prompt, rendered and tokenised
    queue_ms: float  # until its first step
    prefill_ms: float  # until its first token
    decode_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str  # a finish reason, or an error's word


class FunctionStore(msgspec.Struct, frozen=True):
    kind: StoreKind
    name: str  # of its directory: the id in wrangler.toml, or one made of it
    owner: str  # the function whose it is; `@site` if it belongs to the functions of the site's file
    bytes: int


class StoreQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of a database's table, or of a namespace's keys in their order."""

    kind: StoreKind
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    table: Annotated[str, Meta(max_length=1000)] = ""  # empty: the first of the database
    prefix: Annotated[str, Meta(max_length=512)] = ""  # of the keys
    after: Annotated[str, Meta(max_length=512)] = ""  # `next` of the page before
    limit: Annotated[int, Meta(ge=1, le=MAX_STORE_ROWS)] = 50


class StorePage(msgspec.Struct, frozen=True):
    """Rows as texts, each cut where it is long. None is SQL's NULL."""

    tables: tuple[str, ...]  # of the database
    table: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    next: str = ""  # empty: nothing follows
