"""TLS of listeners and of connections between them, with the trusted authorities.

A certificate is two files, read again when they change.

Open connections are not affected. A pair that does not match (one file is written, the other not yet) is not used: the old pair serves until both are
there.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from pilotlight.support.atomic_files import stamp
from pilotlight.wire.http.listen import ListenError

LOOK_EVERY_S = 2.0

log = logging.getLogger(__name__)


class Certificate:
    def __init__(self, certificate: Path, key: Path, *, http2: bool = False) -> None:
        """Read a certificate and its key. Raises ListenError."""
        self._protocols = ["h2", "http/1.1"] if http2 else ["http/1.1"]
        self._files = (certificate, key)
        self._seen = self._stamps()
        try:
            self.context = self._load()
            self.ends_s = _end_of(certificate)  # seconds since the epoch
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ListenError(
                f"listen.tls_certificate {certificate} and listen.tls_key {key} cannot be used: {error}"
            ) from None

    @classmethod
    def of(cls, certificate: str | None, key: str | None, *, http2: bool = False) -> "Certificate | None":
        """Return the certificate of a listener; None if it has none. Raises ListenError."""
        return None if certificate is None or key is None else cls(Path(certificate), Path(key), http2=http2)

    async def watch(self, every_s: float = LOOK_EVERY_S) -> None:
        """Read the files again when they change, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.look()

    def look(self) -> bool:
        """Read the files again if they have changed. Return whether a new certificate is used."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._load()  # in a separate context first: half a pair in the live context would make it refuse every handshake
            ends_s = _end_of(self._files[0])
            self.context.load_cert_chain(*self._files)
        except (OSError, ValueError) as error:
            log.error("the new certificate cannot be used; the old one stays in use: %s", error)
            return False
        self.ends_s = ends_s
        log.warning("the certificate was reloaded")
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(self._protocols)
        context.load_cert_chain(*self._files)
        return context

    def _stamps(self) -> tuple[object, ...]:
        return tuple(stamp(file) for file in self._files)


def client_context(authority: str | None) -> ssl.SSLContext:
    """Return the TLS context of a client, which trusts the system's authorities.

    It also trusts the network's authority, a PEM file, if one is named.

    Raises ListenError.
    """
    context = ssl.create_default_context()
    if authority is not None:
        try:
            context.load_verify_locations(authority)
        except OSError as error:
            raise ListenError(f"hop.authority {authority} cannot be used: {error}") from None
    return context


def _end_of(certificate: Path) -> float:
    """Return when the first certificate of a chain ends, in seconds since the epoch.
    Raises OSError, ValueError."""
    from cryptography.x509 import load_pem_x509_certificate  # imported here because few listeners have one

    return load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()
