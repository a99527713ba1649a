"""The location of a client, and its distance to sites.

The location comes from `x-client-geo: latitude,longitude`, set by a front end that knows it (a CDN, a load balancer, an experiment). client_places.py
decides which front ends are trusted, and the default.
"""

import math

from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import CLIENT_GEO
from pilotlight.wire.hop.status import Place

EARTH_RADIUS_KM = 6371.0


def parse_place(header: str) -> Place:
    """Parse `"52.3,4.8"`. Raises ApiError unless it has a latitude and a longitude in degrees."""
    first, _, second = header.partition(",")
    try:
        latitude, longitude = float(first), float(second)
    except ValueError:
        latitude = longitude = math.nan
    if not (-90 <= latitude <= 90 and -180 <= longitude <= 180):  # also false for NaN
        message = f"{CLIENT_GEO} must be latitude,longitude in degrees, such as 52.3,4.8; it is {header[:40]!r}"
        raise ApiError("invalid_request", message, param=CLIENT_GEO)
    return Place("client", latitude, longitude)


def distance_km(a: Place, b: Place) -> float:
    """Return the great-circle distance in km, by the haversine formula.

    The error is at most 0.5 %, because the Earth is not a sphere.
    """
    phi_a, phi_b = math.radians(a.latitude), math.radians(b.latitude)
    half_phi = (phi_b - phi_a) / 2
    half_lambda = math.radians(b.longitude - a.longitude) / 2
    h = math.sin(half_phi) ** 2 + math.cos(phi_a) * math.cos(phi_b) * math.sin(half_lambda) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(h)))
