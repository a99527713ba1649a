"""What the ledger keeps of a request: what is known when it begins, and what it came to."""

from typing import Literal

import msgspec

from wire.usage import ResourceUse

# complete: its client was sent the end; cut: it left before, or no site could go on; recovered: the router died first.
Outcome = Literal["complete", "cut", "recovered"]


class MeteredRequest(msgspec.Struct, frozen=True):
    """A request under way. Its id is the ledger's own: a client may send the id of another request, and the same one twice."""

    id: str
    request_id: str
    account: str  # empty: of a key that is not known, or of none
    key: str
    model: str  # its own name, where a site that has it tells; else as the request has it
    started_s: float  # since the epoch
    part: str = ""  # of the journal that keeps the answer of a durable stream
    adapter: str = ""
    bytes_in: int = 0  # of its body


class UsageRecord(msgspec.Struct, frozen=True):
    request: MeteredRequest
    site: str  # that answered last
    ended_s: float
    outcome: Outcome
    use: ResourceUse
    bytes_out: int = 0  # of the answer's body, as it was sent
    cost: int | None = None  # in billionths of the currency; None: there was no price
