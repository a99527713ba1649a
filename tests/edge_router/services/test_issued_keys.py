"""Keys that are issued while a router runs."""

import logging
import stat
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pilotlight.edge_router.services.issued_keys import with_issued_keys
from pilotlight.edge_router.workers.role import WorkerRole
from pilotlight.sites.config import ROUTER_STATE_ENV, ConfigError
from tests.edge_router.builders import network
from tests.edge_router.fakes import Router, answer, router, sites
from tests.full_disk import files_of_at_most

pytestmark = pytest.mark.process
BOSS = {"authorization": "Bearer boss"}


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setenv(ROUTER_STATE_ENV, str(tmp_path / "state"))
    tables = {
        "accounts": [{"name": "acme", "models": ["m*"]}],
        "keys": [{"name": "boss", "key_sha256": sha256(b"boss").hexdigest(), "scopes": ["admin"]}],
        "door": {"require_key": True},
    }
    async with sites("ams1") as fakes, router(fakes, tables=tables) as started:
        fakes[0].behave = answer(200, {"ok": True})
        yield started


async def create(running: Router, **fields: Any) -> tuple[int, Any]:
    async with running.http.post(f"{running.url}/manage/keys", json=fields, headers=BOSS) as told:
        return told.status, await told.json()


async def chat(running: Router, key: str, model: str = "m") -> tuple[int, str]:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    async with running.http.post(f"{running.url}/v1/chat/completions", json=body, headers=headers) as told:
        return told.status, await told.text()


async def test_a_key_is_shown_once_works_at_once_and_survives_a_restart(
    running: Router, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pilotlight.audit")
    status, made = await create(running, name="alice", scopes=["models"], expires_days=1, requests_per_min=5)
    assert status == 201
    assert (await chat(running, made["key"]))[0] == 200
    file = tmp_path / "state" / "keys.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made["key"] not in file.read_text() + caplog.text
    assert "create the key alice with models: done" in caplog.text
    async with running.http.get(f"{running.url}/manage/keys", headers=BOSS) as told:
        boss, listed = (await told.json())["keys"]
    assert (boss["name"], boss["is_issued"]) == ("boss", False)
    assert (listed["name"], listed["account"], listed["is_issued"]) == ("alice", "alice", True)
    assert made["key"] not in str(listed)
    merged = with_issued_keys(network({"ams1": "http://x:1"}), file)
    assert [key.name for key in merged.keys] == ["alice"]
    assert [(account.name, account.requests_per_min) for account in merged.accounts] == [("alice", 5.0)]


async def test_a_key_of_an_account_of_the_routers_file_has_that_accounts_rules(running: Router) -> None:
    _, made = await create(running, name="bob", account="acme")
    assert (await chat(running, made["key"]))[0] == 200
    status, sentence = await chat(running, made["key"], "other")
    assert (status, "the account acme" in sentence) == (403, True)
    status, told_twice = await create(running, name="carl", account="acme", requests_per_min=1)
    assert (status, "has its limits already" in told_twice["error"]["message"]) == (400, True)


async def test_what_is_no_key_is_refused_and_nothing_is_written(running: Router, tmp_path: Path) -> None:
    for fields, word in (
        ({"name": "a b"}, "name"),
        ({"name": "x", "scopes": ["everything"]}, "scopes"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "tokens_per_day": 5}, "ledger.directory"),
        ({"name": "x", "requests_per_min": -1}, "requests_per_min"),
        ({"name": "x", "account": "no account!"}, "account"),
    ):
        status, told = await create(running, **fields)
        assert (status, word in told["error"]["message"]) == (400, True), told
    assert not (tmp_path / "state" / "keys.toml").exists()
    assert (await create(running, name="alice"))[0] == 201
    assert "choose another name" in (await create(running, name="alice"))[1]["error"]["message"]


async def test_a_key_that_was_never_made_is_named_as_unknown(running: Router) -> None:
    async with running.http.delete(f"{running.url}/manage/keys/carol", headers=BOSS) as told:
        assert (await told.json())["error"]["message"] == "there is no key named 'carol'"


async def test_a_revoked_key_is_refused_at_once(running: Router) -> None:
    _, made = await create(running, name="alice")
    for name, status in (("alice", 200), ("nobody", 404), ("boss", 409)):
        async with running.http.delete(f"{running.url}/manage/keys/{name}", headers=BOSS) as told:
            assert told.status == status
    status, sentence = await chat(running, made["key"])
    assert (status, "was revoked" in sentence) == (401, True)


async def test_a_full_disk_is_named_and_nothing_is_changed(running: Router, tmp_path: Path) -> None:
    assert (await create(running, name="alice"))[0] == 201
    file = tmp_path / "state" / "keys.toml"
    before = file.read_text()
    with files_of_at_most(10):
        status, told = await create(running, name="bob")
        async with running.http.delete(f"{running.url}/manage/keys/alice", headers=BOSS) as revoked:
            sentence = (await revoked.json())["error"]["message"]
    for code, message in ((status, told["error"]["message"]), (revoked.status, sentence)):
        assert (code, message) == (503, f"{file} cannot be written: File too large; nothing was changed")
    assert file.read_text() == before
    assert (await create(running, name="bob"))[0] == 201


async def test_a_damaged_file_of_keys_is_named(running: Router, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "keys.toml").write_text("keys = 1\n")
    status, told = await create(running, name="bob")
    assert (status, "keys.toml" in told["error"]["message"]) == (500, True)
    async with running.http.delete(f"{running.url}/manage/keys/bob", headers=BOSS) as revoked:
        assert (revoked.status, "keys.toml" in await revoked.text()) == (500, True)


def test_a_name_in_both_files_stops_the_start_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "a"\nkey_sha256 = "{"1" * 64}"\n')
    taken = {"keys": [{"name": "a", "key_sha256": "2" * 64}]}
    with pytest.raises(ConfigError, match="key name"):
        with_issued_keys(network({"ams1": "http://x:1"}, **taken), file)


async def test_limits_that_several_workers_cannot_keep_to_are_refused(running: Router, tmp_path: Path) -> None:
    running.edge.role = WorkerRole(0, 2, 0, tmp_path)
    status, told = await create(running, name="alice", scopes=["models"], requests_per_min=5)
    assert status == 400
    assert "set quotas.store" in told["error"]["message"]
    assert not (tmp_path / "state" / "keys.toml").exists()
