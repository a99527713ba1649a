"""The sizes and times that decide when a model's weights are mapped, coded and moved."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightLimits:
    # From this size on the engine serves from maps of the checkpoint, if it is stored in the model's form. A smaller model is copied in some 20
    # milliseconds, and is then in its final memory.
    in_place_from_bytes: int = 32 << 20
    in_place_share: float = 0.5  # the checkpoint is only mapped if at least this share of its bytes can be
    least_part_bytes: int = 64 << 10  # smaller parts of a tensor are copied, which costs less than to map each
    coded_share: float = 0.9  # a matrix is coded in 12 bits if that takes at most this share of its plain bytes
    move_after_s: float = 0.5  # delay of a move, because the request that woke the model comes first
    move_share: float = 0.25  # largest share of a core's time that a move takes
    unmap_after_s: float = 2.0  # after this time no step computes on the old pages any more, and they are unmapped


USUAL_LIMITS = WeightLimits()
