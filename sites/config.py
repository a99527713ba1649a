"""Read configuration files, and define the tables that sites and routers share.

Only `parse` creates tables. An unknown key, a wrong type or a missing value stops the start with a sentence that names the file, the key and the
valid keys. Types are not converted, except integers to floats. The files' own tables are in site.py and network.py.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from pilotlight.sites.rules import are_host_names, are_origins, is_http, is_loopback
from pilotlight.sites.table import Rules, Table

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]

MIN_SECRET_BYTES = 16
SERVER_ENV = "PILOTLIGHT_SERVER"  # overrides `server` under [door]
ROUTER_STATE_ENV = "PILOTLIGHT_ROUTER_STATE"


class ConfigError(ValueError):
    """A configuration file is invalid. The message names the file, the key and the change to make."""


TableT = TypeVar("TableT", bound=Table)


def parse(table: type[TableT], values: dict[str, Any], origin: str) -> TableT:
    """Convert a file's values to its table; `origin` is the file's name for messages.
    Raises ConfigError with one line per error."""
    try:
        return msgspec.convert(values, table)
    except msgspec.ValidationError:
        from pilotlight.sites.validation_errors import sentences  # imported here because a valid file does not need it

        raise ConfigError("\n".join(f"{origin}: {sentence}" for sentence in sentences(table, values))) from None


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


class PlaceConfig(Table, frozen=True, kw_only=True):
    """Location of a router or site.
    Routers estimate round-trip times from the coordinates until they have measured some."""

    city: str
    """City, as shown on the map."""
    latitude: Annotated[float, Meta(ge=-90, le=90)]
    """Degrees, north positive."""
    longitude: Annotated[float, Meta(ge=-180, le=180)]
    """Degrees, east positive."""


class ListenConfig(Table, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs require_key, require_hop or open_to_all."""
    port: Annotated[int, Meta(ge=0, le=65535)]
    """TCP port; 0: any free port."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain, leaf first. With tls_key it makes the process serve HTTPS. It is read again when it changes."""
    tls_key: str | None = None
    """PEM file with the private key."""

    def url(self, port: int | None = None) -> str:
        """Return the URL of the listener; `port` overrides that of the file."""
        scheme, host = "http" if self.tls_certificate is None else "https", self.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port if port is None else port}"

    def agree(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")


class HopConfig(Table, frozen=True, kw_only=True):
    """Authentication between the routers and sites of a network."""

    authority: str | None = None
    """PEM file of the authority that signs the network's certificates (`pilotlight network init` makes one). Connections between routers and sites
    trust it besides the system's authorities."""
    secret_file: str | None = None
    """File with the network's secret, read if PILOTLIGHT_HOP_SECRET is unset. While the secret is rotated the file holds two, separated by a comma:
    the first signs, both are accepted."""

    def secret(self) -> str:
        """Return the secret of the file; empty if no file is set. Raises ConfigError."""
        if self.secret_file is None:
            return ""
        try:
            secret = Path(self.secret_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hop.secret_file {self.secret_file} cannot be read: {error}") from None
        _check_secret(f"the secret in hop.secret_file {self.secret_file}", secret)
        return secret


class AccessConfig(Table, frozen=True, kw_only=True):
    """Rules for the clients that are served."""

    require_key: bool = False
    """Serve only clients with a key of this file. Functions authenticate their clients themselves."""
    open_to_all: bool = False
    """Serve every client: from other machines without a key, and on this machine under any host name."""
    hosts: tuple[str, ...] = ()
    """Host names, without ports, that a listener on 127.0.0.1 accepts besides local names."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use the API, such as https://app.example.com; "*": all. Pages of localhost and installed apps always may."""
    server: Literal["own", "hypercorn"] = "own"
    """HTTP server. Limits of connections, request heads and unread responses only work with "own"."""
    http2: bool = False
    """Also serve HTTP/2, through Hypercorn. Use it only with trusted clients, or with a proxy in front that limits their frames."""

    rules: ClassVar[Rules] = {"hosts": are_host_names, "cors_origins": are_origins}

    @property
    def server_name(self) -> str:
        """Name of the HTTP server; the environment overrides the file."""
        return os.environ.get(SERVER_ENV) or ("hypercorn" if self.http2 else self.server)


class TelemetryConfig(Table, frozen=True, kw_only=True):
    """Logs, and traces of requests. Neither contains prompts or answers."""

    log_format: Literal["text", "json"] = "text"
    """Format of the log lines on standard error; json: one object per line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the messages that are logged."""
    access_log: bool = False
    """Log a line for each completed request, except probes of health and status, and polls between routers and sites."""
    otlp: str | None = None
    """URL of a collector for traces that accepts OTLP over HTTP, such as http://127.0.0.1:4318. Needs pilotlight-inference[telemetry]. Unset: no
    traces."""

    def agree(self) -> None:
        if self.otlp is not None:
            is_http(self.otlp)
            msgspec.structs.force_setattr(self, "otlp", self.otlp.rstrip("/"))


class ResponsesConfig(Table, frozen=True, kw_only=True):
    """Stored responses (POST /v1/responses), on the disk of a router or of a site that serves clients."""

    directory: str | None = None
    """Directory for this process only; unset: ~/.local/state/pilotlight/SITE, or router-PORT."""
    max_gib: NonNegative = 1.0
    """Maximum size of all stored responses. Above it, the oldest responses of the account with the most are deleted. 0: none are stored."""
    keep_days: Positive = 30.0
    """Age after which stored responses are deleted."""

    def file_of(self, name: str) -> Path:
        """Return the SQLite file for the process called `name`."""
        found = state_directory(name) if self.directory is None else Path(self.directory).expanduser()
        return found / "responses.sqlite"

    def make_directory(self) -> None:
        """Make the directory, if one is set. Raises ConfigError if it cannot be used."""
        if self.directory is None or not self.max_gib:
            return
        try:
            Path(self.directory).expanduser().mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"responses.directory {self.directory} cannot be used: {error}") from None


def state_directory(name: str) -> Path:
    """Return the default directory for persistent data of the site or router called `name`.
    Raises ConfigError if the user has no home directory."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(home).expanduser() / "pilotlight" / name
    except RuntimeError:
        raise ConfigError("this user has no home directory: set HOME, or XDG_STATE_HOME for persistent data") from None


def router_state_directory() -> Path:
    """Return the router's directory for deployed functions: versions, bundles and traffic shares."""
    given = os.environ.get(ROUTER_STATE_ENV)
    return Path(given).expanduser() if given else state_directory("router")


def drained_sites_file() -> Path:
    """Return the file with the names of the sites that an operator has drained at the router."""
    return router_state_directory() / "drained.json"


def check_secrets(*names: str) -> None:
    """Raise ConfigError if a secret in these environment variables is too short.
    Unset variables are accepted."""
    for name in names:
        if secret := os.environ.get(name):
            _check_secret(name, secret)


def _check_secret(name: str, secret: str) -> None:
    if any(len(each.encode()) < MIN_SECRET_BYTES for each in secret.split(",")):
        raise ConfigError(
            f"{name} has fewer than {MIN_SECRET_BYTES} bytes: set it to the output of `openssl rand -hex 32`"
        )


def check_access(host: str, door: AccessConfig, num_keys: int, *, requires_hop: bool = False) -> None:
    """Raise ValueError if no client could connect, or if all could although the file does not allow that."""
    if door.require_key and not num_keys:
        raise ValueError("door.require_key is true, but there are no [[keys]]: make one with `pilotlight keys create`")
    if not (is_loopback(host) or door.require_key or door.open_to_all or requires_hop):
        raise ValueError(
            f"listen.host {host!r} is reachable from other machines: set require_key = true under [door] and create keys with "
            "`pilotlight keys create`, or set open_to_all = true there to serve every client"
        )
