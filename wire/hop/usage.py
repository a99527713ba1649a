"""The usage of an answer, as a site reports it to its router on signed hops; clients never see it.

It is in a header of a whole answer, and with a stream's resume points (wire/hop/continuation.py).
"""

import re
from typing import NamedTuple

USAGE = "x-pilotlight-usage"  # site -> router: the counts of ResourceUse, separated by commas


class ResourceUse(NamedTuple):
    """Tokens of an answer, and the work of its sites."""

    prompt: int = 0  # including cached ones
    cached: int = 0
    output: int = 0  # including reasoning
    reasoning: int = 0
    drafted: int = 0  # checked guesses of speculative decoding
    accepted: int = 0  # accepted guesses
    device_us: int = 0  # the answer's share of the devices' time


NOTHING_USED = ResourceUse()
_USE = re.compile(",".join([r"([0-9]{1,15})"] * len(NOTHING_USED)))


def encode_use(use: ResourceUse) -> str:
    """Return the value of USAGE."""
    return ",".join(map(str, use))


def decode_use(value: str) -> ResourceUse | None:
    """Return the usage in the header; None if its value has another form."""
    found = _USE.fullmatch(value)
    return None if found is None else ResourceUse(*map(int, found.groups()))
