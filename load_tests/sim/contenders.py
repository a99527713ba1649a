"""Who is compared, each with the parameters that did best on a tuning seed, from a grid of six; of sixteen, those that come nearest to ours.

`python -m load_tests.scenarios.routing --tune` tries the grids and says which set is best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from load_tests.sim.declining import DecliningPolicy
from load_tests.sim.oracle import OraclePolicy
from load_tests.sim.policies.dynamo import DynamoPolicy
from load_tests.sim.policies.gorgo import GorgoPolicy
from load_tests.sim.policies.header_affinity import HeaderAffinityPolicy
from load_tests.sim.policies.least_outstanding import LeastOutstandingPolicy
from load_tests.sim.policies.llm_d import WeightedScoresPolicy
from load_tests.sim.policies.nearest import NearestPolicy
from load_tests.sim.policies.power_of_two import PowerOfTwoPolicy
from load_tests.sim.policies.round_robin import RoundRobinPolicy
from load_tests.sim.policies.smg_cache_aware import CacheAwarePolicy
from load_tests.sim.preble import PreblePolicy
from load_tests.sim.skywalker import SkyWalkerPolicy
from load_tests.sim.trouble import NONE, Trouble
from load_tests.tables.routing import ORACLE, OURS, OURS_ALONE
from pilotlight.edge_router.routing.cost import Assumptions, CostPolicy
from pilotlight.edge_router.routing.views import BackendView, Policy, Preference, RouteRequest

Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    make_with: Callable[..., Policy]
    grid: Sequence[Parameters] = ({},)
    chosen: int = 0  # of the grid
    trouble: Trouble = NONE  # Dynamo's sites publish as often as it would have them

    def make(self) -> Policy:
        return self.make_with(**self.grid[self.chosen])


class AcceptingPolicy(CostPolicy):
    """Ours without the sites' help: none declines. What its ranking alone is worth."""

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        return [replace(preference, max_queue_ms=None) for preference in super().rank(request, backends)]


def _gorgo_declining(**weights: float) -> Policy:
    return DecliningPolicy(GorgoPolicy(**weights))


def _llm_d_declining(**weights: float) -> Policy:
    return DecliningPolicy(WeightedScoresPolicy(**weights), slack_ms=500.0, has_ms=False)


def _preble_declining(**chosen: float) -> Policy:
    return DecliningPolicy(PreblePolicy(**chosen))


def _dynamo_declining(**chosen: Any) -> Policy:
    return DecliningPolicy(DynamoPolicy(**chosen), slack_ms=500.0, has_ms=False)


def _weights(*sets: tuple[float, float, float]) -> tuple[Parameters, ...]:
    return tuple({"rtt_weight": rtt, "queue_weight": queue, "prefill_weight": prefill} for rtt, queue, prefill in sets)


def _scores(*sets: tuple[float, float, float, float]) -> tuple[Parameters, ...]:
    return tuple({"prefix": prefix, "queue": queue, "kv": kv, "rtt": rtt} for prefix, queue, kv, rtt in sets)


ASSUMED = ({"assumptions": Assumptions()},)
GORGO = _weights(
    (1, 1, 1), (1, 0.5, 2), (1, 1, 2), (1, 1, 4), (1, 0.5, 4), (1, 2, 1), (1, 1.5, 1), (1, 1, 1.5), (1, 1.5, 1.5), (1, 2, 2), (1, 1.5, 2),
    (1, 0.75, 1), (2, 1, 1), (0.5, 1, 1), (1, 1.25, 1.25), (1, 2, 3),
)  # fmt: skip
LLM_D = _scores(
    (3, 2, 2, 2), (3, 2, 2, 0), (3, 2, 2, 4), (3, 4, 1, 3), (6, 2, 1, 2), (2, 3, 1, 1), (6, 2, 1, 1), (6, 4, 1, 2), (6, 4, 1, 4), (8, 2, 1, 2),
    (6, 3, 2, 3), (4, 4, 1, 2), (6, 2, 0, 2), (10, 4, 1, 3), (6, 6, 1, 3), (4, 2, 1, 1),
)  # fmt: skip
PREBLE = tuple(
    {"exploit_share": share, "imbalance_ms": most}
    for share, most in (
        (0.5, 2000.0), (0.5, 500.0), (0.5, 1000.0), (0.5, 4000.0), (0.3, 2000.0), (0.7, 2000.0), (0.5, 8000.0), (0.3, 4000.0), (0.7, 4000.0),
        (0.3, 8000.0), (0.5, 6000.0), (0.4, 4000.0), (0.2, 4000.0), (0.6, 8000.0), (0.3, 1000.0), (0.7, 8000.0),
    )
)  # fmt: skip
DYNAMO = tuple(
    {"overlap_weight": weight, "temperature": temperature}
    for weight, temperature in ((1, 0.0), (1, 0.1), (1, 0.5), (2, 0.0), (2, 0.1), (0.5, 0.1))
)
SMG = tuple(
    {"cache_share": share, "balance_abs": most, "balance_rel": times}
    for share, most, times in (
        (0.3, 64, 1.5),
        (0.5, 32, 1.1),
        (0.5, 4, 1.1),
        (0.5, 2, 1.5),
        (0.3, 2, 1.1),
        (0.5, 1, 1.1),
    )
)  # per router, which sees a small part of a site's load: so lower ones than its own defaults are tried, too
SKYWALKER = tuple(
    {"max_waiting": most, "match_share": share}
    for most, share in ((2, 0.5), (1, 0.5), (3, 0.5), (4, 0.3), (2, 0.3), (8, 0.5))
)
DYNAMO_PUBLISHES = Trouble("statuses are 0.1 s apart", publish_s=0.1)

CONTENDERS = {
    OURS: Contender(CostPolicy, ASSUMED),
    OURS_ALONE: Contender(AcceptingPolicy, ASSUMED),
    "GORGO": Contender(GorgoPolicy, GORGO[:6], 2),
    "GORGO, declining": Contender(_gorgo_declining, GORGO),
    "llm-d": Contender(WeightedScoresPolicy, LLM_D[:6], 4),
    "llm-d, declining": Contender(_llm_d_declining, LLM_D, 15),
    "Preble": Contender(PreblePolicy, PREBLE[:6], 3),
    "Preble, declining": Contender(_preble_declining, PREBLE, 9),
    "SkyWalker": Contender(SkyWalkerPolicy, SKYWALKER, 5),
    "Dynamo": Contender(DynamoPolicy, DYNAMO, 3, DYNAMO_PUBLISHES),
    "Dynamo, declining": Contender(_dynamo_declining, DYNAMO, 3, DYNAMO_PUBLISHES),
    "SMG cache-aware": Contender(CacheAwarePolicy, SMG, 3),
    "power of two": Contender(PowerOfTwoPolicy),
    "least outstanding": Contender(LeastOutstandingPolicy),
    "round robin": Contender(RoundRobinPolicy),
    "nearest": Contender(NearestPolicy),
    "header affinity": Contender(HeaderAffinityPolicy),
    ORACLE: Contender(OraclePolicy),
}
