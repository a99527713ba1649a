"""The compared policies: ours, and those of other routers for model servers.

Policies with parameters use the best set of a grid on a tuning seed: `python -m load_tests.scenarios.routing --tune` tries the grids and prints the
best sets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from load_tests.sim.declining import DecliningPolicy
from load_tests.sim.oracle import OraclePolicy
from load_tests.sim.policies.least_outstanding import LeastOutstandingPolicy
from load_tests.sim.policies.llm_d import WeightedScoresPolicy
from load_tests.sim.policies.round_robin import RoundRobinPolicy
from load_tests.tables.routing import ORACLE, OURS, OURS_ALONE
from pilotlight.edge_router.routing.cost import Assumptions, CostPolicy
from pilotlight.edge_router.routing.views import BackendView, Policy, Preference, RouteRequest

Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    make_with: Callable[..., Policy]
    grid: Sequence[Parameters] = ({},)
    chosen: int = 0  # index in the grid

    def make(self) -> Policy:
        return self.make_with(**self.grid[self.chosen])


class AcceptingPolicy(CostPolicy):
    """Our policy at sites that never decline, which shows the value of its ranking alone."""

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        return [replace(preference, max_queue_ms=None) for preference in super().rank(request, backends)]


def _llm_d_declining(**weights: float) -> Policy:
    return DecliningPolicy(WeightedScoresPolicy(**weights), slack_ms=500.0)


LLM_D = tuple(
    {"prefix": prefix, "queue": queue, "kv": kv, "rtt": rtt}
    for prefix, queue, kv, rtt in (
        (3, 2, 2, 2), (3, 2, 2, 0), (3, 2, 2, 4), (3, 4, 1, 3), (6, 2, 1, 2), (2, 3, 1, 1), (6, 2, 1, 1), (6, 4, 1, 2), (6, 4, 1, 4),
        (8, 2, 1, 2), (6, 3, 2, 3), (4, 4, 1, 2), (6, 2, 0, 2), (10, 4, 1, 3), (6, 6, 1, 3), (4, 2, 1, 1),
    )
)  # fmt: skip

CONTENDERS = {
    OURS: Contender(CostPolicy, ({"assumptions": Assumptions()},)),
    OURS_ALONE: Contender(AcceptingPolicy, ({"assumptions": Assumptions()},)),
    "llm-d": Contender(WeightedScoresPolicy, LLM_D[:6], 4),
    "llm-d, declining": Contender(_llm_d_declining, LLM_D, 15),
    "least outstanding": Contender(LeastOutstandingPolicy),
    "round robin": Contender(RoundRobinPolicy),
    ORACLE: Contender(OraclePolicy),
}
