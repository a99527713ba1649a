"""Messages between two sites, one of which computes prompts for the other; requests are signed.

GET LENDING_PATH returns what the site could compute now (`Lendable`). GET PROBE_PATH returns bytes that measure the link. POST PROMPT_PATH with a
`BorrowedPrompt` is declined, or answered with two lines: `PromptAccepted` at once and `PromptComputed` at the end. Closing the connection earlier
cancels the work. The KV blocks go directly from engine host to engine host (engine/kv/peers).
"""

from typing import TypeVar

import msgspec

LENDING_PATH = "/internal/lending"
PROBE_PATH = "/internal/lending/probe"
PROMPT_PATH = "/internal/lending/prompt"
PROBE_BYTES = 2 << 20  # 0.2 s at 100 Mbit/s


class Lendable(msgspec.Struct, frozen=True):
    # models whose prompts the site would compute now -> prefill rate in tokens per second; 0 if not measured yet
    models: dict[str, float]
    why_not: str = ""  # why `models` is empty
    queue_s: float = 0.0  # seconds that the prompts of other sites will still take there


class BorrowedPrompt(msgspec.Struct, frozen=True):
    model: str
    hand_over: str  # name under which the KV blocks are requested
    token_ids: tuple[int, ...]
    salt: bytes  # the tenant's salt, so that no other tenant finds the cached blocks


class PromptAccepted(msgspec.Struct, frozen=True):
    port: int  # port that serves the KV blocks, at the site's host name


class PromptComputed(msgspec.Struct, frozen=True):
    num_cached_tokens: int  # tokens that were in the prefix cache
    device_us: int


LineT = TypeVar("LineT", bound=msgspec.Struct)


def encode_line(line: msgspec.Struct) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def decode_line(line: bytes, kind: type[LineT]) -> LineT:
    """Decode a line. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=kind)
