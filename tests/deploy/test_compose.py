"""The network of compose.yaml: its files are valid, its commands exist, and its names and ports match."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pilotlight.sites.network import load_network
from pilotlight.sites.site import load_site

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return found


def test_every_file_that_is_mounted_is_there_and_every_volume_is_declared(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).is_file(), f"{name}: {source}"
            else:
                assert source in compose["volumes"], f"{name}: {source}"


def test_sites_listen_where_the_router_looks_for_them_and_are_probed_there(compose: dict[str, Any]) -> None:
    network = load_network(FOLDER / "network.toml")
    assert len(network.sites) == 2
    for ref in network.sites:
        site, url = load_site(FOLDER / f"{ref.name}.toml"), urlsplit(ref.url)
        service = compose["services"][url.hostname]
        assert (site.name, site.listen.port, site.listen.require_hop) == (ref.name, url.port, True)
        assert service["environment"]["PILOTLIGHT_PORT"] == str(url.port)
        assert service["command"] == ["site", f"/etc/pilotlight/{ref.name}.toml"]
    assert compose["services"]["router"]["ports"] == [f"127.0.0.1:{network.listen.port}:{network.listen.port}"]
    assert urlsplit(network.ledger.store).hostname in compose["services"]


def test_our_containers_keep_no_rights_and_write_to_volumes_alone(compose: dict[str, Any]) -> None:
    for name in ("router", "ams1", "iad1"):
        service = compose["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        drain_s = (
            load_network(FOLDER / "network.toml").relay.drain_timeout_s
            if name == "router"
            else load_site(FOLDER / f"{name}.toml").limits.drain_timeout_s
        )
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s


def test_prometheus_reads_the_alerts_and_asks_the_router() -> None:
    found = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert found["rule_files"] == ["pilotlight.rules.yml"]
    (job,) = found["scrape_configs"]
    assert job["job_name"] == "pilotlight"  # the alerts refer to it by this name
    assert job["static_configs"] == [{"targets": ["router:8787"]}]
