"""Which rank has which of a layer's experts: as even as their loads allow, with further copies of those that most tokens go to.

Loads are divided among copies and packed, largest first, as in DeepSeek's description of their expert-parallel load balancer (DeepSeek-V3 technical
report, section 3.4). Knows counts; refuses to know weights.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple


class ExpertPlacement(NamedTuple):
    """The expert in every slot of every rank."""

    slots: tuple[tuple[int, ...], ...]

    @classmethod
    def first(cls, num_experts: int, num_ranks: int, spare: int) -> "ExpertPlacement":
        """Return runs of experts, and in the spare slots of each rank copies of those behind its run, before anything is known of loads."""
        size = num_experts // num_ranks
        starts = [rank * size for rank in range(num_ranks)]
        return cls(tuple(tuple((start + i) % num_experts for i in range(size + spare)) for start in starts))

    @property
    def num_experts(self) -> int:
        return len({expert for slots in self.slots for expert in slots})

    def ranks_of(self, expert: int) -> list[int]:
        return [rank for rank, slots in enumerate(self.slots) if expert in slots]

    def slowest(self, loads: Sequence[int]) -> float:
        """Return the load of the rank that has most."""
        copies = [len(self.ranks_of(expert)) for expert in range(len(loads))]
        return max(sum(loads[expert] / copies[expert] for expert in set(slots)) for slots in self.slots)

    def balanced(self, loads: Sequence[int]) -> "ExpertPlacement":
        """Return the placement for such loads; an expert that stays on a rank stays in its slot."""
        num_ranks, num_slots = len(self.slots), len(self.slots[0])
        copies = _copies(loads, num_ranks, num_ranks * num_slots)
        each = sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert))
        taken: list[list[int]] = [[] for _ in self.slots]
        of_rank = [0.0] * num_ranks
        # Those with most copies first, among equals: an expert has at most one on each rank.
        for expert in sorted(each, key=lambda expert: copies[expert] == 1):
            for _ in range(copies[expert]):
                open_ranks = [r for r in range(num_ranks) if len(taken[r]) < num_slots and expert not in taken[r]]
                if not open_ranks:
                    continue  # the slots that are left are on ranks that have it: they stay as they are
                rank = min(open_ranks, key=lambda r: (of_rank[r], r))
                taken[rank].append(expert)
                of_rank[rank] += loads[expert] / copies[expert]
        return ExpertPlacement(tuple(_arranged(old, new) for old, new in zip(self.slots, taken, strict=True)))


def _copies(loads: Sequence[int], num_ranks: int, num_slots: int) -> list[int]:
    """Give every expert a copy, and each that is left to the one whose copies have most to do."""
    copies = [1] * len(loads)
    heap = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(num_slots - len(loads)):
        _, expert = heap[0]
        copies[expert] += 1
        done = copies[expert] == num_ranks  # on every rank
        heapreplace(heap, (1.0 if done else -loads[expert] / copies[expert], expert))
        if all(load > 0 for load, _ in heap):
            break
    return copies


def _arranged(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Put a rank's experts into its slots: those that stay where they are, the others into what is left. A slot that is wanted by none keeps its own
    where that is another's copy."""
    staying = set(old) & set(new)
    slots = [expert if expert in staying else None for expert in old]
    coming = [expert for expert in new if expert not in staying]
    for i, expert in enumerate(slots):
        if expert is None and coming:
            slots[i] = coming.pop(0)
    return tuple(old[i] if expert is None else expert for i, expert in enumerate(slots))
