"""Messages between two sites, one of which computes prompts for the other; requests are signed.

GET LENDING_PATH returns what the site could compute now (`Lendable`). GET PROBE_PATH returns bytes that measure the link. POST PROMPT_PATH with a
`BorrowedPrompt` is declined, or answered with two lines: `PromptAccepted` at once and `PromptComputed` at the end. Closing the connection earlier
cancels the work. The KV blocks go directly from engine host to engine host (engine/kv/peers).
"""

from typing import NamedTuple, TypeVar

import msgspec

from pilotlight.support.estimates import FIRST_ERROR, HAND_OVER_S, exposed_s

LENDING_PATH = "/internal/lending"
PROBE_PATH = "/internal/lending/probe"
PROMPT_PATH = "/internal/lending/prompt"
PROBE_BYTES = 2 << 20  # 0.2 s at 100 Mbit/s
ROUND_TRIPS = 2  # round trips before the first block arrives: one for the prompt, one for the blocks


class Lendable(msgspec.Struct, frozen=True):
    # models whose prompts the site would compute now -> prefill rate in tokens per second; 0 if not measured yet
    models: dict[str, float]
    why_not: str = ""  # why `models` is empty
    queue_s: float = 0.0  # seconds that the prompts of other sites will still take there


class LentCost(NamedTuple):
    """The predicted seconds until a prompt's blocks have arrived, and the link's part of them."""

    total_s: float
    link_s: float


class LentTerms(msgspec.Struct, frozen=True):
    """The terms on which a site computes prompts of a model for another one now.

    The borrowing site's dispatcher and the router predict costs by them.
    """

    tokens_per_s: float  # prefill rate
    queue_s: float = 0.0  # time that the prompts of other sites will still take
    rtt_s: float = 0.0  # round trip between the sites
    link_tokens_per_s: float = 0.0  # tokens whose KV blocks the link carries in a second; 0 if blocks are free
    moving_tokens: int = 0  # tokens of earlier prompts whose blocks share the link
    error: float = FIRST_ERROR  # share by which earlier prompts took longer than predicted

    def cost(self, num_tokens: int, num_missing: int) -> LentCost:
        """Predict the cost of a prompt.

        It has `num_tokens`, of which `num_missing` are not cached at the borrowing site. The lender is assumed to have none of it cached.
        """
        compute_s = self.queue_s + num_tokens / self.tokens_per_s
        link_s = ROUND_TRIPS * self.rtt_s + exposed_s(
            num_missing + self.moving_tokens, self.link_tokens_per_s, compute_s
        )
        return LentCost(compute_s + link_s + HAND_OVER_S, link_s)

    def pays(self, cost: LentCost, here_s: float, queue_s: float, tokens_per_s: float) -> bool:
        """Tell whether it is better to have a prompt computed there than at the borrowing site.

        It would cost `here_s` at that site, of which it waits `queue_s`, and be computed at `tokens_per_s`. A loan can end early, because the lender
        has clients, too. That costs the prompt the time that it has waited longer there than here, and the tokens by which its blocks came more
        slowly than the site would have computed them.
        """
        arriving_per_s = min(self.tokens_per_s, self.link_tokens_per_s or self.tokens_per_s)
        pace = min(1.0, arriving_per_s * (1 + FIRST_ERROR) / tokens_per_s)
        limit_s = queue_s + pace * (here_s - queue_s) - max(0.0, self.queue_s - queue_s)
        return cost.total_s * (1 + self.error) < limit_s


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
