"""What an operator asks of a site: its catalogue of models, and operations on them. Signed hops, or an admin key at the site itself.

GET CATALOGUE_PATH returns a Catalogue, POST OPERATION_PATH takes an Operation and returns 202 when it has started.
"""

from typing import Literal

import msgspec

CATALOGUE_PATH = "/internal/catalogue"
OPERATION_PATH = "/internal/operation"

ModelKind = Literal["embedded", "package", "directory", "gguf", "packed", "hub"]
Residency = Literal["auto", "host", "disk"]


class Fit(msgspec.Struct, frozen=True):
    """What a plan says of a model on a site's devices, without running it."""

    fits: bool
    reason: str
    devices: str = ""  # as 2xh100
    dtype: str = ""  # in which it computes
    weights_bytes: int = 0
    kv_tokens: int = 0  # that fit beside the weights, of all sequences together
    tokens_per_s: float = 0.0  # predicted, of all sequences together
    batch: int = 0  # sequences of that prediction
    first_token_ms: float = 0.0  # predicted, of a prompt of `prompt_tokens`
    prompt_tokens: int = 0


class CatalogueModel(msgspec.Struct, frozen=True):
    """A model that a site could serve, or serves."""

    source: str  # as a site's file names it
    name: str  # that requests would use
    kind: ModelKind
    is_here: bool  # its files are on the site's machine
    how: str = ""  # what makes it available where it is not here
    file_bytes: int = 0
    context_length: int = 0  # tokens; 0: not known before it is here
    architecture: str = ""
    license: str = ""  # as its files state it; empty: they state none
    served_as: tuple[str, ...] = ()  # names of models that the site serves from this source
    fit: Fit | None = None  # None: not known before it is here


class Download(msgspec.Struct, frozen=True):
    """A download under way, or the last one of its source."""

    source: str
    state: Literal["running", "done", "failed", "cancelled"]
    done_bytes: int = 0
    total_bytes: int = 0  # 0: not known yet
    error: str = ""


class Catalogue(msgspec.Struct, frozen=True):
    models: tuple[CatalogueModel, ...] = ()
    downloads: tuple[Download, ...] = ()


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation of an operator. `model` is for wake, sleep and remove; `source` for pull, cancel and run, which reads the rest too."""

    action: Literal["wake", "sleep", "drain", "resume", "pull", "cancel", "run", "remove"]
    model: str = ""  # run: the name that requests use; empty: the source's own
    source: str = ""
    residency: Residency = "auto"
    lossless: Literal["auto", "off", "always"] = "auto"
    kv_dtype: Literal["auto", "fp8"] = "auto"
    context_tokens: int | None = None
    sleep_after_s: float | None = None
