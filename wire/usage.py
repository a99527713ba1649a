"""What a site tells its router of an answer's tokens: beside an answer in one piece as a header, in a stream with its resume points
(wire/continuation.py). On signed hops only; no client sees it."""

from typing import NamedTuple

USAGE = "x-pilotlight-usage"  # site -> router: PROMPT,CACHED,OUTPUT,REASONING


class UsedTokens(NamedTuple):
    prompt: int = 0  # cached ones included
    cached: int = 0
    output: int = 0  # reasoning included
    reasoning: int = 0


def encode_used_tokens(counts: UsedTokens) -> str:
    return ",".join(map(str, counts))


def decode_used_tokens(value: str) -> UsedTokens | None:
    """Return the counts; None: it is none of ours."""
    parts = value.split(",")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        return None
    return UsedTokens(*map(int, parts))
