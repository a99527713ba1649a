"""The hint that a router sends a site about one model, signed as a hop: POST WAKE_PATH (a request is coming). Also the answer."""

import msgspec

from pilotlight.wire.hop.status import Residency

WAKE_PATH = "/internal/wake"


class WakeHint(msgspec.Struct, frozen=True):
    model: str


class WakeAnswer(msgspec.Struct, frozen=True):
    model: str  # its own name
    residency: Residency  # the present state: "loading" if this hint or an earlier request started its wake
