"""Messages of routers to sites beside clients' requests, signed as hops.

POST WAKE_PATH hints that requests for a sleeping model arrive. For operators: GET CATALOGUE_PATH returns models; POST OPERATION_PATH returns 202 when
the operation has started; GET REQUESTS_PATH returns the newest generations; POST HUB_PATH searches the hub from the site's machine. GET STORES_PATH
lists the databases and key-value namespaces of a site's functions, and POST reads a page of one.
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
    model: str  # the model's own name, not an alias
    residency: Residency  # current state; "loading" if this hint or an earlier request started the wake


class Fit(msgspec.Struct, frozen=True):
    """The plan of a model on a site's devices."""

    fits: bool
    reason: str
    devices: str = ""  # for example 2xh100
    dtype: str = ""  # data type of its computations
    weights_bytes: int = 0
    kv_tokens: int = 0  # tokens of KV cache that fit in addition to the weights
    tokens_per_s: float = 0.0  # predicted rate of all sequences together
    batch: int = 0  # sequences that the predicted rate assumes
    first_token_ms: float = 0.0  # predicted for a prompt of `prompt_tokens`
    prompt_tokens: int = 0


class CatalogueModel(msgspec.Struct, frozen=True):
    """A model that a site could serve, or serves."""

    source: str  # the model as named in a site's file
    name: str  # name in requests
    kind: ModelKind
    is_here: bool  # its files are on the site's machine
    how: str = ""  # how to get the files if they are not here
    file_bytes: int = 0
    context_length: int = 0  # tokens; 0 if unknown before the download
    architecture: str = ""
    license: str = ""  # license according to its files; empty if they name none
    served_as: tuple[str, ...] = ()  # names of models that the site serves from this source
    fit: Fit | None = None  # None if unknown before its files are here


class HubQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    words: Annotated[str, Meta(min_length=1, max_length=200)]


class HubModel(msgspec.Struct, frozen=True):
    """A model found at the hub."""

    source: str  # ORG/NAME
    architecture: str = ""  # supported architecture of its config.json; empty if there is none
    parameters: int = 0  # 0 if the hub does not publish it
    license: str = ""
    downloads: int = 0  # downloads of the last 30 days, as the hub counts them
    is_gated: bool = False  # its terms must be accepted at the hub first


class Download(msgspec.Struct, frozen=True):
    """A download in progress, or the latest one of its source."""

    source: str
    state: Literal["running", "done", "failed", "cancelled"]
    done_bytes: int = 0
    total_bytes: int = 0  # 0 if not known yet
    error: str = ""


class DeviceReading(msgspec.Struct, frozen=True):
    """A device's current state; 0 if the device does not report a value."""

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
    `model` is for wake, sleep and remove; `source` is for pull, cancel and run; the other fields are for run."""

    action: Literal["wake", "sleep", "drain", "resume", "pull", "cancel", "run", "remove"]
    model: str = ""  # for `run`: the name in requests; empty for the source's own name
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
    at_s: float  # start, in seconds since the epoch
    wake_ms: float  # wait until the model was awake
    admission_ms: float  # time from admission until the engine has the rendered and tokenised prompt
    queue_ms: float  # wait until the sequence's first step
    prefill_ms: float  # time from the first step to the first token
    decode_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str  # a finish reason or an error code


class FunctionStore(msgspec.Struct, frozen=True):
    kind: StoreKind
    name: str  # name of its directory: the id in wrangler.toml, or one derived from it
    owner: str  # the function that owns it; `@site` for the functions of the site's file
    bytes: int


class StoreQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query for a page of a database's table, or of a namespace's keys in order."""

    kind: StoreKind
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    table: Annotated[str, Meta(max_length=1000)] = ""  # empty for the first table
    prefix: Annotated[str, Meta(max_length=512)] = ""  # beginning of the keys
    after: Annotated[str, Meta(max_length=512)] = ""  # `next` of the previous page
    limit: Annotated[int, Meta(ge=1, le=MAX_STORE_ROWS)] = 50


class StorePage(msgspec.Struct, frozen=True):
    """Rows as texts, each cut if it is too long. None is SQL's NULL."""

    tables: tuple[str, ...]  # all tables of the database
    table: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    next: str = ""  # empty on the last page
