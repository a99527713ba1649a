"""Deployed functions, as a router publishes them: versions, and each version's share of the traffic.

The choice of a client's version is here too, so that it is the same everywhere.

A revision grows with every change. A change names the revision that it was made for, so that one of two simultaneous changes is refused.
"""

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

PATH = "/deployments"
TRY_PATH = "/internal/functions/try"  # router -> site: fetch this version, start it and make its health call
SERVE_PATH = "/internal/functions/serve"  # router -> site: fetch the deployments and serve them
TAIL_PATH = "/internal/functions/tail"
MAX_VERSIONS = 50  # versions of one function

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # \Z, because Python's $ also matches before a final line end
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z")]
Percent = Annotated[float, Meta(gt=0, le=100)]


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int
    digest: Digest
    created_s: float
    message: str = ""
    environment: str | None = None  # name of an [env.NAME] in the manifest
    health_path: str = "/"
    replaced: int | None = None  # the version whose traffic it took; 0 if there was none; None if unknown
    services: tuple[Name, ...] = ()  # other functions that it calls
    routes: tuple[str, ...] = ()  # host patterns, as wire/host_patterns.py reads them
    has_subdomain: bool = True  # it is served at a subdomain of the network's functions.domain, if that is set


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int  # number of a version
    percent: float


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One function.

    The shares add up to 100, the newest version first. A deleted function has no shares; its versions, data and name are kept.
    """

    name: Name
    revision: int
    versions: tuple[Version, ...] = ()
    shares: tuple[Share, ...] = ()
    account: str = ""  # the owner: the account that deployed it first, permanently; empty if it belongs to the network
    home: str = ""  # the only site where it runs, because its data is there; empty if it runs everywhere
    # changes whenever its secrets change, so that sites fetch them; empty without secrets from a router
    secrets: str = ""
    is_limited: bool = False  # its account has limits, so its calls to models go through the router, which applies them

    @property
    def services(self) -> set[str]:
        """Return the services that its versions with traffic call."""
        live = {share.number for share in self.shares}
        return {name for version in self.versions if version.number in live for name in version.services}

    def runs_at(self, site: str) -> bool:
        return self.home in ("", site)

    def version(self, number: int) -> Version | None:
        return next((version for version in self.versions if version.number == number), None)

    def chosen(self, key: str) -> Version | None:
        """Return the version for a client's key; None if none has traffic.
        A client of the newest version keeps it as its share grows."""
        point, total = _point(self.name, key), 0.0
        for share in self.shares:
            total += share.percent
            if point < total:
                return self.version(share.number)
        return self.version(self.shares[-1].number) if self.shares else None


class Changed(Deployment, frozen=True, forbid_unknown_fields=True):
    """The result of a deployment or a rollback."""

    unconfirmed: dict[str, str] = {}  # sites that do not confirm that they serve it, with the reason
    addresses: tuple[str, ...] = ()  # hosts and paths besides /fn/NAME


class NewVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST PATH/NAME."""

    digest: Digest
    expected_revision: int
    percent: Percent = 100.0
    message: Annotated[str, Meta(max_length=500)] = ""
    environment: Annotated[str, Meta(max_length=100)] | None = None
    health_path: Annotated[str, Meta(pattern="^/", max_length=500)] = "/"
    keeps_data: bool = False  # it must run at one site only
    services: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()
    routes: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=100)] = ()
    has_subdomain: bool = True
    # home for the function; empty to run everywhere; None to leave the home unchanged
    home: Annotated[str, Meta(max_length=100)] | None = None


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST PATH/NAME/rollback: the version that gets all traffic; None for the previous one."""

    expected_revision: int
    number: int | None = None


class Removal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of DELETE PATH/NAME: no version gets traffic."""

    expected_revision: int


class Try(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router -> site: try a version."""

    name: Name
    version: Version
    account: str = ""  # the owner of the function, which a site may not know yet
    is_limited: bool = False  # as in Deployment


class Serve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router -> site: serve the deployments up to a revision."""

    name: Name
    revision: int


class Tried(msgspec.Struct, frozen=True):
    """Site -> router: the result of trying a version or serving a revision.

    `detail` is the author's traceback, if any.
    """

    healthy: bool
    detail: str = ""
    # migrations that will rename or delete classes of objects when the version gets traffic
    moves: tuple[str, ...] = ()
    # it must not get traffic: it binds classes of objects that are gone, or renames classes to existing ones
    misfits: bool = False


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def decode_deployments(data: bytes) -> dict[str, Deployment]:
    """Decode deployments. Raises msgspec.DecodeError and msgspec.ValidationError."""
    return {deployment.name: deployment for deployment in msgspec.json.decode(data, type=list[Deployment])}


def _point(name: str, key: str) -> float:
    """Return the position of a client's key between 0 and 100, for a function."""
    digest = hashlib.sha256(f"{name}\0{key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 * 100
