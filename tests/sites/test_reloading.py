"""Reloading a configuration file while its process serves requests."""

import logging
from pathlib import Path

import pytest

from pilotlight.edge_router.serve import LIVE
from pilotlight.sites.network import NetworkConfig, load_network
from pilotlight.sites.reloading import read_again

PLACE = '{ city = "A", latitude = 0.0, longitude = 0.0 }'


def network(file: Path, head: str = "", door: str = "") -> NetworkConfig:
    file.write_text(
        f'{head}\nplace = {PLACE}\n[listen]\nport = 0\n[door]\n{door}\n[[sites]]\nname = "ams1"\nurl = "http://127.0.0.1:1"\nplace = {PLACE}\n'
    )
    return load_network(file)


@pytest.mark.parametrize(
    ("door", "says"),
    [
        ("", "was read again"),
        ("max_open_per_client = 7", "was read again"),
        ("max_open_per_client = 7\nmax_headers = 99", "was read again; a restart is needed for door.max_headers"),
    ],
)
def test_what_cannot_be_taken_over_is_named(
    door: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "network.toml"
    running = network(file)
    network(file, door=door)
    with caplog.at_level(logging.WARNING):
        found = read_again(running, file, load_network, ("door.max_open_per_client",))
    assert found == load_network(file)
    assert caplog.messages == [f"SIGHUP: {file} {says}"]


def test_a_table_that_is_taken_over_needs_no_restart_for_a_key_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "network.toml"
    running = network(file)
    network(file, head="tenant_limits = { requests_per_min = 5 }")
    read_again(running, file, load_network, LIVE)
    assert caplog.messages == [f"SIGHUP: {file} was read again"]


def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "network.toml"
    running = network(file)
    file.write_text("plaec = 1\n")
    assert read_again(running, file, load_network, ()) is None
    assert f"{file} is invalid, so the previous configuration stays in use" in caplog.text
    assert "plaec" in caplog.text
