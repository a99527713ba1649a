"""Clients' cities from cities.tsv, with their weights and their activity by local hour.

Local time is solar time (15 degrees an hour). It differs from clocks by up to two hours, which moves a peak without changing its shape.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from pilotlight.wire.hop.status import Place

TABLE = Path(__file__).with_name("cities.tsv")
PEAK_HOUR = 15.0  # local hour of the highest activity
NIGHT_SHARE = 0.2  # share of the peak; public traces of interactive services vary three- to fivefold over a day


@dataclass(frozen=True, slots=True)
class City:
    name: str
    place: Place
    weight: float

    def activity(self, utc_hour: float) -> float:
        """Return the relative activity: 1 at the local peak hour, NIGHT_SHARE twelve hours later."""
        phase = 2 * math.pi * (utc_hour + self.place.longitude / 15 - PEAK_HOUR) / 24
        return NIGHT_SHARE + (1 - NIGHT_SHARE) * (1 + math.cos(phase)) / 2


def load_cities() -> tuple[City, ...]:
    cities = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, latitude, longitude, weight = line.split("\t")
            cities.append(City(name, Place(name, float(latitude), float(longitude)), float(weight)))
    return tuple(cities)
