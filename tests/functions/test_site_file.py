"""The functions that a site's file names."""

from pathlib import Path

import pytest

from pilotlight.functions.manifest import ManifestError
from pilotlight.functions.site_file import manifests_of
from pilotlight.sites.site import FunctionsConfig


def test_a_folder_of_functions_that_is_misspelt_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "functions/f").mkdir(parents=True)
    (tmp_path / "functions/f/entry.py").touch()
    (tmp_path / "functions/f/wrangler.toml").write_text('main = "entry.py"\n')
    assert list(manifests_of(FunctionsConfig(directory=str(tmp_path / "functions")))) == ["f"]
    with pytest.raises(ManifestError, match=r"functions\.directory: .*funktions' is no directory: make it"):
        manifests_of(FunctionsConfig(directory=str(tmp_path / "funktions")))
