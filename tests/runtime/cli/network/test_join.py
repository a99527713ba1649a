"""Wishes of a joining machine that are refused before the router is asked."""

from pathlib import Path

import pytest

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.network.join import Wishes, join


@pytest.mark.parametrize("name", ["S 2", "../s2", ""])
def test_a_name_that_is_none_of_a_site_is_refused_with_its_letters(tmp_path: Path, name: str) -> None:
    with pytest.raises(CliError, match="is not a name of a site: use at most 63 small letters, digits"):
        join("https://127.0.0.1:1", f"pj-secret.{'0' * 64}", tmp_path / "site", Wishes(name=name))
    assert not (tmp_path / "site").exists()
