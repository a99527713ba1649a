"""The reader of configuration files, and the tables that a site's and a router's have in common.

`parse` is the only way to a table. An unknown key, a wrong type or a missing value stops the start with a sentence that names the file, the key and
the nearest valid one (invariant I7). Types are taken as they are written: an integer may stand for a float, and nothing else for anything else.
Refuses to know what the files themselves hold (site.py, network.py).
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from pilotlight.sites.accounts import refuse_tenants
from pilotlight.sites.rules import are_host_names, are_origins, is_http, is_loopback
from pilotlight.sites.table import Rules, Table

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]

MIN_SECRET_BYTES = 16
SERVER_ENV = "PILOTLIGHT_SERVER"  # instead of `server` under [door]
ROUTER_STATE_ENV = "PILOTLIGHT_ROUTER_STATE"


class ConfigError(ValueError):
    """A configuration file cannot be used; the message says which, where and what to change."""


TableT = TypeVar("TableT", bound=Table)


def parse(table: type[TableT], values: dict[str, Any], origin: str) -> TableT:
    """Convert a file's values to its table. Raises ConfigError with one line per error; `origin` is the file's name for the message."""
    if (change := refuse_tenants(values)) is not None:
        raise ConfigError(f"{origin}: {change}")
    try:
        return msgspec.convert(values, table)
    except msgspec.ValidationError:
        from pilotlight.sites.validation_errors import sentences  # here, since a good file does without

        raise ConfigError("\n".join(f"{origin}: {sentence}" for sentence in sentences(table, values))) from None


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


class PlaceConfig(Table, frozen=True, kw_only=True):
    """The place where a router or site stands; routers seed round-trip times from the coordinates."""

    city: str
    latitude: Annotated[float, Meta(ge=-90, le=90, description="degrees, north positive")]
    longitude: Annotated[float, Meta(ge=-180, le=180, description="degrees, east positive")]


class ListenConfig(Table, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any free port")]
    tls_certificate: Annotated[
        str | None,
        Meta(
            description="PEM file with the chain, leaf first; with tls_key, the process speaks HTTPS. Read again when it changes"
        ),
    ] = None
    tls_key: Annotated[str | None, Meta(description="PEM file with its private key")] = None

    def agree(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")


class HopConfig(Table, frozen=True, kw_only=True):
    """The way between routers and sites."""

    authority: Annotated[
        str | None,
        Meta(
            description="PEM file of the authority that has signed the network's certificates (`pilotlight network init` makes one), trusted "
            "beside the system's where a router or site is asked by https"
        ),
    ] = None
    secret_file: Annotated[
        str | None,
        Meta(
            description="file with the network's secret, where PILOTLIGHT_HOP_SECRET is unset. Two with a comma between them, while one replaces "
            "the other: the first signs, both are believed"
        ),
    ] = None

    def secret(self) -> str:
        """Return what the file says; empty: none is named. Raises ConfigError."""
        if self.secret_file is None:
            return ""
        try:
            return Path(self.secret_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hop.secret_file {self.secret_file} cannot be read: {error}") from None


class AccessConfig(Table, frozen=True, kw_only=True):
    """Keys and strangers: the clients that may come in."""

    require_key: Annotated[
        bool, Meta(description="serve only clients with a key that this file knows; functions judge for themselves")
    ] = False
    open_to_all: Annotated[
        bool,
        Meta(description="serve whoever comes: from beyond this machine without a key, on it by whatever host name"),
    ] = False
    hosts: Annotated[
        tuple[str, ...],
        Meta(description="host names, without ports, that a listener on 127.0.0.1 answers to beside local ones"),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description='whose pages may read answers, as https://app.example.com; "*": all. Pages of localhost may use the API'
        ),
    ] = ()
    server: Annotated[
        Literal["own", "hypercorn", "uvicorn"],
        Meta(description="what speaks HTTP; a limit of connections, heads or unread answers is the own server's alone"),
    ] = "own"
    http2: Annotated[
        bool,
        Meta(
            description="speak HTTP/2 too, by Hypercorn: behind a front that limits how many frames a client sends, not to strangers"
        ),
    ] = False

    rules: ClassVar[Rules] = {"hosts": are_host_names, "cors_origins": are_origins}

    @property
    def server_name(self) -> str:
        """The environment's, or else the file's."""
        return os.environ.get(SERVER_ENV) or ("hypercorn" if self.http2 else self.server)

    def agree(self) -> None:
        if self.http2 and self.server == "uvicorn":
            raise ValueError('uvicorn speaks no HTTP/2: write server = "hypercorn", or leave http2 out')


class TelemetryConfig(Table, frozen=True, kw_only=True):
    """Logs, and traces of requests, without anything of their prompts and answers."""

    log_format: Annotated[
        Literal["text", "json"], Meta(description="of the log's lines, on standard error; json: an object each")
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="the least of what is logged")
    ] = "info"
    access_log: Annotated[
        bool, Meta(description="log a line for each request that has ended, probes of health and status excepted")
    ] = False

    otlp: Annotated[
        str | None,
        Meta(
            description="URL of a collector that takes OTLP over HTTP, as http://127.0.0.1:4318, for traces, which need the packages of "
            "pilotlight[telemetry]; unset: no traces"
        ),
    ] = None

    def agree(self) -> None:
        if self.otlp is not None:
            is_http(self.otlp)
            msgspec.structs.force_setattr(self, "otlp", self.otlp.rstrip("/"))


class ResponsesConfig(Table, frozen=True, kw_only=True):
    """Responses (POST /v1/responses) that are kept on this process's disk, for the clients that ask it: a router's, or a site's without one."""

    directory: Annotated[
        str | None,
        Meta(description="of this process alone; unset: in ~/.local/state/pilotlight/SITE, or router-PORT"),
    ] = None
    max_gib: Annotated[
        NonNegative,
        Meta(description="of all; then the oldest of the account that has most are deleted. 0: none is kept"),
    ] = 1.0
    keep_days: Annotated[Positive, Meta(description="after which they are deleted")] = 30.0

    def file_of(self, name: str) -> Path:
        """Return the file of a process with that name."""
        found = state_directory(name) if self.directory is None else Path(self.directory).expanduser()
        return found / "responses.sqlite"


