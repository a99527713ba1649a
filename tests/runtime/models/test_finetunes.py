"""Adapters that accounts upload: their owners, the accepted files, and their names in requests."""

import io
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS, digest_of
from pilotlight.runtime.api.routes.finetune_routes import MOST_UPLOADS
from pilotlight.runtime.models.finetunes import FinetuneStore
from pilotlight.sites.config import ConfigError
from pilotlight.sites.site import FinetunesConfig
from pilotlight.wire.hop.finetunes import INTERNAL_PATH, Finetune, packed, unpacked
from tests.asgi import Exchange, call, start
from tests.full_disk import files_of_at_most
from tests.runtime.conftest import Site, SiteMaker
from tests.runtime.test_identity import SECRET, signed
from tests.uploads import BOUNDARY, FORM, TINY, adapter_files, form, write_files

AI = "/client/v4/accounts/acc1/ai"
PATH = f"{AI}/finetunes"
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
ANN, BOB = "Bearer key-of-ann", "Bearer key-of-bob"


@pytest.fixture
def tables(model_directory: Path, tmp_path: Path) -> dict[str, Any]:
    (model_directory / "config.json").write_text(json.dumps(TINY))
    write_files(tmp_path / "public" / "fr", adapter_files())
    model = {"name": "tiny", "source": str(model_directory), "aliases": ["@test/tiny"]}
    model |= {"adapters_dir": str(tmp_path / "public")}
    return {"models": [model], "finetunes": {"directory": str(tmp_path / "kept"), "per_account": 3}}


async def create(site: Site, name: str = "tone", key: str = ANN, **more: Any) -> Exchange:
    body = {"model": "@test/tiny", "name": name, "description": "formal", **more}
    return await call(site.app, PATH, body, authorization=key)


async def put(site: Site, id: str, file_name: str, content: bytes, key: str = ANN, **more: str) -> Exchange:
    headers = {"content-type": FORM, "authorization": key, **more}
    return await call(site.app, f"{PATH}/{id}/finetune-assets", body=form(content, file_name), **headers)


async def upload(site: Site, name: str = "tone", key: str = ANN, files: dict[str, bytes] | None = None) -> str:
    id = str((await create(site, name, key)).json["result"]["id"])
    for file_name, content in (files or adapter_files()).items():
        assert (await put(site, id, file_name, content, key)).status == 200
    return id


async def ask(site: Site, key: str = ANN, **body: Any) -> Exchange:
    return await call(site.app, f"{AI}/run/@test/tiny", {"prompt": "Hi", **body}, authorization=key)


async def names(site: Site, key: str = ANN) -> list[str]:
    listed = await call(site.app, PATH, authorization=key)
    return [each["name"] for each in listed.json["result"]]


def why(answer: Exchange) -> str:
    return str((answer.json.get("errors") or [answer.json.get("error")])[0]["message"])


async def test_an_uploaded_adapter_is_used_by_its_id_its_name_and_as_a_suffix_of_its_model(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path
) -> None:
    async with make_site(**tables) as site:
        created = (await create(site)).json["result"]
        assert (created["model"], created["name"], created["public"]) == ("tiny", "tone", False)
        assert (await ask(site, lora="tone")).status == 400, "it has no files yet"
        config, weights = adapter_files().items()
        assert (await put(site, created["id"], *weights)).json["result"]["file_name"] == WEIGHTS
        assert (await ask(site, lora="tone")).status == 400
        assert (await put(site, created["id"], *config)).json["success"] is True
        digest = digest_of(tmp_path / "kept" / "ams1" / created["id"])
        for lora in (created["id"], "tone"):
            assert (await ask(site, lora=lora)).status == 200
        body = {"model": "tiny:tone", "messages": [{"role": "user", "content": "Hi"}]}
        for path in (CHAT, f"{AI}/v1/chat/completions"):
            assert (await call(site.app, path, body, authorization=ANN)).status == 200
        sources = [submit.adapter for submit in site.engine.submits]
        assert [None if source is None else source.digest for source in sources] == [digest] * 4
        models = (await call(site.app, MODELS, authorization=ANN)).json["data"]
        assert [model["id"] for model in models] == ["tiny", "tiny:fr", "tiny:tone"]
        again = await put(site, created["id"], *config)
        assert (again.status, again.json["success"]) == (409, False)
        assert "has both of its files" in why(again)


