"""The location of a client: from a trusted front end, else its address, else the router's own.

A database maps addresses to locations.

`x-client-geo` comes from CDNs and load balancers, but any client can invent it: it is believed only from the networks in the router's file and from
other routers. The database is a file in MaxMind's format ("MaxMind DB File Format Specification"; GeoLite2-City is one), read again when it changes.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path

import maxminddb

from pilotlight.edge_router.routing.geo import parse_place
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import ClientsConfig
from pilotlight.support.atomic_files import stamp
from pilotlight.wire.hop.status import Place

LOOK_EVERY_S = 30.0
# number of a database's networks that are checked; if none has coordinates, the database is refused
SAMPLED_NETWORKS = 1000
REMEMBERED = 65_536  # cached addresses; a lookup takes 5 us with the library's C extension, and 60 us without

log = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Returns a client's location. Arguments: its address, its location header, whether another router sent the request.
FindPlace = Callable[[str, str, bool], Place | None]


class PlaceDatabase:
    def __init__(self, file: Path) -> None:
        """Open the database. Raises ConfigError."""
        self._file = file
        self._seen = stamp(file)
        try:
            self._reader = _read(file)
        except _Unusable as error:
            raise ConfigError(f"clients.geo_database {file} cannot be used: {error}") from None
        self._find = lru_cache(REMEMBERED)(self._looked_up)

    def place(self, address: str) -> Place | None:
        return self._find(address)

    async def watch(self, every_s: float = LOOK_EVERY_S) -> None:
        """Read the database again when it changes, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self.look)

    def look(self) -> bool:
        """Read the database again if the file has changed. Return whether a new one is used."""
        seen = stamp(self._file)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            reader = _read(self._file)
        except _Unusable as error:
            log.error("the new clients.geo_database cannot be used; the old one stays in use: %s", error)
            return False
        self._reader = reader  # the old file stays mapped until its last use ends
        self._find.cache_clear()
        log.warning("clients.geo_database was reloaded")
        return True

    def _looked_up(self, address: str) -> Place | None:
        try:
            return place_in(self._reader.get(plain_address(address)))
        except ValueError:  # the address of a Unix socket, or an IPv6 address in a database of IPv4
            return None
        except maxminddb.InvalidDatabaseError as error:
            log.error("clients.geo_database is damaged where %s should be: %s", address, error)
            return None


class ClientPlaces:
    def __init__(self, front_ends: Iterable[str], database: PlaceDatabase | None = None) -> None:
        """Locate clients; `front_ends` are networks whose header is trusted."""
        self._front_ends: tuple[Network, ...] = tuple(ipaddress.ip_network(network) for network in front_ends)
        self.database = database
        self._is_front_end = lru_cache(REMEMBERED)(self._looked_up)

    @classmethod
    def of(cls, config: ClientsConfig) -> "ClientPlaces":
        """Return the object that locates clients, as configured. Raises ConfigError."""
        return cls(config.front_ends, PlaceDatabase(Path(config.geo_database)) if config.geo_database else None)

    def place(self, address: str, header: str, is_hop: bool) -> Place | None:
        """Return the client's location; None if it is the router's.
        Raises ApiError for a malformed header from a trusted sender. `is_hop` says that another router sent the request."""
        if header and (is_hop or self._is_front_end(address)):
            return parse_place(header)
        return self.database.place(address) if self.database is not None else None

    def _looked_up(self, address: str) -> bool:
        try:
            plain = plain_address(address)
        except ValueError:  # the address of a Unix socket, or no address
            return False
        return any(plain in network for network in self._front_ends)


def plain_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address; ::ffff:192.0.2.1 of a dual-stack socket becomes 192.0.2.1. Raises ValueError."""
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


class _Unusable(Exception):
    pass


def _read(file: Path) -> maxminddb.Reader:
    try:
        reader = maxminddb.open_database(str(file))
        if not any(place_in(record) for _, record in islice(reader, SAMPLED_NETWORKS)):
            kind = reader.metadata().database_type
            raise _Unusable(f"it has no coordinates (it is a {kind!r}): use a database of cities")
    except (OSError, ValueError, maxminddb.InvalidDatabaseError) as error:
        raise _Unusable(str(error)) from None
    return reader


def place_in(record: object) -> Place | None:
    location = record.get("location") if isinstance(record, dict) else None
    if not isinstance(location, dict):
        return None
    latitude, longitude = location.get("latitude"), location.get("longitude")
    if not isinstance(latitude, float) or not isinstance(longitude, float):
        return None
    return Place("client", latitude, longitude) if -90 <= latitude <= 90 and -180 <= longitude <= 180 else None
