"""Experts on ranks whose loads are skewed as Zipf's law has it: the slowest rank's time as they are loaded, and placed by their loads, with and
without copies of the busiest: `make bench-experts` runs it: python -m load_tests.scenarios.expert_balance.

Every rank's part of a layer is computed by turns, in one process with one thread, as the ranks would compute it side by side; a layer takes as
long as the slowest of them.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch

from load_tests.records import write_record
from pilotlight.engine.layers.moe import Experts
from pilotlight.engine.parallel.placement import ExpertPlacement
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.plain import PlainWeight

_HIDDEN, _INNER = 768, 384
_RANKS = (2, 4)
_TOKENS = (16, 256)  # of a step
# Experts, of a token, Zipf's exponent, copies on each rank.
_SHAPES = (
    (32, 4, 1.0, 2),
    (32, 4, 2.0, 2),
    (8, 2, 1.0, 1),
)
_SEEN = 4096  # tokens by which experts are placed


class Skewed(NamedTuple):
    popularity: torch.Tensor  # [experts]
    top_k: int

    def route(self, tokens: int) -> torch.Tensor:
        """Return the experts of tokens, [tokens, top_k], each expert as likely as it is popular."""
        return torch.multinomial(self.popularity.expand(tokens, -1), self.top_k)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library.start(wait=True)
    rows = []
    for experts, top_k, skew, copies in _SHAPES:
        gate_up = torch.randn(experts, 2 * _INNER, _HIDDEN).mul_(0.02).bfloat16()
        down = torch.randn(experts, _HIDDEN, _INNER).mul_(0.02).bfloat16()
        tokens_go = Skewed((1.0 / torch.arange(1, experts + 1) ** skew)[torch.randperm(experts)], top_k)
        shape = {"experts": experts, "top_k": top_k, "zipf": skew, "copies_per_rank": copies}
        for ranks in _RANKS:
            for tokens in _TOKENS:
                found = _measure((ranks, copies), tokens, tokens_go, (gate_up, down), options.rounds)
                rows.append({**shape, "ranks": ranks, "tokens": tokens, "placements": found})
                _show(rows[-1])
    results = {"hidden": _HIDDEN, "intermediate": _INNER, "threads": 1, "rounds": options.rounds, "rows": rows}
    print(f"Record: {write_record('expert-balance', results)}")


def _show(row: dict[str, Any]) -> None:
    print(f"{row['experts']} experts, Zipf {row['zipf']}, {row['ranks']} ranks, {row['tokens']} tokens:")
    for name, of in row["placements"].items():
        print(
            f"  {name:28} slowest {of['slowest_ms']:6.2f} ms, mean {of['mean_ms']:6.2f} ms, pairs at most {of['most_pairs']:.2f} of even"
        )


def _measure(
    group: tuple[int, int], tokens: int, skewed: Skewed, matrices: tuple[torch.Tensor, torch.Tensor], rounds: int
) -> dict[str, Any]:
    """Return each placement's times.

    They are made of what earlier tokens went to. `group`: ranks, and copies on each."""
    (num_ranks, copies), (gate_up, down) = group, matrices
    num_experts = len(gate_up)
    loads = torch.bincount(skewed.route(_SEEN).flatten(), minlength=num_experts).tolist()
    first, spare = (ExpertPlacement.first(num_experts, num_ranks, each) for each in (0, copies))
    placements = {
        "as they are loaded": first,
        "by load": first.balanced(loads),
        "by load, with copies": spare.balanced(loads),
    }
    parts = {
        name: [
            Experts(PlainWeight(gate_up[list(slots)]), PlainWeight(down[list(slots)]), placement=placement, rank=rank)
            for rank, slots in enumerate(placement.slots)
        ]
        for name, placement in placements.items()
    }
    times: dict[str, list[list[float]]] = {name: [] for name in placements}
    for number in range(2 + rounds):
        x, ids = torch.randn(tokens, _HIDDEN).bfloat16(), skewed.route(tokens)
        weights, positions = torch.full((tokens, skewed.top_k), 1 / skewed.top_k), torch.randint(4096, (tokens,))
        for name, ranks in parts.items():
            taken = []
            for part in ranks:
                began = time.thread_time()
                part(x, weights, ids, positions)
                taken.append(1e3 * (time.thread_time() - began))
            if number >= 2:
                times[name].append(taken)
    return {
        name: {
            "slowest_ms": round(statistics.median(map(max, of)), 3),
            "mean_ms": round(statistics.median(map(statistics.fmean, of)), 3),
            "most_pairs": round(placements[name].slowest(loads) * num_ranks / sum(loads), 3),
        }
        for name, of in times.items()
    }


if __name__ == "__main__":
    main()
