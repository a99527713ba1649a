"""`pilotlight join`: make this machine a site of a network by a token, and serve.

The token contains the fingerprint of the network's certificate authority, so that no other server can pose as the router. The steps: authenticate the
network, ask to join, write the files, serve.
"""

import http.client
import os
import re
import socket
import ssl
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.up import require_free
from pilotlight.runtime.hosts.gpus import installed_gpus
from pilotlight.runtime.hosts.memory import available_bytes, gib
from pilotlight.sites import toml_text
from pilotlight.sites.accounts import Name
from pilotlight.sites.joining.authority import AuthorityError, fingerprint_of, new_pair
from pilotlight.sites.joining.tokens import JoinToken, TokenError
from pilotlight.sites.site import load_site
from pilotlight.support import atomic_files
from pilotlight.wire.hop.joining import AUTHORITY_PATH, JOIN_PATH, Joined, JoinRequest, NetworkFace
from pilotlight.wire.hop.status import Place

TIMEOUT_S = 20.0
SITE = """\
# This machine as a site of {router}: `pilotlight site {folder}/{name}.toml`. SIGHUP reads it again.
# {machine}
name = "{name}"

[place]
city = {city}
latitude = {latitude}
longitude = {longitude}

[listen]
host = "{listen}"
port = {port}
tls_certificate = "{folder}/{name}.pem"
tls_key = "{folder}/{name}.key"
require_hop = true                  # answer only what a router of the network has signed

[hop]
authority = "{folder}/authority.pem"
secret_file = "{folder}/secret"

[engine]
device = "auto"

[[models]]
name = "{model_name}"
source = {source}
"""

ToldT = TypeVar("ToldT")


class Wishes(NamedTuple):
    """The options of the command line. Missing values are detected, or asked for at a terminal."""

    name: str | None = None
    address: str | None = None
    port: int = 8790
    city: str | None = None
    latitude: float | None = None
    longitude: float | None = None
    model: str = "ember"


def join(url: str, token: str, folder: Path, wishes: Wishes) -> Path:
    """Join a network; return the site's file. Raises CliError."""
    folder = folder.expanduser().absolute()
    try:
        opened = JoinToken.parse(token)
    except TokenError as error:
        raise CliError(f"{error}.") from None
    if wishes.name is not None:
        _checked(wishes.name)
    router = _Router(url)
    face = router.face(opened.fingerprint)
    address = wishes.address or router.own_address()
    place = _place(wishes, face.place)
    name = wishes.name or _checked(_asked("Name of this site", _default_name()))
    require_free(address, wishes.port, host_key="--address")
    if (folder / f"{name}.toml").exists():
        raise CliError(f"{folder}/{name}.toml is there already: choose another --name or --dir.")
    pair = new_pair(address)
    shown = f"[{address}]" if ":" in address else address
    asked = JoinRequest(opened.secret, name, f"https://{shown}:{wishes.port}", place, pair.request.decode())
    joined = router.join(asked)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file, data in (
            ("authority.pem", face.authority), ("secret", joined.secret), (f"{name}.pem", joined.certificate), (f"{name}.key", pair.key.decode()),
        ):  # fmt: skip
            atomic_files.write(folder / file, data.encode())
        path = folder / f"{name}.toml"
        atomic_files.write(path, _site_text(url, folder, name, address, place, wishes).encode())
    except OSError as error:
        raise CliError(f"{folder} cannot be written: {error.strerror}.") from None
    load_site(path)  # checks the written file
    print(f"{name} has joined {url}; its files are in {folder}.", file=sys.stderr)
    return path


