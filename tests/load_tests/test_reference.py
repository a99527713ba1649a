"""The reference pages have an entry for every configuration key, metric, operation, command and error code, and build without broken links."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from prometheus_client import CollectorRegistry
from typer.main import get_command

from load_tests import book
from load_tests.reference import FOLDER, PAGES, declared_metrics
from pilotlight.edge_router.telemetry.metrics import RouterMetrics
from pilotlight.runtime.cli.commands import app
from pilotlight.runtime.telemetry.metrics import Metrics
from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import SiteConfig
from pilotlight.sites.table import Table
from pilotlight.wire.errors import ERRORS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "the page is stale: run make reference"


@pytest.mark.parametrize("file", [SiteConfig, NetworkConfig], ids=lambda file: file.__name__)
def test_every_configuration_key_has_an_entry_with_its_meaning(file: type[Table]) -> None:
    page = (FOLDER / "configuration.md").read_text(encoding="utf-8")
    keys = keys_of(file, "")
    assert len(keys) > 40
    missing = [
        key for key in keys if not re.search(rf"^\| `{re.escape(key)}` \|.*\| [A-Z\"].+ \|$", page, re.MULTILINE)
    ]
    missing_lower = [key for key in missing if f"| `{key}` |" not in page]
    assert missing_lower == [], "keys without an entry"
    assert [key for key in missing if key not in missing_lower and "| |" in line_of(key, page)] == [], (
        "without a meaning"
    )


def line_of(key: str, page: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| `{key}` |"))


def keys_of(kind: type[Table], prefix: str) -> list[str]:
    """List the keys of a table and of its inner tables, in the notation of the page."""
    found = []
    for field in msgspec.structs.fields(kind):
        found.append(f"{prefix}{field.encode_name}")
        for inner, by_name in tables_in(inspect.type_info(field.type)):
            found += keys_of(inner, f"{prefix}{field.encode_name}{'.NAME' if by_name else ''}.")
    return found


def tables_in(kind: inspect.Type) -> list[tuple[type[Table], bool]]:
    match kind:
        case inspect.Metadata(type=inner):
            return tables_in(inner)
        case inspect.StructType(cls=table):
            return [(table, False)]
        case inspect.VarTupleType(item_type=inner):
            return tables_in(inner)
        case inspect.DictType(value_type=inner):
            return [(table, True) for table, _ in tables_in(inner)]
        case inspect.UnionType(types=types):
            return [found for each in types for found in tables_in(each)]
    return []


def test_every_metric_of_a_scrape_has_an_entry() -> None:
    site = Metrics("ams1")
    site.watch(list, {}, list)
    router = RouterMetrics([])
    for registry, package in ((site.registry, "runtime"), (router.registry, "edge_router")):
        known = {metric.name for metric in declared_metrics(package)}
        assert names_of(registry) - known == set()


def names_of(registry: CollectorRegistry) -> set[str]:
    ours = {family.name for family in registry.collect() if family.name.startswith(("pilotlight_", "vllm:"))}
    return {name for name in ours if not name.startswith("pilotlight_gpu_")}


def test_every_metric_has_its_labels_and_a_meaning() -> None:
    known = {metric.name: metric for package in ("runtime", "edge_router") for metric in declared_metrics(package)}
    assert known["pilotlight_wake_ms"].labels == ("model_name", "clock")
    assert known["pilotlight_router_site_state"].labels == ("site", "state")
    assert known["vllm:num_requests_running"].labels == ("model_name", "engine")
    assert known["pilotlight_router_wake_hints"].labels == ("site", "outcome")
    assert [metric.name for metric in known.values() if len(metric.meaning) < 8] == []


def test_every_error_word_has_an_entry_with_its_status() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^### `(\w+)` \((\d+).*\)\n\S", page, re.MULTILINE))
    assert entries == {word: str(kind.status) for word, kind in ERRORS.items()}
    other = re.findall(r"^### `(\w+)` \(.*Workers AI (\d+)\)$", page, re.MULTILINE)
    assert dict(other) == {
        word: str(kind.workers_ai_status) for word, kind in ERRORS.items() if kind.workers_ai_status != kind.status
    }


def test_every_page_of_the_documentation_is_in_the_navigation() -> None:
    named = set(book.pages())
    assert {path.relative_to(book.ROOT).as_posix() for path in DOCS.rglob("*.md")} - named == set()
    assert [page for page in named if not (book.ROOT / page).is_file()] == []


@pytest.mark.process
@pytest.mark.long
def test_the_documentation_builds_without_a_warning() -> None:
    pytest.importorskip("zensical", reason="pip install -e '.[dev]' installs it")
    assert book.main() == 0


def test_every_option_of_a_command_has_its_own_name() -> None:
    sections = (FOLDER / "commands.md").read_text(encoding="utf-8").split("\n## ")
    page = {section.splitlines()[0].strip("`"): set(re.findall(r"`(--?[a-z][a-z-]*)", section)) for section in sections}
    assert len(page) > 40
    for name, command in leaves("pilotlight", get_command(app)):
        names = [param.opts for param in command.params if param.param_type_name == "option" and not param.hidden]
        assert [opts for opts in names if opts != ["--help"] and not page[name].issuperset(opts)] == [], name


def leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the visible commands of a command line, with the words that run them."""
    if not hasattr(command, "commands"):
        yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from leaves(f"{name} {word}", inner)
