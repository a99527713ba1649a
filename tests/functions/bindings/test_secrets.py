"""Vars and secrets: the values that functions get, and their encrypted form on disk."""

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from pilotlight.functions.bindings.secrets.secret_store import SecretError, SecretStore
from tests.functions.bindings.conftest import Wire


async def test_vars_and_secrets_are_their_values(wire: Wire) -> None:
    wired = await wire(
        ("var", "NAME", {"value": "text"}),
        ("var", "SETTINGS", {"value": {"a": [1, {"b": None}]}}),
        ("secret", "TOKEN", {"value": "s3cret"}),
    )
    assert wired.env["NAME"] == "text"
    assert wired.env["SETTINGS"].a[1].b is None
    assert wired.env["SETTINGS"].to_py() == {"a": [1, {"b": None}]}
    assert wired.env["TOKEN"] == "s3cret"


def test_secrets_are_kept_and_no_file_shows_them(tmp_path: Path) -> None:
    store = SecretStore(tmp_path)
    store.put("hello", "TOKEN", "s3cret-wörd")
    store.put("hello", "OTHER", "x")
    store.put("../evil", "TOKEN", "theirs")
    again = SecretStore(tmp_path)
    assert again.values("hello") == {"TOKEN": "s3cret-wörd", "OTHER": "x"}
    assert again.names("../evil") == ["TOKEN"]
    assert again.delete("hello", "OTHER")
    assert not again.delete("hello", "OTHER")
    assert again.names("hello") == ["TOKEN"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        assert b"s3cret" not in path.read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent == tmp_path / "bindings" / "secret"


PUT = """
import sys
from pathlib import Path
from pilotlight.functions.bindings.secrets.secret_store import SecretStore

store = SecretStore(Path(sys.argv[1]))
sys.stdin.readline()
for n in range(20):
    store.put("hello", f"{sys.argv[2]}{n}", "x")
"""


@pytest.mark.process
def test_secrets_that_several_processes_put_at_once_are_all_kept(tmp_path: Path) -> None:
    with ExitStack() as stack:
        putting = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", PUT, str(tmp_path), name], stdin=subprocess.PIPE, text=True)
            )
            for name in "AB"
        ]
        for process in putting:
            assert process.stdin is not None
            process.stdin.write("now\n")
            process.stdin.flush()
        assert [process.wait() for process in putting] == [0, 0]
    assert len(SecretStore(tmp_path).names("hello")) == 40


def test_a_secret_opens_only_with_its_key_and_in_its_place(tmp_path: Path) -> None:
    store = SecretStore(tmp_path)
    store.put("hello", "TOKEN", "mine")
    store.put("other", "TOKEN", "theirs")
    directory = tmp_path / "bindings" / "secret"
    shutil.copy(directory / "other.sealed", directory / "hello.sealed")
    with pytest.raises(SecretError, match="cannot be decrypted with this site's key"):
        store.values("hello")
    (directory / "key").write_bytes(bytes(32))
    with pytest.raises(SecretError, match="put it again"):
        SecretStore(tmp_path).values("other")
    (directory / "key").write_bytes(b"short")
    with pytest.raises(SecretError, match="5 bytes instead of 32"):
        SecretStore(tmp_path).values("other")


def stored_in(directory: Path) -> dict[str, dict[str, str]]:
    return {function: SecretStore(directory).values(function) for function in SECRETS}


SECRETS = {"hello": {"TOKEN": "s3cret-wörd", "OTHER": "x"}, "store:team": {"TOKEN": "y"}, "other": {"TOKEN": "z"}}
ROTATE = """
import sys
from pathlib import Path
from pilotlight.functions.bindings.secrets.secret_store import SecretStore

for function in SecretStore(Path(sys.argv[1])).rotate_key():
    print(function, flush=True)
    sys.stdin.readline()
"""

ROTATE_AGAIN = """
import sys
from pathlib import Path
from pilotlight.functions.bindings.secrets.secret_store import SecretStore

for _ in range(20):
    list(SecretStore(Path(sys.argv[1])).rotate_key())
"""


@pytest.fixture
def full(tmp_path: Path) -> Path:
    for function, values in SECRETS.items():
        for name, value in values.items():
            SecretStore(tmp_path).put(function, name, value)
    return tmp_path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "bindings" / "secret").iterdir()}


