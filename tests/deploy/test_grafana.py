"""The dashboard of Grafana uses only metrics and labels that routers and sites publish."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.asgi import call
from tests.edge_router.fakes import router, sites
from tests.runtime.conftest import SiteMaker, make_site, model_directory  # noqa: F401

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "pilotlight.json"
LABELS = re.compile(r"by \(([^)]*)\)|\{\{(\w+)\}\}")
PROMETHEUS_OWN = {"le", "instance", "job"}
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", re.MULTILINE)
HELLO = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}


def targets() -> list[dict[str, Any]]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target for panel in panels for target in panel.get("targets", ())]


def labels_by_name(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE):
        found[name] |= set()
    for name, labels in SAMPLE.findall(text):
        found[name] |= set(re.findall(r'(\w+)="', labels))
    return found


async def published(make: SiteMaker, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Return the names of the labels of each metric that a router and a site publish after some requests."""
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    objective = {"model": "*", "answered": 0.9}
    tables = {
        "ledger": {"directory": str(directory / "ledger")},
        "quotas": {"store": "postgresql://127.0.0.1:9/nobody"},  # never contacted, as no account has a limit
        "objectives": [objective],
    }
    async with sites("ams1") as fakes, router(fakes, tables=tables) as running:
        async with running.chat() as response:
            await response.read()
        async with running.http.get(running.url + "/slo") as response:
            assert response.status == 200
        async with running.http.get(running.url + "/metrics") as response:
            of_router = await response.text()
    async with make() as site:
        assert (await call(site.app, "/v1/chat/completions", HELLO)).status == 200
        of_site = (await call(site.app, "/metrics")).body.decode()
    return labels_by_name(of_router) | labels_by_name(of_site)


def names_in(expression: str) -> set[str]:
    """Return the metric names in a PromQL expression: the words that are not functions, aggregations or labels."""
    bare = re.sub(r"by \([^)]*\)", "", expression)
    words = re.findall(r"[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()", re.sub(r"\[[^\]]*\]", "", bare))
    return set(words) - {"sum", "max", "min", "by"}


@pytest.mark.process
async def test_every_panel_asks_for_what_is_published(
    make_site: SiteMaker,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = await published(make_site, tmp_path, monkeypatch)
    asked: set[str] = set()
    for target in targets():
        names = names_in(target["expr"])
        assert names, target
        for name in names:
            family = re.sub(r"_(bucket|total)$", "", name)
            # a counter without samples is published without the suffix _total
            assert {name, family, f"{family}_total"} & known.keys(), f"{name} of {target['expr']} is not published"
            labels = known.get(name) or known.get(family) or set()
            for by, shown in LABELS.findall(target["expr"] + target["legendFormat"]):
                wanted = {label.strip() for label in (by or shown).split(",")} - PROMETHEUS_OWN
                assert not labels or wanted <= labels, f"{name} has {labels}, and {target} wants {wanted}"
        asked |= names
    assert len(asked) > 35


def test_a_panel_has_a_place_of_its_own_and_the_data_source_is_chosen() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for target in targets():
        assert target["datasource"]["uid"] == "${datasource}"


def test_names_are_found_in_expressions() -> None:
    assert names_in("histogram_quantile(0.5, sum by (le) (rate(a_bucket[$__rate_interval])))") == {"a_bucket"}
    assert names_in("sum(vllm:x) / max by (site, state) (b) == 1") == {"vllm:x", "b"}