class _Router:
    """A client for the network's router. It is trusted once its authority matches the token."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            raise CliError(f"{url!r} is no https://HOST:PORT of a router.")
        self._url, self._host, self._port = url, parts.hostname, parts.port or 443
        self._context = ssl.create_default_context()
        # without verification until `face` has returned
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def face(self, fingerprint: str) -> NetworkFace:
        """Return the network's public data, and trust its authority from now on.
        Raises CliError if the authority does not match the token."""
        face = self._ask("GET", AUTHORITY_PATH, None, NetworkFace)
        try:
            found = fingerprint_of(face.authority.encode())
        except AuthorityError as error:
            raise CliError(f"{self._url} sent no valid certificate authority: {error}.") from None
        if found != fingerprint:
            raise CliError(f"{self._url} is not the network of this token: the connection may be intercepted.")
        self._context = ssl.create_default_context(cadata=face.authority)
        return face

    def join(self, asked: JoinRequest) -> Joined:
        return self._ask("POST", JOIN_PATH, msgspec.json.encode(asked), Joined)

    def own_address(self) -> str:
        """Return this machine's address on the route to the router; the router uses it to reach the site."""
        with socket.create_connection((self._host, self._port), timeout=TIMEOUT_S) as connection:
            found: str = connection.getsockname()[0]
            return found

    def _ask(self, method: str, path: str, body: bytes | None, told: type[ToldT]) -> ToldT:
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._context)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"{self._url} cannot be reached, so start its router first: {error}.") from None
        finally:
            connection.close()
        if answer.status == 404:
            raise CliError(f"{self._url} accepts no machines: [join] in its router's file names no directory.")
        try:
            if answer.status != 200:
                raise CliError(f"{self._url}: {msgspec.json.decode(data)['error']['message']}.")
            return msgspec.json.decode(data, type=told)
        except (msgspec.MsgspecError, KeyError, TypeError):
            raise CliError(f"{self._url} answered {answer.status} without a valid response: is it a router?") from None


def _place(wishes: Wishes, router: Place) -> Place:
    """Return this machine's location: the options, the answers at a terminal, or the router's location."""
    if wishes.city is not None and wishes.latitude is not None and wishes.longitude is not None:
        return Place(wishes.city, wishes.latitude, wishes.longitude)
    city = wishes.city or _asked("City", router.city)
    found = []
    for name, given, default in (
        ("Latitude", wishes.latitude, router.latitude),
        ("Longitude", wishes.longitude, router.longitude),
    ):
        answer = str(given) if given is not None else _asked(name, str(default))
        try:
            found.append(float(answer))
        except ValueError:
            raise CliError(f"{name} {answer!r} is not a number of degrees.") from None
    return Place(city, *found)


def _asked(what: str, default: str) -> str:
    if not sys.stdin.isatty():
        return default
    return input(f"{what} [{default}]: ").strip() or default


def _checked(name: str) -> str:
    """Return the name of a site. Raises CliError."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        sentence = "use at most 63 small letters, digits, '.', '_' and '-', with a letter or digit first"
        raise CliError(f"{name!r} is not a name of a site: {sentence}.") from None


def _default_name() -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", socket.gethostname().lower()).strip("-._")[:63] or "site"


def _site_text(url: str, folder: Path, name: str, address: str, place: Place, wishes: Wishes) -> str:
    embedded = wishes.model == "ember"
    values: dict[str, Any] = {
        "router": url, "folder": folder, "name": name, "machine": _machine(), "city": toml_text.literal(place.city),
        "latitude": place.latitude, "longitude": place.longitude, "listen": address, "port": wishes.port,
        "model_name": wishes.model.rstrip("/").rpartition("/")[2],
        "source": toml_text.literal("embedded:ember" if embedded else wishes.model),
    }  # fmt: skip
    return SITE.format(**values)


def _machine() -> str:
    """Return a comment for the site's file that lists this machine's devices."""
    gpus, memory = installed_gpus() or (), available_bytes()
    has = [f"{os.cpu_count() or 1} CPUs", *([] if memory is None else [f"{gib(memory)} of memory available"])]
    return f"Found here: {', '.join([*has, *(gpu.name for gpu in gpus)])}."
