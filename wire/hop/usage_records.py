"""The ledger's record of a request, and the messages with which a router collects functions' usage.

The record has two parts: the facts at the request's start, and its result.
"""

from typing import Literal

import msgspec

from pilotlight.wire.hop.usage import ResourceUse

# complete: the client got everything; cut: it left early, or no site could continue; recovered: the router died first.
Outcome = Literal["complete", "cut", "recovered"]


class MeteredRequest(msgspec.Struct, frozen=True):
    """A request in progress.
    Its id is the ledger's own: a client may send the id of another request, and the same one twice."""

    id: str
    request_id: str
    account: str  # empty: of a key that is not known, or of none
    key: str
    model: str  # the model's own name if a site with it is known, otherwise the name in the request
    started_s: float  # since the epoch
    part: str = ""  # of the journal that keeps the answer of a durable stream
    adapter: str = ""
    bytes_in: int = 0  # of its body
    function: str = ""  # the function that made the request inside its site, or that computed


class UsageRecord(msgspec.Struct, frozen=True):
    request: MeteredRequest
    site: str  # the site that answered last
    ended_s: float
    outcome: Outcome
    use: ResourceUse
    bytes_out: int = 0  # of the answer's body, as it was sent
    cost: int | None = None  # in billionths of the currency; None if there was no price
    cpu_us: int = 0  # of a function's processes


USAGE_PATH = "/internal/usage"


class UsageAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router -> site: POST USAGE_PATH."""

    ledger: str  # the router's ledger, for which a site keeps records that it has handed over
    written: tuple[str, ...] = ()  # ids of records that are in it by now


class UsageTold(msgspec.Struct, frozen=True):
    """Site -> router: records that the ledger does not have, as far as the site knows.
    More may follow when these are written."""

    records: tuple[UsageRecord, ...]
