"""A router's hint to a site that a request for a model is on its way: POST WAKE_PATH, signed as a hop. Also its answer."""

import msgspec

from wire.status import Residency

WAKE_PATH = "/internal/wake"


class WakeHint(msgspec.Struct, frozen=True):
    model: str


class WakeAnswer(msgspec.Struct, frozen=True):
    model: str  # its own name
    residency: Residency  # now: "loading" where the hint, or somebody before it, has begun to wake it