def state_directory(name: str) -> Path:
    """Return where a site, or a router, of that name keeps what outlives it, unless its file says otherwise."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "pilotlight" / name


def router_state_directory() -> Path:
    """Return where a router keeps deployed functions: their versions, their bundles and their shares of traffic."""
    given = os.environ.get(ROUTER_STATE_ENV)
    return Path(given).expanduser() if given else state_directory("router")


def check_secrets(*names: str) -> None:
    """Raise ConfigError for an environment variable that could be guessed. Unset ones are none."""
    for name in names:
        if any(
            len(each.encode()) < MIN_SECRET_BYTES
            for each in os.environ.get(name, "").split(",")
            if os.environ.get(name)
        ):
            raise ConfigError(
                f"{name} is shorter than {MIN_SECRET_BYTES} bytes: set it to, say, what `openssl rand -hex 32` prints"
            )


def check_access(host: str, door: AccessConfig, num_keys: int, *, requires_hop: bool = False) -> None:
    """Raise ValueError where everybody could come in and the file does not say that they may, or where nobody could."""
    if door.require_key and not num_keys:
        raise ValueError("door.require_key is true and there are no [[keys]]: `pilotlight keys create` makes one")
    if not (is_loopback(host) or door.require_key or door.open_to_all or requires_hop):
        raise ValueError(
            f"listen.host {host!r} can be reached from other machines: write require_key = true under [door], with keys of "
            "`pilotlight keys create`, or open_to_all = true there to serve whoever comes"
        )
