"""`pilotlight keys`, and the use of these keys by `serve`."""

import hashlib
import json
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pilotlight.functions.cli.dev import DevOptions, dev
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.keys.key_files import create, list_keys, revoke, rotate
from pilotlight.runtime.cli.serve_command import Clients, Served, serve
from pilotlight.sites.config import ConfigError
from pilotlight.sites.key_files import NewKey
from pilotlight.sites.site import load_keys


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_a_key_is_shown_once_and_its_digest_is_appended_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "network.toml"
    # without a line end at the end of the file
    file.write_text('# mine\n[door]\nrequire_key = true\n[[accounts]]\nname = "acme"')
    create(NewKey("alice"), file)
    create(NewKey("root", ("admin",), "acme", 30.0), file)
    alice, root = capsys.readouterr().out.split()
    assert alice != root
    assert len(alice) >= 40
    values = tomllib.loads(file.read_text())
    assert values["door"] == {"require_key": True}
    first, second = values["keys"]
    assert first == {"name": "alice", "key_sha256": digest(alice), "scopes": ["models"]}
    days = (second.pop("expires") - datetime.now(UTC)) / timedelta(days=1)
    assert 29.9 < days <= 30
    assert second == {"name": "root", "key_sha256": digest(root), "scopes": ["admin"], "account": "acme"}
    assert alice not in file.read_text()
    assert file.read_text().startswith("# mine\n")


def test_without_a_file_the_table_is_printed_beside_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    create(NewKey("alice"), None)
    said = capsys.readouterr()
    assert digest(said.out.strip()) in said.err


def test_a_taken_or_invalid_name_and_a_file_that_is_no_toml_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    create(NewKey("alice"), file)
    assert file.stat().st_mode & 0o077 == 0
    before = file.read_text()
    with pytest.raises(ConfigError, match="alice"):
        create(NewKey("alice"), file)
    for new, field in ((NewKey('a"b'), "name"), (NewKey("bob", ("everything",)), "scopes")):
        with pytest.raises(ConfigError, match=field):
            create(new, file)
    assert file.read_text() == before
    with pytest.raises(ConfigError, match="no account named 'acme'"):
        create(NewKey("bob", account="acme"), file)
    assert file.read_text() == before
    for broken in ("[", "keys = []\n", "keys = 1\n"):
        file.write_text(broken)
        with pytest.raises(ConfigError, match="cannot take a key"):
            create(NewKey("bob"), file)
        assert file.read_text() == broken


WRITTEN = """# who may come
[[accounts]]
name = "acme"   # the first

[[ keys ]] # acme's
name = "ci"
# made in June
key_sha256 = "{digest}"
account = "acme"

[[keys]]
name = "other"
key_sha256 = "{other}"
expires = 2020-01-01T00:00:00Z

[door]
require_key = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "network.toml"
    file.write_text(WRITTEN.format(digest=digest("before"), other=digest("other")))
    file.chmod(0o640)
    return file


def test_a_rotated_key_leaves_the_one_before_for_its_grace_and_the_rest_of_the_file_alone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for former in ("before", None):
        before = tomllib.loads(file.read_text())
        shown = digest("before") if former else before["keys"][0]["key_sha256"]
        rotate(file, "ci", 2.0)
        after = tomllib.loads(file.read_text())
        key = capsys.readouterr().out.strip()
        entry = after["keys"].pop(0)
        hours = (entry.pop("former_expires") - datetime.now(UTC)) / timedelta(hours=1)
        assert 1.9 < hours <= 2
        assert entry == {"name": "ci", "key_sha256": digest(key), "account": "acme", "former_sha256": shown}
        before["keys"].pop(0)
        assert after == before
    for comment in ("# who may come", "# the first", "# acme's", "# made in June"):
        assert comment in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_revoked_key_is_marked_and_not_rotated_again(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    revoke(file, "ci")
    assert [key.get("revoked") for key in tomllib.loads(file.read_text())["keys"]] == [True, None]
    with pytest.raises(ConfigError, match="was revoked"):
        rotate(file, "ci", 1.0)
    list_keys(file, as_json=True)
    told = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert (told["ci"]["state"], told["ci"]["account"]) == ("revoked", "acme")
    assert (told["other"]["state"], told["other"]["account"]) == ("expired 2020-01-01 00:00Z", "other")
    list_keys(file, as_json=False)
    assert "revoked" in capsys.readouterr().out


@pytest.mark.parametrize("change", [lambda file: revoke(file, "ci"), lambda file: rotate(file, "ci", 1.0)])
@pytest.mark.parametrize(
    "written",
    [
        'keys = [{{name = "ci", key_sha256 = "{0}"}}]\n',
        '[[keys]]\nname = "ci"\n"key_sha256" = "{0}"\nrevoked=false\n[keys.x]\n',
    ],
)
def test_a_file_whose_keys_are_written_in_another_way_is_left_as_it_is(
    tmp_path: Path, change: Callable[[Path], None], written: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(written.format(digest("ci")))
    before = file.read_text()
    with pytest.raises((CliError, ConfigError), match=r"by hand|unknown key"):
        change(file)
    assert file.read_text() == before
    assert [*tmp_path.iterdir()] == [file]


def test_a_key_that_is_not_there_is_named_beside_those_that_are(file: Path) -> None:
    with pytest.raises(ConfigError, match="no key named 'cj'; it has ci, other"):
        revoke(file, "cj")
    with pytest.raises(ConfigError, match="cannot be read"):
        list_keys(file.parent / "none.toml", False)


def test_serve_knows_the_keys_of_its_option_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    create(NewKey("alice"), file)
    known = Clients("secret-key", file).known()
    assert [key.name for key in known.keys] == ["alice", "api-key"]
    assert known.keys[1].key_sha256 == digest("secret-key")
    site = Served("embedded:ember", "0.0.0.0", 8000).site(known)
    assert site.door.require_key
    assert site.keys == (*load_keys(file).keys, known.keys[1])
    assert not Served("embedded:ember", "127.0.0.1", 8000).site().door.require_key
    with pytest.raises(CliError, match="no spaces"):
        Clients("two words").known()


def test_serve_and_dev_refuse_other_machines_without_an_access_rule(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"--api-key KEY or --keys FILE .* --open-to-all"):
        serve(Served("embedded:ember", "0.0.0.0", 8000), Clients(), lambda *_: pytest.fail("no site may be started"))
    with pytest.raises(CliError, match="--open-to-all"):
        dev(tmp_path, DevOptions("0.0.0.0", 8787))
