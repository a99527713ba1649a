"""Wishes of a joining machine that are refused before the router adds a site."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.network import join
from pilotlight.wire.hop.status import Place


class ScriptedRouter:
    def __init__(self, url: str) -> None:
        pass

    def face(self, fingerprint: str) -> Any:
        return SimpleNamespace(place=Place("Oslo", 59.9, 10.7), authority="")

    def own_address(self) -> str:
        return "127.0.0.1"


def test_a_name_that_is_none_of_a_site_is_refused_with_its_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_Router", ScriptedRouter)
    for name in ("S 2", "../s2"):
        with pytest.raises(CliError, match="is not a name of a site: use at most 63 small letters, digits"):
            join.join("https://router:8443", f"pj-secret.{'0' * 64}", tmp_path / "site", join.Wishes(name=name))
    assert not (tmp_path / "site").exists()
