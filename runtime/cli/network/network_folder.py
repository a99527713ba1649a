"""A network's folder: network.toml, authority, certificate, secret, tokens.

`network init` makes it, other commands change it, and the router reads it."""

import secrets
import shutil
import sys
import time
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificates
from rich.table import Table

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.tables import print_table
from pilotlight.sites import toml_text
from pilotlight.sites.joining.authority import Authority, AuthorityError, new_pair
from pilotlight.sites.joining.network_file import remove_site
from pilotlight.sites.joining.tokens import Tokens, join_line
from pilotlight.sites.key_files import new_key
from pilotlight.sites.network import load_network
from pilotlight.sites.rules import are_host_names
from pilotlight.support import atomic_files

SECRET_BYTES = 32
NETWORK = """\
# The router of this network: `pilotlight router {folder}/network.toml`. SIGHUP reads it again.

place = {{ city = {city}, latitude = {latitude}, longitude = {longitude} }}

[listen]
host = {listen}
port = {port}
tls_certificate = "{folder}/router.pem"
tls_key = "{folder}/router.key"

[door]
require_key = true                  # `pilotlight keys create NAME --file {folder}/network.toml` makes more keys

[hop]
authority = "{folder}/authority.pem"
secret_file = "{folder}/secret"

[join]
directory = "{folder}"

[[keys]]
name = "admin"
key_sha256 = "{digest}"
scopes = ["admin"]
"""


def init(folder: Path, host: str, port: int, place: tuple[str, float, float], minutes: float) -> None:
    """Make a network's folder. Raises CliError if the folder has a network already, or `host` is invalid."""
    try:
        are_host_names((host,))
    except ValueError as error:
        raise CliError(f"--host: {error}.") from None
    folder = folder.expanduser().absolute()
    if (folder / "network.toml").exists() or (folder / "authority.pem").exists():
        raise CliError(f"{folder} holds a network already: `pilotlight network token {folder}` lets a machine join it.")
    if any(sign in str(folder) for sign in '"\\\n'):
        raise CliError(f"{folder}: choose a folder without quotation marks and backslashes.")
    key, known = new_key("admin", ("admin",))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        authority = Authority.make(folder, host)
        atomic_files.write(folder / "host", host.encode())
        _issue(folder, authority, host, "router")
        atomic_files.write(folder / "secret", secrets.token_hex(SECRET_BYTES).encode())
        city, latitude, longitude = place
        text = NETWORK.format(
            folder=folder, city=toml_text.literal(city), latitude=latitude, longitude=longitude,
            listen=toml_text.literal("::" if _is_ipv6(host) else "0.0.0.0"), port=port, digest=known.key_sha256,
        )  # fmt: skip
        atomic_files.write(folder / "network.toml", text.encode())
    except OSError as error:
        raise CliError(f"{folder} cannot hold a network: {error.strerror or error}.") from None
    load_network(folder / "network.toml")  # checks the written file
    print(f"Made a network in {folder}. Your admin key is shown only now:", file=sys.stderr)
    print(key, flush=True)
    print(f"\nStart its router:\n  pilotlight router {folder}/network.toml", file=sys.stderr)
    _print_line(folder, port, minutes, authority)


def token(folder: Path, minutes: float) -> None:
    folder = folder.expanduser().absolute()
    if not (folder / "host").exists():
        raise CliError(f"{folder} holds no network: `pilotlight network init` makes one.")
    _print_line(folder, load_network(folder / "network.toml").listen.port, minutes, _authority(folder))


def revoke(folder: Path, id: str) -> None:
    if not Tokens(folder).revoke(id):
        raise CliError(f"{folder} has no token {id}: `pilotlight network list {folder}` names them.")


def show(folder: Path) -> None:
    """Print the network's sites and tokens."""
    table = Table("site", "url", "city", box=None, header_style="bold")
    for site in load_network(folder / "network.toml").sites:
        table.add_row(site.name, site.url, site.place.city)
    print_table(table)
    table, now_s = Table("token", "state", "good until", box=None, header_style="bold"), time.time()
    for each in Tokens(folder).kept():
        table.add_row(each.id, each.state(now_s), f"{datetime.fromtimestamp(each.expires_s, UTC):%Y-%m-%d %H:%MZ}")
    print_table(table)


