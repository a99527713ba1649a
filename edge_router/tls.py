"""The router's certificate: read from two files, and again when they change; open connections are not affected.

A pair that does not match (one file is written, the other not yet) is not used: the old pair serves until both are there.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from pilotlight.edge_router.file_stamps import stamp
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import RouterListenConfig

LOOK_EVERY_S = 2.0

log = logging.getLogger(__name__)


class Certificate:
    def __init__(self, certificate: Path, key: Path, *, http2: bool = False) -> None:
        """Raises ConfigError."""
        self._protocols = ["h2", "http/1.1"] if http2 else ["http/1.1"]
        self._files = (certificate, key)
        self._seen = self._stamps()
        try:
            self.context = self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"listen.tls_certificate {certificate} and listen.tls_key {key} cannot be used: {error}"
            ) from None

    @classmethod
    def of(cls, listen: RouterListenConfig, *, http2: bool = False) -> "Certificate | None":
        if listen.tls_certificate is None or listen.tls_key is None:
            return None
        return cls(Path(listen.tls_certificate), Path(listen.tls_key), http2=http2)

    async def watch(self, every_s: float = LOOK_EVERY_S) -> None:
        """Reload the certificate when its files change, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.look()

    def look(self) -> bool:
        """Tell whether there was something new that could be used."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._load()  # load into a separate context first: a live one with half a pair would refuse every handshake
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            log.error("the new certificate cannot be used; the old one stays in use: %s", error)
            return False
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
