"""What a router tells a site of one model, signed as a hop: POST WAKE_PATH (a request for it is on its way), POST SLEEP_PATH (an operator wants it to
sleep). Also the answer."""

import msgspec

from pilotlight.wire.hop.status import Residency

WAKE_PATH = "/internal/wake"
SLEEP_PATH = "/internal/sleep"


class WakeHint(msgspec.Struct, frozen=True):
    model: str


class WakeAnswer(msgspec.Struct, frozen=True):
    model: str  # its own name
    residency: Residency  # now: "loading" where the hint, or somebody before it, has begun to wake it
