"""The usage of an answer, as a site reports it to its router on signed hops; clients never see it.

It is in headers of a whole answer, and with a stream's resume points (wire/hop/continuation.py).

A router of an older version reads the first header only, and a newer one accepts responses without the second, so sites and routers may be upgraded
in any order.
"""

import re
from typing import NamedTuple

USAGE = "x-pilotlight-usage"  # site -> router: PROMPT,CACHED,OUTPUT,REASONING
WORK = "x-pilotlight-work"  # site -> router: DRAFTED,ACCEPTED,DEVICE_US

_TOKENS, _WORK = (re.compile(",".join([r"([0-9]{1,15})"] * number)) for number in (4, 3))


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


def encode_use(use: ResourceUse) -> tuple[str, str]:
    """Return the values of USAGE and WORK."""
    return ",".join(map(str, use[:4])), ",".join(map(str, use[4:]))


def decode_use(tokens: str, work: str) -> ResourceUse | None:
    """Return the usage in the headers; None if the first header has another form."""
    if (found := _TOKENS.fullmatch(tokens)) is None:
        return None
    more = _WORK.fullmatch(work)
    return ResourceUse(*map(int, (*found.groups(), *(more.groups() if more else ()))))
