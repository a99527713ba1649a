"""The ledger's record of a request, and the messages with which a router collects functions' usage.

The record has two parts: the facts at the request's start, and its result.
"""

from typing import Literal

import msgspec

from pilotlight.wire.hop.usage import ResourceUse

# complete: the client got everything; cut: it left early, or no site could continue; recovered: the router was killed before the end.
Outcome = Literal["complete", "cut", "recovered"]


class MeteredRequest(msgspec.Struct, frozen=True):
    """A request in progress.
    The ledger assigns its id, because a client may send the same request id several times, or that of another request."""

    id: str
    request_id: str
    account: str  # empty for an unknown key, or without a key
    key: str
    model: str  # the model's own name if a known site has it, otherwise the name in the request
    started_s: float  # seconds since the epoch
    adapter: str = ""
    bytes_in: int = 0  # size of its body
    function: str = ""  # the function that made the request inside its site, or whose CPU time the record counts
    is_sent_again: bool = False  # another process sends it again, under the same id, if this one is killed


class UsageRecord(msgspec.Struct, frozen=True):
    request: MeteredRequest
    site: str  # the site that answered last
    ended_s: float
    outcome: Outcome
    use: ResourceUse
    bytes_out: int = 0  # size of the answer's body, as sent
    cost: int | None = None  # billionths of the currency; None without a price
    cpu_us: int = 0  # CPU time of a function's processes


USAGE_PATH = "/internal/usage"


class UsageAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST USAGE_PATH, router -> site."""

    ledger: str  # id of the router's ledger; a site gives each record to one ledger only
    written: tuple[str, ...] = ()  # ids of records that the ledger now has


class UsageTold(msgspec.Struct, frozen=True):
    """Site -> router: records that the ledger has not confirmed to have written.
    The site may have more, which it sends when these are confirmed."""

    records: tuple[UsageRecord, ...]
