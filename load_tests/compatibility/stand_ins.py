"""Stand-ins for hosts of the internet, on this machine's loopback.

Their names are in a hosts file that only one process tree sees; their certificates come from an authority that exists only during the run. Needs
root, for a mount namespace and port 443.
"""

import datetime
import os
import shlex
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ADDRESS = "127.77.0.1"  # the address of all stand-ins; loopback has many, and other programs may use 127.0.0.1
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StandIns:
    """Servers for some host names; use as `async with`.

    `handlers`: by host name, the handler that answers there over TLS.
    """

    def __init__(self, folder: Path, handlers: Mapping[str, Handler]) -> None:
        self._folder = folder
        self._handlers = handlers
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "StandIns":
        if os.geteuid() != 0:
            raise SystemExit("stand-ins for internet hosts need root: a mount namespace, and port 443")
        self.write_files()

        async def answer(request: web.Request) -> web.StreamResponse:
            handler = self._handlers.get(request.host.partition(":")[0])
            return web.Response(status=421) if handler is None else await handler(request)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._folder / "server.pem")
        await web.TCPSite(self._runner, ADDRESS, 443, ssl_context=context).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SSL_CERT_FILE": str(self._folder / "authorities.pem")}

    def inside(self, command: list[str]) -> list[str]:
        """Return a command that runs with these names resolved to the stand-ins."""
        script = f"mount --bind {shlex.quote(str(self._folder / 'hosts'))} /etc/hosts && exec {shlex.join(command)}"
        return ["unshare", "--mount", "sh", "-c", script]

    @property
    def allowed(self) -> list[str]:
        """Return options of `pilotlight dev` that allow these hosts, whose addresses are not public."""
        return [word for host in self._handlers for word in ("--egress-allow", host)]

    def write_files(self) -> None:
        hosts = Path("/etc/hosts").read_text() + "".join(f"{ADDRESS} {host}\n" for host in self._handlers)
        (self._folder / "hosts").write_text(hosts)
        authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stand-ins")])
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in self._handlers])
        basic = x509.BasicConstraints(ca=True, path_length=None)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        authority = _builder(issuer, authority_key, issuer).add_extension(basic, True).add_extension(usage, True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
        ca = authority.add_extension(identifier, False).sign(authority_key, hashes.SHA256())
        told = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, next(iter(self._handlers)))])
        leaf = _builder(subject, key, issuer).add_extension(names, False).add_extension(told, False)
        certificate = leaf.sign(authority_key, hashes.SHA256())
        pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
        (self._folder / "server.pem").write_bytes(private + certificate.public_bytes(pem))
        known = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
        system = Path(known).read_bytes() if Path(known).is_file() else b""
        (self._folder / "authorities.pem").write_bytes(system + b"\n" + ca.public_bytes(pem))


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey, issuer: x509.Name) -> x509.CertificateBuilder:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
    )
