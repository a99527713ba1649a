"""Secrets of functions at a router, in a file that several workers read."""

from pathlib import Path

import pytest

from pilotlight.edge_router.services.function_secrets import FunctionSecrets
from pilotlight.sites.config import ConfigError
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.sealed_secrets import UnsealedError, unseal

OLD, NEW = "o" * 32, "n" * 32


def test_secrets_outlive_the_networks_secret_under_which_they_were_put(tmp_path: Path) -> None:
    FunctionSecrets(tmp_path, OLD).put("f", "TOKEN", "value")
    for step in (f"{OLD},{NEW}", f"{NEW},{OLD}", NEW):
        assert unseal(step, "f", "TOKEN", FunctionSecrets(tmp_path, step).of("f")["TOKEN"]) == "value"
    with pytest.raises(UnsealedError):
        unseal(OLD, "f", "TOKEN", FunctionSecrets(tmp_path, NEW).of("f")["TOKEN"])


def test_a_worker_sees_what_an_earlier_worker_has_put_and_deleted(tmp_path: Path) -> None:
    earlier, later = FunctionSecrets(tmp_path, OLD), FunctionSecrets(tmp_path, OLD)
    earlier.put("f", "TOKEN", "value")
    earlier.put("g", "OTHER", "value")
    assert [*later.of("f")] == ["TOKEN"]
    later.delete("f", "TOKEN")
    assert not earlier.of("f")
    assert [*earlier.of("g")] == ["OTHER"]
    with pytest.raises(ApiError, match="has no secret 'TOKEN'"):
        earlier.delete("f", "TOKEN")


def test_a_damaged_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        FunctionSecrets(tmp_path, OLD)