async def test_another_account_learns_nothing_of_it(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    async with make_site(**tables, hop_secret=SECRET) as site:
        id = await upload(site)
        assert (await names(site), await names(site, BOB)) == (["tone"], [])
        for lora in (id, "tone", "nobodys"):
            refused = await ask(site, BOB, lora=lora)
            assert (refused.status, why(refused)) == (
                400, f"'tiny' has no adapter named {lora!r}; see /v1/models"
            )  # fmt: skip
        assert (await call(site.app, f"{MODELS}/tiny:tone", authorization=BOB)).status == 404
        assert (await call(site.app, f"{MODELS}/tiny:tone", authorization=ANN)).status == 200
        assert (await put(site, id, *next(iter(adapter_files().items())), key=BOB)).status == 404
        removed = await call(site.app, f"{PATH}/{id}", method="DELETE", authorization=BOB)
        assert (removed.status, why(removed)) == (404, f"there is no fine-tune {id!r}")
        assert await upload(site, "tone", BOB) != id, "names are separate for each account"
        # The account header of a router counts, whichever key its client has. Other clients' headers do not count.
        of_acme = {"authorization": ANN, "x-pilotlight-account": "acme"}
        routed = await call(site.app, PATH, **of_acme, **signed(path=PATH, method="GET"))
        assert routed.json["result"] == []
        assert len((await call(site.app, PATH, **of_acme)).json["result"]) == 1


async def test_keys_of_one_account_have_its_adapters_together(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    from pilotlight.sites.key_files import new_key

    made = [new_key(name, account="acme") for name in ("one", "two")]
    keys = [{"name": key.name, "key_sha256": key.key_sha256, "account": "acme"} for _, key in made]
    one, two = (f"Bearer {key}" for key, _ in made)
    accounts = [{"name": "acme", "models": ["@test/tiny", "@test/tiny:t*", "tiny:tone"]}]
    async with make_site(**tables, keys=keys, accounts=accounts, door={"require_key": True}) as site:
        await upload(site, "tone", one)
        assert await names(site, two) == ["tone"]
        assert (await ask(site, two, lora="tone")).status == 200
        refused = await create(site, "other", two)
        assert (refused.status, "not available to the account acme" in why(refused)) == (403, True)


async def test_what_is_removed_is_gone_and_its_name_is_free(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path
) -> None:
    async with make_site(**tables) as site:
        id = await upload(site)
        assert (await call(site.app, f"{PATH}/{id}", method="DELETE", authorization=ANN)).status == 200
        assert (await ask(site, lora="tone")).status == 400
        assert (await call(site.app, f"{PATH}/{id}", method="DELETE", authorization=ANN)).status == 404
        assert sorted(path.name for path in (tmp_path / "kept" / "ams1").iterdir()) == ["removed"]
        assert await upload(site) != id


async def test_an_account_has_as_many_as_the_file_says(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    async with make_site(**tables) as site:
        for name in ("a", "b", "c"):
            assert (await create(site, name)).status == 200
        refused = await create(site, "d")
        assert (refused.status, why(refused)) == (429, "an account may have 3 fine-tunes: remove one first")
        assert (await create(site, "d", BOB)).status == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"name": "../up"}, 400, "is not a valid name"),
        ({"name": ""}, 400, "name"),
        ({"name": "fr"}, 409, "'tiny' has an adapter named 'fr' for all accounts"),
        ({"name": "taken"}, 409, "there is a fine-tune named 'taken' already"),
        ({"model": "nothing"}, 400, "no model named 'nothing'"),
        ({"model": "tiny:fr"}, 400, "no model named 'tiny:fr'"),
        ({"model": 3}, 400, "model"),
        ({"public": True}, 400, "uploaded adapters belong to one account"),
        ({"description": "x" * 1001}, 400, "description"),
    ],
)
async def test_what_cannot_be_created_is_named(
    make_site: SiteMaker, tables: dict[str, Any], body: dict[str, Any], status: int, words: str
) -> None:
    async with make_site(**tables) as site:
        await create(site, "taken")
        refused = await create(site, **{"name": "tone", **body})
        assert (refused.status, words in why(refused)) == (status, True), refused.body


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (adapter_files(columns=20), r"of another model: layers.0.self_attn.k_proj is [8, 20] there, and [8, 16] here"),
        (adapter_files(rank=33), "it has rank 33; ranks up to 32 are supported here"),
        (adapter_files(value=np.nan), "lora_B.weight holds NaN or infinity"),
        (adapter_files(lora_alpha=0), "lora_alpha is 0, so that it changes nothing"),
        (adapter_files(use_dora=True), "use_dora is true, which is not supported here"),
        (
            adapter_files() | {WEIGHTS: b"\x80\x04" + b"pickled" * 9},
            f"{WEIGHTS} is truncated or not a safetensors file",
        ),
        (adapter_files() | {WEIGHTS: adapter_files()[WEIGHTS][:-9]}, "is truncated"),
        (adapter_files() | {CONFIG: b"{"}, f"{CONFIG} is not JSON"),
        (adapter_files() | {CONFIG: b"[" * 100_000}, f"{CONFIG} is not JSON"),
    ],
)
async def test_an_adapter_that_cannot_be_used_is_refused_by_name_and_not_kept(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    async with make_site(**tables) as site:
        id = (await create(site)).json["result"]["id"]
        for each in files.items():
            if (refused := await put(site, id, *each)).status != 200:
                break
        assert (refused.status, words in why(refused)) == (400, True), refused.body
        assert str(tmp_path) not in why(refused)
        assert len(list((tmp_path / "kept" / "ams1").iterdir())) == 2, "the failed upload leaves nothing"
        for each in adapter_files().items():  # the same fine-tune accepts valid files afterwards
            assert (await put(site, id, *each)).status == 200
        assert (await ask(site, lora="tone")).status == 200


@pytest.mark.parametrize(
    ("kind", "body", "status", "words"),
    [
        ("application/json", b"{}", 400, "multipart/form-data"),
        ("multipart/form-data", b"x", 400, "Missing boundary"),
        (FORM, b"no form at all", 400, "the form"),
        (FORM, form(b"x", CONFIG)[:-60], 400, "no file in its field file"),
        (FORM, form(b"x", CONFIG, field="other"), 400, "no file in its field file"),
        (FORM, form(b"x", "adapter_model.bin"), 400, "a pickled file, which may run any code"),
        (FORM, form(b"x", "../../etc/passwd"), 400, "file_name must be adapter_config.json or"),
        (FORM, form(b"x" * (2 << 20), CONFIG), 413, "more than 1 MiB"),
        (FORM, form(b"x" * (4 << 20), WEIGHTS), 413, "may have 3 MiB (finetunes.max_mib)"),
        (FORM, f"--{BOUNDARY}\r\n".encode() * 50, 400, "form"),
        (FORM, form(b"x", CONFIG).replace(b'name="file_name"', b""), 400, "form"),
        (FORM, form(b"x", WEIGHTS)[: -len(BOUNDARY) - 8] + form(b"y", WEIGHTS), 400, "Too many files"),
        (FORM, b"".join([form(b"", CONFIG)[:80] + b"v" * (2 << 20)]), 400, "Part exceeded maximum size"),
    ],
)
async def test_a_hostile_form_is_refused_and_the_next_upload_works(
    make_site: SiteMaker, tables: dict[str, Any], kind: str, body: bytes, status: int, words: str
) -> None:
    tables["finetunes"]["max_mib"] = 3
    async with make_site(**tables) as site:
        id = (await create(site)).json["result"]["id"]
        path = f"{PATH}/{id}/finetune-assets"
        refused = await call(site.app, path, body=body, authorization=ANN, **{"content-type": kind})
        assert (refused.status, words in why(refused)) == (status, True), refused.body
        for each in adapter_files().items():
            assert (await put(site, id, *each)).status == 200


async def test_a_client_that_leaves_half_way_leaves_nothing(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path
) -> None:
    async with make_site(**tables) as site:
        id = (await create(site)).json["result"]["id"]
        headers = {"content-type": FORM, "authorization": ANN}
        half = form(adapter_files()[WEIGHTS], WEIGHTS)[:500]
        under_way = start(site.app, f"{PATH}/{id}/finetune-assets", body=half, is_whole=False, **headers)
        under_way.disconnect()
        await under_way.done()
        assert not under_way.is_started
        assert [path.name for path in (tmp_path / "kept" / "ams1" / id).iterdir()] == ["finetune.json"]


async def test_a_full_disk_is_named_and_keeps_what_there_was(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    async with make_site(**tables) as site:
        id = (await create(site)).json["result"]["id"]
        config, weights = adapter_files().items()
        assert (await put(site, id, *config)).status == 200
        too_large = (weights[0], bytes(3 << 20))  # while it arrives, it is kept in memory only up to 1 MiB
        for num_bytes, (name, content) in ((100, weights), (2 << 20, too_large)):
            with files_of_at_most(num_bytes):
                refused = await put(site, id, name, content)
            assert (refused.status, why(refused)) == (429, "the fine-tune cannot be stored: this site's disk is full")
        assert (await put(site, id, *weights)).status == 200
        assert (await ask(site, lora="tone")).status == 200


async def test_so_many_files_come_in_at_once(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    async with make_site(**tables) as site:
        id = (await create(site)).json["result"]["id"]
        headers = {"content-type": FORM, "authorization": ANN}
        content = form(adapter_files()[WEIGHTS], WEIGHTS)
        path = f"{PATH}/{id}/finetune-assets"
        slow, *others = [
            start(site.app, path, body=content[:99], is_whole=False, **headers) for _ in range(MOST_UPLOADS)
        ]
        while (refused := await put(site, id, "other", b"")).status == 400:  # not all slow uploads have arrived yet
            pass
        assert (refused.status, "files are being uploaded" in why(refused)) == (429, True)
        for other in others:
            other.disconnect()
            await other.done()
        slow.send(content[99:], is_last=True)
        assert (await slow.done()).status == 200
        assert (await put(site, id, CONFIG, adapter_files()[CONFIG])).status == 200


async def test_a_site_that_keeps_none_says_where_it_would(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    del tables["finetunes"]
    async with make_site(**tables) as site:
        assert await names(site) == []
        refused = await create(site)
        assert (refused.status, "finetunes.directory" in why(refused)) == (404, True)


async def test_the_public_adapters_are_listed_a_part_at_a_time(
    make_site: SiteMaker, tables: dict[str, Any], tmp_path: Path
) -> None:
    for i in range(5):
        write_files(tmp_path / "public" / f"x{i}", adapter_files())
    async with make_site(**tables) as site:
        shown = (await call(site.app, f"{PATH}/public?limit=2.0&offset=4", authorization=BOB)).json
        assert [each["name"] for each in shown["result"]] == ["x3", "x4"]
        assert shown["result"][0]["public"] is True
        assert shown["result_info"]["total_count"] == 6
        assert (await ask(site, BOB, lora=shown["result"][0]["id"])).status == 200
        assert (await call(site.app, f"{PATH}/public?limit=-1")).status == 400


async def test_only_routers_read_bring_and_remove(make_site: SiteMaker, tables: dict[str, Any]) -> None:
    async with make_site(**tables, hop_secret=SECRET) as site:
        id = await upload(site)
        one = f"{INTERNAL_PATH}/{id}"

        async def order(method: str, path: str, body: bytes = b"") -> Exchange:
            hop = signed(path=path, method=method, body=body)
            return await call(site.app, path, body=body, method=method, **hop)

        for path, method in ((INTERNAL_PATH, "GET"), (one, "GET"), (one, "PUT"), (one, "DELETE")):
            assert (await call(site.app, path, method=method, authorization=ANN)).status == 403
        told = (await order("GET", INTERNAL_PATH)).json
        assert [each["id"] for each in told["kept"]] == [id]
        assert told["state"] == (await call(site.app, "/status")).json["finetunes"]
        finetune, config, weights = unpacked((await order("GET", one)).body)
        assert {CONFIG: bytes(config), WEIGHTS: bytes(weights)} == adapter_files()
        assert (await order("PUT", one, packed(finetune, bytes(config), bytes(weights)))).status == 204
        assert (await order("DELETE", one)).status == 204
        assert (await ask(site, lora="tone")).status == 400
        brought = await order("PUT", one, packed(finetune, bytes(config), bytes(weights)))
        assert (brought.status, "was removed here" in why(brought)) == (409, True)
        other = Finetune("an-id", finetune.owner, "", "@test/tiny", "tone", is_whole=True)
        assert (await order("PUT", one, packed(other, bytes(config), bytes(weights)))).status == 204
        assert (await ask(site, lora="an-id")).status == 200
        for body in (b"", b"x\ny", packed(other, b"", b"")):
            assert (await order("PUT", one, body)).status == 400
        climbing = packed(Finetune("../x", "o", "", "tiny", "y"), bytes(config), bytes(weights))
        assert (await order("PUT", one, climbing)).status == 400


def test_a_store_finds_again_what_it_had_and_clears_what_was_half_done(tmp_path: Path) -> None:
    store = FinetuneStore(tmp_path, FinetunesConfig())
    kept = store.create("o", "", "tiny", "tone", "")
    store.remove(store.create("o", "", "tiny", "gone", "").id)
    store.remove("elsewhere")
    (tmp_path / ".half").mkdir()
    (tmp_path / "other").mkdir()  # the folder of another owner
    old = tmp_path / "removed" / "old"
    old.touch()
    os.utime(old, (0, time.time() - 40 * 86400))
    again = FinetuneStore(tmp_path, FinetunesConfig())
    assert again.of("o") == [kept]
    assert again.state != store.state
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([kept.id, "other", "removed"])
    assert len(again.everything().removed) == 1


class SlowFile(io.BytesIO):
    """A file on a slow disk: reading blocks until the test releases it."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.is_read, self.may_go_on = threading.Event(), threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        self.is_read.set()
        assert self.may_go_on.wait(60)
        return super().read(size)


def test_storing_a_file_delays_no_request_for_another(tmp_path: Path) -> None:
    """Requests look up their adapters in the site's event loop."""
    store = FinetuneStore(tmp_path, FinetunesConfig())
    base: dict[str, Any] = {}
    old = store.create("ann", "", "tiny", "old", "")
    file = SlowFile(adapter_files()[CONFIG])
    writer = threading.Thread(target=store.put, args=(store.create("ann", "", "tiny", "new", ""), CONFIG, file, base))
    writer.start()
    try:
        assert file.is_read.wait(60)
        with ThreadPoolExecutor(1) as aside:
            asked = aside.submit(lambda: (store.find("ann", "old"), store.of("ann")[0], store.everything().kept[0]))
            try:
                assert asked.result(timeout=60) == (old, old, old)
            finally:
                file.may_go_on.set()
    finally:
        file.may_go_on.set()
        writer.join(60)


def test_what_no_other_site_can_have_leaves_nothing_when_it_is_removed(tmp_path: Path) -> None:
    """Otherwise an account that creates and removes many adapters would fill the list of removed ones."""
    store = FinetuneStore(tmp_path, FinetunesConfig())
    store.remove(store.create("ann", "", "tiny", "begun", "").id)
    assert store.everything().removed == ()
    store.remove("from-elsewhere")
    assert store.everything().removed == ("from-elsewhere",)


async def test_a_directory_that_cannot_be_used_stops_the_start(make_site: SiteMaker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"finetunes\.directory .*/file/ams1 cannot be used"):
        async with make_site(finetunes={"directory": str(tmp_path / "file")}):
            pass