def remove(folder: Path, name: str) -> None:
    remove_site(folder / "network.toml", name)
    print(
        f"{name} is removed from {folder}/network.toml: send the router SIGHUP (`systemctl reload pilotlight-router`).",
        file=sys.stderr,
    )


def rotate(folder: Path) -> None:
    """Take the next of three steps that rotate the secret. Raises CliError.

    First the new secret is accepted, then it signs, then the old one is removed. At each step every process accepts all signatures in use."""
    file = folder / "secret"
    try:
        known = file.read_text().strip().split(",")
        marks = (folder / "rotation").read_text() if (folder / "rotation").exists() else ""
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}.") from None
    if len(known) == 1:
        kept, said = [*known, secrets.token_hex(SECRET_BYTES)], "accepts a second secret"
    elif marks == "believed":
        kept, said = known[::-1], "signs with the new secret"
    else:
        kept, said = known[:1], "has only the new secret"
    atomic_files.write(file, ",".join(kept).encode())
    atomic_files.write(folder / "rotation", b"believed" if len(known) == 1 else b"")
    following = "" if len(kept) == 1 else ", then run this again"
    sentence = f"{file} {said}. Copy it to every site and restart all processes, one after the other{following}."
    print(sentence, file=sys.stderr)


def renew(folder: Path, site: str | None = None) -> None:
    """Make a certificate and its key for the router, or for a site of the router's file. Raises CliError."""
    folder = folder.expanduser().absolute()
    authority = _authority(folder)
    if site is None:
        host = (folder / "host").read_text()
    else:
        urls = {each.name: each.url for each in load_network(folder / "network.toml").sites}
        if site not in urls:
            raise CliError(f"{folder}/network.toml has no site {site!r}; it has {', '.join(urls) or 'none'}.")
        host = urlsplit(urls[site]).hostname or ""
    try:
        _issue(folder, authority, host, site or "router")
    except OSError as error:
        raise CliError(f"{folder} cannot be written: {error.strerror}.") from None
    if site is not None:
        sentence = f"Move {folder}/{site}.key and .pem to the site, in place of the old files: it loads them by itself."
        print(sentence, file=sys.stderr)


def rotate_authority(folder: Path) -> None:
    """Take the next of three steps that replace the network's authority. Raises CliError.

    First the new authority is trusted, then it issues certificates, then the old one is removed. At each step every process trusts all certificates
    in use. `next` in the folder holds the new authority until it issues."""
    folder = folder.expanduser().absolute()
    authority, following = _authority(folder), folder / "next"
    known = [each.public_bytes(Encoding.PEM) for each in load_pem_x509_certificates(authority.pem)]
    try:
        host = (folder / "host").read_text()
        if len(known) == 1:
            following.mkdir(mode=0o700, exist_ok=True)
            atomic_files.write(authority.file, authority.pem + Authority.make(following, host).pem)
            said = "has a second authority, which is trusted"
        elif following.exists():
            new = (following / "authority.pem").read_bytes()
            atomic_files.write(authority.file, new + b"".join(each for each in known if each != new))
            atomic_files.write(folder / "authority.key", (following / "authority.key").read_bytes())
            _issue(folder, _authority(folder), host, "router")
            shutil.rmtree(following)  # last, so that a step that was interrupted can be taken again
            said = "issues with the new authority, and the router's certificate is renewed. Renew the certificate of each site with --site NAME"
        else:
            atomic_files.write(authority.file, known[0])
            said = "has only the new authority"
    except OSError as error:
        raise CliError(f"{folder} cannot be written: {error.strerror}.") from None
    again = "" if said.endswith("only the new authority") else ", then run this again"
    print(
        f"{folder} {said}. Copy {authority.file.name} to every site and restart all processes, one after the other{again}.",
        file=sys.stderr,
    )


def _issue(folder: Path, authority: Authority, host: str, name: str) -> None:
    pair = new_pair(host)
    atomic_files.write(folder / f"{name}.key", pair.key)
    atomic_files.write(folder / f"{name}.pem", authority.issue(pair.request, host))


def _authority(folder: Path) -> Authority:
    try:
        return Authority(folder)
    except AuthorityError as error:
        raise CliError(f"{error}.") from None


def _print_line(folder: Path, port: int, minutes: float, authority: Authority) -> None:
    print(f"\nOn the next machine, once, within {minutes:g} minutes:", file=sys.stderr)
    print(join_line(folder, port, minutes, authority.fingerprint))


def _is_ipv6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False
