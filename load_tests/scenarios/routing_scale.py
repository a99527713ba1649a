"""The processor time of a routing decision by number of sites, and the bytes of statuses.

A part of `make bench-routing`.
"""

import math
import random
import statistics
import tracemalloc
from collections.abc import Callable
from time import process_time
from typing import Any

from msgspec.structs import replace

from load_tests.sim.policies.llm_d import WeightedScoresPolicy
from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.rtt import RoundTrip
from pilotlight.edge_router.requests.session import ConversationFingerprint, Prefix, SessionTable
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.views import RouteRequest
from pilotlight.sites.config import PlaceConfig
from pilotlight.sites.network import HealthConfig, RelayConfig, SiteRef
from pilotlight.wire.hop.prefixes import MAX_PUBLISHED, changed_prefixes, decode_prefixes, encode_prefixes
from pilotlight.wire.hop.status import ModelStatus, Place, ProcessStatus, SiteStatus, encode_status

SITES = (25, 330, 5000)
DIGESTS = 32  # digests of a prompt, as many as a long conversation has
CHANGED_IN_10_S = 90  # new prefixes in ten seconds: three requests a second with three each
SAMPLES = 7
PRICED = 8_000  # approximate number of sites that one sample ranks, in several decisions
CONVERSATIONS, CONVERSATION_PREFIXES = (
    10_000_000,
    6,
)  # planned: open conversations in the whole network, and prefixes per conversation of three turns
PLANNED_SITES, ROUTERS = 330, 330


def decision_costs() -> dict[str, dict[str, float]]:
    """Return, by number of sites, the median CPU microseconds of our rank() and of a baseline's."""
    costs = {}
    for number in SITES:
        views = [backend.view() for backend in _backends(number)]
        digests = tuple((2**31 + i, 6000 - 150 * i) for i in range(DIGESTS))
        request = RouteRequest("m", 6000, b"key", held={"s3": 3000}, digests=digests, now_s=1.0)
        policy, baseline = CostPolicy(), WeightedScoresPolicy(rtt=1.0)
        costs[str(number)] = {
            "rank_us": _us(lambda: policy.rank(request, views), number),  # noqa: B023
            "llm_d_rank_us": _us(lambda: baseline.rank(request, views), number),  # noqa: B023
        }
    return costs


def status_bytes() -> dict[str, Any]:
    """Return the bytes of one status as JSON.

    Full statuses have the most prefixes that a site may publish, or none; statuses with changes only are given as a mean. Also returns the size of
    the session table.
    """
    full, empty = (encode_status(_status("s1", prefixes)) for prefixes in (MAX_PUBLISHED, 0))
    return {
        "full_bytes": len(full),
        "changes_bytes": _mean_of_changes(),
        "without_digest_bytes": len(empty),
        "sessions": planned_sessions(_table_entry_bytes()),
    }


def planned_sessions(prefix_bytes: float) -> dict[str, float]:
    """Return the planned size of session tables and digests for a large network.

    Each conversation belongs to one router.
    """
    entries = math.ceil(CONVERSATIONS / ROUTERS * CONVERSATION_PREFIXES)
    return {
        "conversations": CONVERSATIONS,
        "sites": PLANNED_SITES,
        "routers": ROUTERS,
        "prefixes": CONVERSATION_PREFIXES,
        "prefix_bytes": prefix_bytes,
        "conversation_bytes": CONVERSATION_PREFIXES * prefix_bytes,
        "entries": entries,
        "default_entries": RelayConfig().session_entries,
        "table_mib": round(entries * prefix_bytes / 2**20, 1),
        "published": round(min(1.0, MAX_PUBLISHED * PLANNED_SITES / (CONVERSATIONS * CONVERSATION_PREFIXES)), 4),
    }


def _mean_of_changes() -> float:
    """Return the mean size of a status with changes only.

    The site's cache is full, so each new prefix evicts one. The site updates its digest every ten seconds; a router requests it once a second.
    """
    draw, status = random.Random(1), _status("s1", MAX_PUBLISHED)
    held = list(decode_prefixes(status.models[0].prefixes))
    after = held[CHANGED_IN_10_S:] + [draw.randrange(2**31) for _ in range(CHANGED_IN_10_S)]
    sizes = []
    for came, gone in (changed_prefixes(encode_prefixes(held), encode_prefixes(after)), *[(b"", b"")] * 9):
        model = replace(status.models[0], prefixes=came, prefixes_dropped=gone)
        sizes.append(len(encode_status(replace(status, models=(model,), digests=2**47 + 1, digests_since=2**47))))
    return statistics.mean(sizes)


def _table_entry_bytes() -> float:
    """Return the memory of an entry in the session table: a prefix that one site holds."""
    entries = 20_000
    tracemalloc.start()
    table = SessionTable(entries, 3600.0, lambda: 0.0)
    for i in range(entries):
        table.learn(ConversationFingerprint.of(None, (Prefix(i.to_bytes(16, "big"), 100),), 100), f"site{i % 300}")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(held / len(table), 1)


def _backends(number: int) -> list[Backend]:
    rng = random.Random(number)
    backends = []
    for i in range(number):
        place = PlaceConfig(city="x", latitude=rng.uniform(-50, 60), longitude=rng.uniform(-180, 180))
        ref = SiteRef(name=f"s{i}", url="http://127.0.0.1", place=place)
        backend = Backend(ref, RoundTrip(rng.uniform(1, 300)), HealthConfig(), lambda: 1.0)
        backend.answered(_status(ref.name, 500, rng.randrange(20_000)), 0.5)
        backends.append(backend)
    return backends


def _status(name: str, prefixes: int, queued_tokens: int = 1000) -> SiteStatus:
    held = random.Random(name).sample(range(2**31), prefixes)
    model = ModelStatus(
        "m", "device", 1.0, 32_768, 20, 3, queued_tokens, 40_000, 60_000, 4500.0, 40.0, 900.0, prefixes=encode_prefixes(held),
        arriving_per_s=3.0, arriving_tokens_per_s=2000.0,
    )  # fmt: skip
    process = ProcessStatus("site", 1, name)
    return SiteStatus(name, "0", Place("x", 0.0, 0.0), 1, True, False, 23, 100, (model,), (process,))


def _us(call: Callable[[], object], number: int) -> float:
    samples, repeats = [], max(2, PRICED // number)
    for _ in range(SAMPLES):
        began = process_time()
        for _ in range(repeats):
            call()
        samples.append(1e6 * (process_time() - began) / repeats)
    return round(statistics.median(samples), 1)
