"""The alert rules are valid, fire only for their causes, use only published metrics, and have a runbook each."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.test_grafana import names_in, published
from tests.runtime.conftest import SiteMaker, make_site, model_directory  # noqa: F401

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "pilotlight.rules.yml"
PROMTOOL = shutil.which("promtool")
# Names that these tests do not see: a metric and an operator of Prometheus itself, and metrics that need TLS.
OTHERS = {"up", "or", "pilotlight_certificate_ends_seconds", "pilotlight_router_certificate_ends_seconds"}
pytestmark = pytest.mark.process


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_each_alert_is_fired_by_its_cause_and_by_nothing_else() -> None:
    for command in (["check", "rules", RULES.name], ["test", "rules", "pilotlight.tests.yml"]):
        done = subprocess.run([str(PROMTOOL), *command], cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> dict[str, str]:
    """Return the expression of each alert by the alert's name."""
    text = RULES.read_text()
    found = re.findall(r"- alert: (\w+)\n\s+expr: (?:>-\n)?(.*?)\n\s+(?:for|labels):", text, re.DOTALL)
    assert len(found) == text.count("- alert:")
    return dict(found)


async def test_alerts_use_published_metrics(
    make_site: SiteMaker,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = await published(make_site, tmp_path, monkeypatch)
    for alert, expression in alerts().items():
        for name in names_in(re.sub(r"\{[^}]*\}", "", expression)) - {"and"} - OTHERS:
            if re.fullmatch(r"[\d.]+", name):
                continue
            family = re.sub(r"_total$", "", name)
            assert {name, family} & known.keys(), f"{alert} asks for {name}, which is not published"


def test_each_alert_has_a_runbook() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    for alert in alerts():
        assert f"**{alert}**" in page
