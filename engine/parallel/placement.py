"""Assigns a layer's experts to ranks so that loads are balanced, with copies of busy experts.

An expert's load is divided among its copies, which are placed largest first, as in DeepSeek's expert-parallel load balancer (DeepSeek-V3 technical
report, section 3.4). This module knows counts, and is independent of weights.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple


class ExpertPlacement(NamedTuple):
    """The expert in every slot of every rank."""

    slots: tuple[tuple[int, ...], ...]

    @classmethod
    def first(cls, num_experts: int, num_ranks: int, spare: int) -> "ExpertPlacement":
        """Return a placement of consecutive experts on each rank, with the next experts in spare slots.

        It is used until loads are known.
        """
        size = num_experts // num_ranks
        starts = [rank * size for rank in range(num_ranks)]
        return cls(tuple(tuple((start + i) % num_experts for i in range(size + spare)) for start in starts))

    @property
    def num_experts(self) -> int:
        return len({expert for slots in self.slots for expert in slots})

    def ranks_of(self, expert: int) -> list[int]:
        return [rank for rank, slots in enumerate(self.slots) if expert in slots]

    def slowest(self, loads: Sequence[int]) -> float:
        """Return the load of the busiest rank."""
        copies = [len(self.ranks_of(expert)) for expert in range(len(loads))]
        return max(sum(loads[expert] / copies[expert] for expert in set(slots)) for slots in self.slots)

    def balanced(self, loads: Sequence[int]) -> "ExpertPlacement":
        """Return a balanced placement for these loads; an expert that stays on a rank keeps its slot."""
        num_ranks, num_slots = len(self.slots), len(self.slots[0])
        copies = _copies(loads, num_ranks, num_ranks * num_slots)
        each = sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert))
        taken: list[list[int]] = [[] for _ in self.slots]
        of_rank = [0.0] * num_ranks
        # Experts with several copies are placed first, because each copy needs a slot on another rank.
        for expert in sorted(each, key=lambda expert: copies[expert] == 1):
            for _ in range(copies[expert]):
                open_ranks = [r for r in range(num_ranks) if len(taken[r]) < num_slots and expert not in taken[r]]
                if not open_ranks:
                    continue  # all ranks with free slots have the expert already; these slots keep their content
                rank = min(open_ranks, key=lambda r: (of_rank[r], r))
                taken[rank].append(expert)
                of_rank[rank] += loads[expert] / copies[expert]
        return ExpertPlacement(tuple(_arranged(old, new) for old, new in zip(self.slots, taken, strict=True)))


def _copies(loads: Sequence[int], num_ranks: int, num_slots: int) -> list[int]:
    """Give every expert a copy, and each further copy to the expert with the highest load per copy."""
    copies = [1] * len(loads)
    heap = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(num_slots - len(loads)):
        _, expert = heap[0]
        copies[expert] += 1
        done = copies[expert] == num_ranks  # every rank has a copy
        heapreplace(heap, (1.0 if done else -loads[expert] / copies[expert], expert))
        if all(load > 0 for load, _ in heap):
            break
    return copies


def _arranged(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Put a rank's experts into its slots; those that stay keep their slots.

    A slot that no expert needs keeps its content, which is a copy of an expert that another rank has.
    """
    staying = set(old) & set(new)
    slots = [expert if expert in staying else None for expert in old]
    coming = [expert for expert in new if expert not in staying]
    for i, expert in enumerate(slots):
        if expert is None and coming:
            slots[i] = coming.pop(0)
    return tuple(old[i] if expert is None else expert for i, expert in enumerate(slots))
