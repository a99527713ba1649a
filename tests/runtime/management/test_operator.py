"""Models that are added to a running site, and removed from it."""

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotlight.runtime.fetching.short_names import EMBEDDED
from pilotlight.wire.hop.headers import Hop, sign_hop
from pilotlight.wire.hop.management import CATALOGUE_PATH, HUB_PATH, OPERATION_PATH, Catalogue, CatalogueModel
from tests.asgi import Exchange, call, eventually
from tests.fakes import write_model_directory
from tests.runtime.conftest import Site, SiteMaker
from tests.runtime.fetching.test_hub import hub_at

CHAT = "/v1/chat/completions"
SECRET = "a shared secret"


def signed(method: str, path: str, body: bytes) -> dict[str, str]:
    return {
        "x_pilotlight_hop": sign_hop(SECRET, time.time(), Hop(method, path, "r1", "ams1"), body),
        "x_request_id": "r1",
    }


async def order(site: Site, **fields: Any) -> Exchange:
    body = msgspec.json.encode(fields)
    return await call(site.app, OPERATION_PATH, body=body, **signed("POST", OPERATION_PATH, body))


async def catalogue(site: Site) -> Catalogue:
    answer = await call(site.app, CATALOGUE_PATH, method="GET", body=b"", **signed("GET", CATALOGUE_PATH, b""))
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=Catalogue)


async def entry(site: Site, source: Path) -> CatalogueModel:
    (found,) = [each for each in (await catalogue(site)).models if each.source == str(source)]
    return found


def ask(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    offered = write_model_directory(tmp_path / "offered" / "second")
    shutil.copy(EMBEDDED / "ember" / "config.json", offered)  # enough for a plan
    folders = {"directories": [str(tmp_path / "offered")], "state_dir": str(tmp_path / "state")}
    return {"hop_secret": SECRET, "catalogue": folders}


async def test_a_model_of_the_catalogue_is_run_answers_and_is_removed(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "offered" / "second"
    async with make_site(**tables) as site:
        offered = await entry(site, source)
        assert offered.is_here
        assert offered.fit is not None
        assert offered.fit.fits, offered
        assert (await call(site.app, CHAT, ask("two"))).status == 404
        assert (await order(site, action="run", source=str(source), model="two")).status == 202
        await eventually(lambda: "two" in site.engine.loaded)
        assert (await call(site.app, CHAT, ask("two"))).status == 200
        assert (await entry(site, source)).served_as == ("two",)
        async with site.app.site.models.use("two"):
            refused = await order(site, action="remove", model="two")
            assert (refused.status, refused.json["error"]["code"]) == (409, "conflict")
        assert (await call(site.app, CHAT, ask("two"))).status == 200, "it was not removed"
        assert (await order(site, action="remove", model="two")).status == 202
        assert site.engine.loaded == ["tiny"]
        assert (await call(site.app, CHAT, ask("two"))).status == 404
        assert (await call(site.app, CHAT, ask("tiny"))).status == 200


async def test_a_restart_serves_what_was_added_and_not_what_was_removed(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path
) -> None:
    source = str(tmp_path / "offered" / "second")
    async with make_site(**tables) as site:
        for name in ("two", "three"):
            assert (await order(site, action="run", source=source, model=name, residency="disk")).status == 202
            await eventually(lambda name=name: site.app.site.models.registry.residency(name) == "device")
        assert (await order(site, action="remove", model="three")).status == 202
    async with make_site(**tables) as site:
        assert site.app.site.why_not_ready() == []
        statuses = {each.name: each.is_added for each in site.app.site.models.registry.statuses()}
        assert statuses == {"tiny": False, "two": True}
        assert (await call(site.app, CHAT, ask("two"))).status == 200


async def test_operations_that_cannot_be_done_say_why(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path
) -> None:
    broken = tmp_path / "offered" / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    source = str(tmp_path / "offered" / "second")
    async with make_site(**tables) as site:
        for fields, status, word in (
            ({"action": "run", "source": str(broken)}, 400, "NoSuchForCausalLM"),
            ({"action": "run", "source": "/nowhere/at all"}, 400, "no directory"),
            ({"action": "run", "source": "x" * 300, "model": "long"}, 400, "no directory"),
            ({"action": "run", "source": " "}, 400, "source"),
            ({"action": "run", "source": source, "model": "@test/tiny"}, 409, "another name"),
            ({"action": "run", "source": source, "context_tokens": 1}, 400, "context_tokens"),
            ({"action": "run", "source": source, "residency": "device"}, 400, "residency"),
            ({"action": "remove", "model": "tiny"}, 409, "site's file"),
            ({"action": "remove", "model": "nobody"}, 404, "nobody"),
            ({"action": "sleep", "model": "nobody"}, 404, "nobody"),
            ({"action": "pull", "source": source}, 409, "here already"),
            ({"action": "cancel", "source": "org/name"}, 404, "not being downloaded"),
            ({"action": "drain"}, 400, "router"),
        ):
            told = await order(site, **fields)
            assert (told.status, word in told.body.decode()) == (status, True), told.body
        assert (await entry(site, broken)).fit is not None
        assert not (await entry(site, broken)).fit.fits
        assert [state.name for state in site.app.site.models.states.values()] == ["tiny"]


async def test_only_a_router_manages_a_site_of_a_network(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    async with make_site(**tables) as site:
        for path in (CATALOGUE_PATH, OPERATION_PATH, HUB_PATH):
            method = "GET" if path == CATALOGUE_PATH else "POST"
            assert (await call(site.app, path, method=method, body=b'{"action": "sleep"}')).status == 403


async def test_a_router_puts_a_model_to_sleep_but_not_while_it_is_used(
    make_site: SiteMaker, tables: dict[str, Any]
) -> None:
    async with make_site(**tables) as site:
        async with site.app.site.models.use("tiny"):
            refused = await order(site, action="sleep", model="tiny")
            assert (refused.status, refused.json["error"]["code"]) == (409, "conflict")
            assert site.engine.loaded == ["tiny"]
        for _ in range(2):
            assert (await order(site, action="sleep", model="tiny")).status == 202, "asleep it stays so"
        assert site.engine.loaded == []
        assert (await order(site, action="wake", model="@test/tiny")).status == 202
        await eventually(lambda: site.engine.loaded == ["tiny"])


@pytest.mark.process
@pytest.mark.long
async def test_models_of_the_hub_come_with_what_the_engine_makes_of_them(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = {"safetensors": {"total": 5}, "tags": ["license:mit"], "downloads": 3, "gated": "manual"}
    names = ("Qwen3ForCausalLM", "NoSuchModel")
    offered = [{"id": f"org/{name}", "config": {"architectures": [name]}, **rest} for name in names]

    async def search(site: Site, words: str) -> Exchange:
        body = msgspec.json.encode({"words": words})
        return await call(site.app, HUB_PATH, body=body, **signed("POST", HUB_PATH, body))

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    async with make_site(**tables) as site:
        with hub_at(msgspec.json.encode(offered)) as (url, _):
            monkeypatch.setenv("HF_ENDPOINT", url)
            found = (await search(site, "qwen")).json
        assert [each["architecture"] for each in found] == ["Qwen3ForCausalLM", ""]
        assert found[0] | {"source": "", "architecture": ""} == {
            "source": "", "architecture": "", "parameters": 5, "license": "mit", "downloads": 3, "is_gated": True,
        }  # fmt: skip
        refused = await search(site, "qwen")  # the hub is gone
        assert refused.status == 503
        assert refused.json["error"]["message"].startswith("the hub cannot be searched: ")
        assert (await search(site, "")).status == 400
