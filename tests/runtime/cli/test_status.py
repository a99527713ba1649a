"""`pilotlight status` for models: where their weights are, and why one is unavailable."""

from typing import Any

import pytest

from pilotlight.runtime.cli.status import print_models, print_residency, print_sites
from tests.runtime.cli.stored_api import StoredApi

AWAKE = {"name": "llama", "residency": "device", "in_host_memory": False, "running": 3, "waiting": 1, "detail": ""}
FAILED = {"name": "[bold]qwen", "residency": "failed", "in_host_memory": True, "detail": "the disk is [full]"}


def said(status: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    print_residency(status)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_every_model_of_a_site_is_listed_with_where_it_is_and_where_it_sleeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said({"site": "ams1", "models": [AWAKE, FAILED]}, capsys) == [
        ["model", "site", "residency", "sleeps", "on", "running", "waiting", "detail"],
        ["llama", "ams1", "device", "disk", "3", "1"],
        ["[bold]qwen", "ams1", "failed", "host", "0", "0", "the", "disk", "is", "[full]"],
    ]


def test_models_are_listed_with_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    llama = {"id": "llama", "type": "completion", "context_length": 8192, "owned_by": "pilotlight"}
    models = [llama | {"weights_bytes": 3 << 30, "saved_bytes": 1 << 30}, {"id": "asleep"}]
    print_models(StoredApi({"data": models}), as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["model", "type", "context", "weights", "saved", "owned", "by"],
        ["llama", "completion", "8192", "3,072", "MiB", "1,024", "MiB", "pilotlight"], ["asleep"],
    ]  # fmt: skip


def test_a_router_lists_what_its_sites_have_published(capsys: pytest.CaptureFixture[str]) -> None:
    views = [{"site": "ams1", "status": {"site": "ams1", "models": [AWAKE]}}, {"site": "iad1", "status": None}]
    assert said({"sites": views}, capsys)[1:] == [["llama", "ams1", "device", "disk", "3", "1"]]
    assert said({"sites": views[1:]}, capsys) == []


def test_a_site_is_listed_with_its_version_age_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    site = {"site": "ams1", "version": "0.1", "uptime_s": 3725.0, "inflight": 2, "max_inflight": 256}
    print_sites({"sites": [{"status": site}, {"status": None}]})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["site", "version", "up", "requests", "of"], ["ams1", "0.1", "1:02:05", "2", "256"],
    ]  # fmt: skip
