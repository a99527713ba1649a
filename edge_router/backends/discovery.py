"""The sites that exist: one Backend for each site of the network file.

The file may be read again while the router runs.
"""

from collections.abc import Callable, Collection

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.rtt import RoundTrip, seed_rtt_ms
from pilotlight.sites.network import NetworkConfig, SiteRef
from pilotlight.wire.hop.status import Place

DRAINED = "drained by an operator at this router, until `pilotlight manage resume {}`"
REMOVED = "removed from the router's file"


class Discovery:
    """The sites that a router knows. `backends` and `urls` stay the same objects while the router runs."""

    def __init__(self, network: NetworkConfig, clock: Callable[[], float]) -> None:
        self.backends: dict[str, Backend] = {}
        self.urls: dict[str, str] = {}
        self._clock = clock
        self._known: dict[str, SiteRef] = {}
        self.reload(network)

    def reload(self, network: NetworkConfig) -> None:
        """Apply the sites of the file.
        A removed site gets no new requests and is dropped when its last request has ended (`sweep`). A site whose entry changed gets a new Backend.
        """
        here = router_place(network)
        named = {site.name: site for site in network.sites}
        for name, site in named.items():
            if self._known.get(name) != site:
                there = Place(site.place.city, site.place.latitude, site.place.longitude)
                round_trip = RoundTrip(seed_rtt_ms(here, there))
                self.backends[name] = Backend(site, round_trip, network.health, self._clock)
                self.urls[name] = site.url
        self._known = named

    def cordon(self, drained: Collection[str]) -> None:
        """Send no new requests to removed sites, and to those that an operator has drained."""
        for name, backend in self.backends.items():
            is_removed = name not in self._known
            backend.cordon(REMOVED if is_removed else DRAINED.format(name) if name in drained else "")

    def sweep(self) -> None:
        """Drop removed sites that have no open requests."""
        for name in [name for name in self.backends if name not in self._known]:
            if not self.backends[name].outstanding:
                del self.backends[name], self.urls[name]


def router_place(network: NetworkConfig) -> Place:
    return Place(network.place.city, network.place.latitude, network.place.longitude)
