"""What a site tells its router of an answer's tokens: beside an answer in one piece as a header, in a stream with its resume points
(wire/continuation.py). On signed hops only; no client sees it."""

import re
from typing import NamedTuple

USAGE = "x-pilotlight-usage"  # site -> router: PROMPT,CACHED,OUTPUT,REASONING

_COUNTS = re.compile(",".join([r"([0-9]{1,15})"] * 4))


class UsedTokens(NamedTuple):
    prompt: int = 0  # cached ones included
    cached: int = 0
    output: int = 0  # reasoning included
    reasoning: int = 0

    def minus(self, other: "UsedTokens") -> "UsedTokens":
        return (
            UsedTokens(*(max(0, mine - theirs) for mine, theirs in zip(self, other, strict=True)))
            if any(other)
            else self
        )


def encode_used_tokens(counts: UsedTokens) -> str:
    return ",".join(map(str, counts))


def decode_used_tokens(value: str) -> UsedTokens | None:
    """Return the counts; None: it is none of ours."""
    found = _COUNTS.fullmatch(value)
    return None if found is None else UsedTokens(*map(int, found.groups()))
