"""Secrets of a store that functions share: read on demand, and named if they are missing."""

from pathlib import Path

import pytest

from pilotlight.functions.bindings.secrets.secret_store import SecretStore
from pilotlight.functions.bindings.secrets.stored_secret import OWNER
from pilotlight.functions.channel.failure import Failure
from tests.functions.bindings.conftest import Wire

SECRET = ("secrets_store", "S", {"store_id": "team", "secret_name": "TOKEN"})


async def test_a_secret_is_what_it_is_when_it_is_asked_for(wire: Wire, tmp_path: Path) -> None:
    secret = (await wire(SECRET)).env["S"]
    with pytest.raises(Failure, match="pilotlight secret put team TOKEN --store"):
        await secret.get()
    SecretStore(tmp_path).put(f"{OWNER}team", "TOKEN", "one")
    assert await secret.get() == "one"
    SecretStore(tmp_path).put(f"{OWNER}team", "TOKEN", "two")
    assert await secret.get() == "two"


def damage(folder: Path) -> None:
    (sealed,) = folder.rglob("*.sealed")
    content = sealed.read_bytes()
    sealed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


async def test_a_store_that_cannot_be_opened_says_so_and_nothing_of_what_it_holds(wire: Wire, tmp_path: Path) -> None:
    secret = (await wire(SECRET)).env["S"]
    SecretStore(tmp_path).put(f"{OWNER}team", "TOKEN", "s3cret-value")
    damage(tmp_path)
    with pytest.raises(Failure) as failed:
        await secret.get()
    assert failed.value.status == 500
    assert "team" in failed.value.message
    assert "s3cret" not in failed.value.message
