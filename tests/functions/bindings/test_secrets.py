"""Vars and secrets: the values that functions get, and their encrypted form on disk."""

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

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
