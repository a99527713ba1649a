"""The deploy token of `pilotlight up --functions`: made once for a port, and sent only to this machine."""

from pathlib import Path

import pytest

from pilotlight.functions.cli.deploy import author_token
from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.local_token import local_token, make_local_token


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("PILOTLIGHT_DEPLOY_TOKEN", "PILOTLIGHT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_token_outlives_its_network_and_only_its_user_can_read_it(state: Path) -> None:
    token = make_local_token(8787)
    assert make_local_token(8787) == token != make_local_token(8788)
    (file, _) = sorted((state / "pilotlight" / "deploy-tokens").iterdir())
    assert (file.stat().st_mode & 0o077, file.parent.stat().st_mode & 0o077) == (0, 0)


def test_commands_send_it_to_the_router_of_this_machine_and_to_no_other() -> None:
    token = make_local_token(8787)
    assert author_token(Api("http://127.0.0.1:8787")) == author_token(Api("http://localhost:8787")) == token
    assert local_token("http://router.example:8787") == local_token("http://127.0.0.1:8788") == ""
    with pytest.raises(CliError, match="This needs a key with the scope deploy"):
        author_token(Api("http://router.example:8787"))


def test_a_token_of_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    make_local_token(8787)
    monkeypatch.setenv("PILOTLIGHT_DEPLOY_TOKEN", "mine")
    assert author_token(Api("http://127.0.0.1:8787")) == "mine"
