"""What a site tells its router of what an answer has used: beside an answer in one piece as headers, in a stream with its resume points
(wire/hop/continuation.py). On signed hops only; no client sees it.

A router that is older than its sites reads the first header alone, and a newer one does without the second: so both may be upgraded in any order.
"""

import re
from typing import NamedTuple

USAGE = "x-pilotlight-usage"  # site -> router: PROMPT,CACHED,OUTPUT,REASONING
WORK = "x-pilotlight-work"  # site -> router: DRAFTED,ACCEPTED,DEVICE_US

_TOKENS, _WORK = (re.compile(",".join([r"([0-9]{1,15})"] * number)) for number in (4, 3))


class ResourceUse(NamedTuple):
    """Tokens of an answer, and what its sites have done for it."""

    prompt: int = 0  # cached ones included
    cached: int = 0
    output: int = 0  # reasoning included
    reasoning: int = 0
    drafted: int = 0  # guesses of speculative decoding that were checked
    accepted: int = 0  # of these, output
    device_us: int = 0  # the answer's shares of the time that devices were at work

    def minus(self, other: "ResourceUse") -> "ResourceUse":
        return (
            ResourceUse(*(max(0, mine - theirs) for mine, theirs in zip(self, other, strict=True)))
            if any(other)
            else self
        )


def encode_use(use: ResourceUse) -> tuple[str, str]:
    """Return the values of USAGE and WORK."""
    return ",".join(map(str, use[:4])), ",".join(map(str, use[4:]))


def decode_use(tokens: str, work: str) -> ResourceUse | None:
    """Return what the headers say; None: the first is none of ours."""
    found, more = _TOKENS.fullmatch(tokens), _WORK.fullmatch(work)
    return None if found is None else ResourceUse(*map(int, (*found.groups(), *(more.groups() if more else ()))))
