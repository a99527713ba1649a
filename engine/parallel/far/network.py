"""Channels between ranks on several machines: TCP under TLS.

Each side proves that it has the group's key. The first rank makes the key, and Ray passes it to the other ranks, so that no third party can give
orders to a rank, pose as one, or read their traffic. This module is independent of the messages.
"""

import datetime
import socket
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from pilotlight.engine.parallel.channel import RankChannel

# Limit of a handshake, long enough for a busy machine; a stranger that sends nothing delays a group's start by as much.
HANDSHAKE_S = 10.0
# Validity of certificates: it allows for any difference of clocks, because a certificate is only used as long as its group exists.
_ALWAYS = (datetime.datetime(2000, 1, 1), datetime.datetime(2200, 1, 1))


def new_group_key() -> bytes:
    """Return a private key and its certificate, which all ranks of one group share (PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ranks of one group")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_ALWAYS)
    certificate = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return plain + certificate.sign(key, SHA256()).public_bytes(pem)


class RankListener:
    """The port at which other ranks reach the first rank; a context manager."""

    def __init__(self, address: str, key: bytes, handshake_s: float = HANDSHAKE_S) -> None:
        """`address`: address of this machine, as seen by the other machines."""
        self._handshake_s = handshake_s
        self._context = _context(ssl.PROTOCOL_TLS_SERVER, key)
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> "RankListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def accept(self, within_s: float) -> RankChannel | None:
        """Return a channel to the next peer that has the key, or None if none connects in time."""
        self._listener.settimeout(within_s)
        try:
            end, _ = self._listener.accept()
        except TimeoutError:
            return None
        try:
            return _secured(self._context, end, self._handshake_s, is_server=True)
        except OSError:  # raised for a peer without the key
            end.close()
            return None


def connect(address: str, port: int, key: bytes) -> RankChannel:
    """Return a channel to the first rank. Raises OSError if it is unreachable, or has another key."""
    end = socket.create_connection((address, port), timeout=HANDSHAKE_S)
    return _secured(_context(ssl.PROTOCOL_TLS_CLIENT, key), end, HANDSHAKE_S, is_server=False)


def _secured(context: ssl.SSLContext, end: socket.socket, handshake_s: float, *, is_server: bool) -> RankChannel:
    end.settimeout(handshake_s)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # messages of a step are small and must not be delayed
    secured = context.wrap_socket(end, server_side=is_server)
    secured.settimeout(None)
    return RankChannel(secured)


def _context(protocol: "ssl._SSLMethod", key: bytes) -> ssl.SSLContext:
    """Return a TLS context that presents the group's certificate and trusts no other."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are not resumed, and a peer that never reads would not consume the tickets
    context.load_verify_locations(cadata=key[key.index(b"-----BEGIN CERTIFICATE") :].decode())
    with tempfile.NamedTemporaryFile() as file:  # readable only by this user; ssl loads certificates only from files
        file.write(key)
        file.flush()
        context.load_cert_chain(file.name)
    return context