def test_a_new_key_encrypts_all_secrets_and_the_old_one_is_gone(full: Path) -> None:
    before = contents(full)
    (full / "bindings" / "secret" / ".unfinished").write_bytes(before["key"])
    assert sorted(SecretStore(full).rotate_key()) == sorted(SECRETS)
    after = contents(full)
    assert stored_in(full) == SECRETS
    assert not any(before["key"] in data for data in after.values())
    assert after.keys() == before.keys()
    assert not any(after[name] == data for name, data in before.items())
    (full / "bindings" / "secret" / "key").write_bytes(before["key"])
    with pytest.raises(SecretError, match="cannot be decrypted with this site's key"):
        SecretStore(full).values("hello")


@pytest.mark.process
@pytest.mark.parametrize("num_steps", range(1, len(SECRETS) + 1))
def test_every_secret_is_readable_wherever_a_rotation_is_killed(full: Path, num_steps: int) -> None:
    old = contents(full)["key"]
    rotating = subprocess.Popen(
        [sys.executable, "-c", ROTATE, str(full)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with rotating:
        assert rotating.stdin is not None
        assert rotating.stdout is not None
        for _ in range(num_steps - 1):
            rotating.stdout.readline()
            rotating.stdin.write("next\n")
            rotating.stdin.flush()
        assert rotating.stdout.readline().strip() in SECRETS
        rotating.kill()
    assert stored_in(full) == SECRETS
    new, kept = contents(full)["key"][:32], contents(full)["key"][32:]
    assert kept == old
    SecretStore(full).put("late", "TOKEN", "v")
    assert sorted(SecretStore(full).rotate_key()) == sorted([*SECRETS, "late"])
    assert contents(full)["key"] == new
    assert stored_in(full) == SECRETS
    assert SecretStore(full).values("late") == {"TOKEN": "v"}


@pytest.mark.process
def test_secrets_are_readable_while_their_key_is_replaced_again_and_again(full: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ROTATE_AGAIN, str(full)]) as rotating:
        while rotating.poll() is None:
            assert stored_in(full) == SECRETS
    assert rotating.returncode == 0


def test_secrets_that_an_earlier_version_stored_are_read_and_get_a_new_key(full: Path) -> None:
    for path in (full / "bindings" / "secret").glob("*.sealed"):
        path.write_bytes(msgspec.msgpack.encode(msgspec.msgpack.decode(path.read_bytes())[1]))
    assert stored_in(full) == SECRETS
    with pytest.raises(SecretError, match=r"store-team\..*\.sealed does not name the function or store"):
        list(SecretStore(full).rotate_key())
    SecretStore(full).put("store:team", "TOKEN", "y")
    assert len(list(SecretStore(full).rotate_key())) == len(SECRETS)
    assert stored_in(full) == SECRETS


def test_nothing_is_changed_if_a_secret_cannot_be_read_with_the_old_key(full: Path) -> None:
    shutil.copy(full / "bindings" / "secret" / "other.sealed", full / "bindings" / "secret" / "hello.sealed")
    before = contents(full)
    with pytest.raises(SecretError, match=r"hello\.sealed does not name the function or store"):
        list(SecretStore(full).rotate_key())
    assert contents(full) == before


def test_a_lost_key_is_not_replaced(full: Path) -> None:
    (full / "bindings" / "secret" / "key").unlink()
    with pytest.raises(SecretError, match="cannot be decrypted with this site's key"):
        list(SecretStore(full).rotate_key())
    assert "key" not in contents(full)


def test_a_store_without_secrets_gets_no_key(tmp_path: Path) -> None:
    assert list(SecretStore(tmp_path).rotate_key()) == []
    assert contents(tmp_path) == {}


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    SecretStore(tmp_path).put("hello", "TOKEN", "mine")
    key = tmp_path / "bindings" / "secret" / "key"
    key.chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        SecretStore(tmp_path).values("hello")


def test_a_damaged_file_and_an_oversized_secret_are_named(tmp_path: Path) -> None:
    store = SecretStore(tmp_path)
    store.put("hello", "TOKEN", "x" * 5120)
    with pytest.raises(SecretError, match="more than 5120 bytes"):
        store.put("hello", "TOKEN", "x" * 5121)
    (tmp_path / "bindings" / "secret" / "hello.sealed").write_bytes(b"\x81\xa1")
    with pytest.raises(SecretError, match="damaged"):
        store.names("hello")
