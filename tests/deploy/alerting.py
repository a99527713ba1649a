"""Find the alerts that Prometheus would fire with the shipped rules, from the metrics that processes really publish.

Metrics are scraped before and after a fault. promtool then evaluates the rules as if Prometheus had scraped the first values for half an hour and the
second ones from then on, so a rule's `for` and its windows pass without waiting.
"""

import re
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "pilotlight.rules.yml"
STEPS_BEFORE = 60  # of 30 s
EVALUATED_MIN = (31, 33, 36, 41)  # after the longest `for` of 10 minutes, and within the shortest window of 10 minutes
ENDS = "certificate_ends_seconds"


class Series(NamedTuple):
    name: str
    labels: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.name}{{{', '.join(f'{name}={msgspec.json.encode(value).decode()}' for name, value in self.labels)}}}"


Scrape = dict[Series, float]


def scrape(*urls: str, trust: ssl.SSLContext | None = None) -> Scrape:
    """Return the samples of each process's /metrics with the labels that Prometheus adds, and `up`."""
    found: Scrape = {}
    for url in urls:
        added = (("instance", url.partition("://")[2]), ("job", "pilotlight"))
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10, context=trust) as response:
                text = response.read().decode()
        except OSError:
            found[Series("up", added)] = 0.0
            continue
        found[Series("up", added)] = 1.0
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        for sample in samples:
            # promtool's clock begins at 0
            value = sample.value - time.time() if sample.name.endswith(ENDS) else sample.value
            found[Series(sample.name, (*sample.labels.items(), *added))] = value
    return found


def firing(folder: Path, before: Scrape, after: Scrape) -> set[str]:
    """Return the names of the alerts that fire some time after the change."""
    rules = RULES.read_text()
    wanted = sorted(series for series in {*before, *after} if re.search(rf"\b{series.name}\b", rules))
    told = [
        {
            "series": str(series),
            "values": f"{_held(before.get(series), STEPS_BEFORE)} {_held(after.get(series), STEPS_BEFORE)}",
        }
        for series in wanted
    ]
    asked = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": []}
        for minute in EVALUATED_MIN
    ]
    test = {"interval": "30s", "input_series": told, "promql_expr_test": asked}
    file = folder / "fired.yml"
    file.write_bytes(msgspec.json.encode({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in output, output
    return set(re.findall(r'alertname="(\w+)"', output))


def _held(value: float | None, steps: int) -> str:
    """Return a value that is scraped `steps` times, in promtool's notation; None if there was none."""
    return f"_x{steps}" if value is None else f"{value:f}x{steps}"
