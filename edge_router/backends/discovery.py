"""The sites that exist: one Backend for each site of the network file.
A discovery that changes at run time would be here."""

from collections.abc import Callable

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.rtt import RoundTrip, seed_rtt_ms
from pilotlight.sites.network import NetworkConfig
from pilotlight.wire.hop.status import Place


def static_backends(network: NetworkConfig, clock: Callable[[], float]) -> dict[str, Backend]:
    here = router_place(network)
    backends = {}
    for site in network.sites:
        there = Place(site.place.city, site.place.latitude, site.place.longitude)
        backends[site.name] = Backend(site, RoundTrip(seed_rtt_ms(here, there)), network.health, clock)
    return backends


def router_place(network: NetworkConfig) -> Place:
    return Place(network.place.city, network.place.latitude, network.place.longitude)
