"""Adapters of a site's models: their names in requests, and adapters that are deleted, changed or invalid."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.engine.adapters.peft import CONFIG, digest_of
from pilotlight.sites.config import ConfigError
from tests.adapters import write_adapter
from tests.asgi import call
from tests.checkpoints import write_llama, write_tokenizer
from tests.runtime.conftest import Site, SiteMaker
from tests.runtime.test_real_engine import Process

CHAT, RUN, MODELS = "/v1/chat/completions", "/client/v4/accounts/acc1/ai/run/@test/tiny", "/v1/models"


def hello(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], **more}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    model = write_llama(directory / "base")
    for name in ("de", "fr"):
        write_adapter(directory / name, model, seed=len(name))
    shutil.rmtree(directory / "base")
    return directory


@pytest.fixture
def models(model_directory: Path, written: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Make a model with an adapter in its file, and a directory of other adapters."""
    (tmp_path / "more").mkdir()
    shutil.copytree(written / "fr", tmp_path / "more" / "fr")
    table = {"name": "tiny", "source": str(model_directory), "aliases": ["@test/tiny", "tiny:latest"]}
    return [
        {**table, "adapters": [{"name": "de", "path": str(written / "de")}], "adapters_dir": str(tmp_path / "more")}
    ]


def adapter_of(site: Site) -> tuple[str, str] | None:
    source = site.engine.submits[-1].adapter
    return None if source is None else (source.name, source.digest)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [("tiny", None), ("tiny:de", "de"), ("@test/tiny:fr", "fr"), ("tiny:latest", None), ("tiny:latest:de", "de")],
)
async def test_a_name_with_an_adapters_suffix_requests_it(
    make_site: SiteMaker, models: list[dict[str, Any]], written: Path, name: str, adapter: str | None
) -> None:
    async with make_site(models=models) as site:
        answer = await call(site.app, CHAT, hello(name, n=2))
        assert answer.status == 200
        assert answer.json["model"] == name
        assert adapter_of(site) == (None if adapter is None else (adapter, digest_of(written / adapter)))
        assert [submit.model for submit in site.engine.submits] == ["tiny"] * 2


@pytest.mark.parametrize(
    "name", ["tiny:es", "tiny:", "tiny:../more/fr", "tiny:fr/../fr", "other:de", "tiny:de:fr", ":de"]
)
async def test_an_adapter_that_is_not_there_is_named(
    make_site: SiteMaker, models: list[dict[str, Any]], name: str
) -> None:
    async with make_site(models=models) as site:
        answer = await call(site.app, CHAT, hello(name))
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
        assert site.engine.submits == []
        assert (await call(site.app, CHAT, hello("tiny:de"))).status == 200


async def test_workers_ai_names_it_beside_the_model(make_site: SiteMaker, models: list[dict[str, Any]]) -> None:
    async with make_site(models=models) as site:
        assert (await call(site.app, RUN, {"prompt": "Hi", "lora": "fr"})).status == 200
        assert (adapter_of(site) or "")[0] == "fr"
        assert (await call(site.app, RUN, {"prompt": "Hi", "lora": ""})).status == 200
        assert adapter_of(site) is None
        unknown = await call(site.app, RUN, {"prompt": "Hi", "lora": "es"})
        assert unknown.status == 400
        assert "has no adapter named 'es'" in unknown.json["errors"][0]["message"]
        both = await call(site.app, f"{RUN}:fr", {"prompt": "Hi", "lora": "de"})
        assert (both.status, both.json["errors"][0]["message"][:30]) == (400, "the request names two adapters"), (
            both.body
        )
        refused = await call(site.app, CHAT, hello("tiny", lora="fr"))
        assert "BASE:ADAPTER" in refused.json["error"]["message"]


async def test_adapters_are_listed_as_models_with_a_parent(make_site: SiteMaker, models: list[dict[str, Any]]) -> None:
    async with make_site(models=models) as site:
        listed = (await call(site.app, MODELS, method="GET")).json["data"]
        named = [(entry["id"], entry.get("root"), entry.get("parent")) for entry in listed]
        assert named == [("tiny", None, None), ("tiny:de", "de", "tiny"), ("tiny:fr", "fr", "tiny")]
        one = (await call(site.app, f"{MODELS}/tiny:fr", method="GET")).json
        assert one == listed[2]
        assert (await call(site.app, f"{MODELS}/tiny:es", method="GET")).status == 404


async def test_a_folder_is_an_adapter_while_it_is_there(
    make_site: SiteMaker, models: list[dict[str, Any]], written: Path, tmp_path: Path
) -> None:
    async with make_site(models=models) as site:
        assert (await call(site.app, CHAT, hello("tiny:es"))).status == 404
        shutil.copytree(written / "de", tmp_path / "more" / "es")
        assert (await call(site.app, CHAT, hello("tiny:es"))).status == 200
        before = adapter_of(site)
        config = tmp_path / "more" / "es" / CONFIG
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 32}))
        assert (await call(site.app, CHAT, hello("tiny:es"))).status == 200
        assert adapter_of(site) != before, "other bytes are another adapter"
        shutil.rmtree(tmp_path / "more" / "es")
        assert (await call(site.app, CHAT, hello("tiny:es"))).status == 404
        (tmp_path / "more" / "es").mkdir()
        (tmp_path / "more" / "es" / CONFIG).write_text("{}")
        broken = await call(site.app, CHAT, hello("tiny:es"))
        assert (broken.status, broken.json["error"]["code"]) == (500, "model_load_failed")
        assert "adapter 'es' cannot be used" in broken.json["error"]["message"]


@pytest.mark.long
async def test_ten_thousand_adapters_cost_a_start_nothing(
    make_site: SiteMaker, models: list[dict[str, Any]], tmp_path: Path
) -> None:
    for i in range(10_000):
        folder = tmp_path / "more" / f"n{i}"
        folder.mkdir()
        (folder / CONFIG).touch()
    async with make_site(models=models) as site:
        assert (await call(site.app, CHAT, hello("tiny:fr"))).status == 200
        assert len((await call(site.app, MODELS, method="GET")).json["data"]) == 10_003


async def test_an_account_asks_for_the_adapters_that_are_open_to_it(
    make_site: SiteMaker, models: list[dict[str, Any]]
) -> None:
    from pilotlight.sites.key_files import new_key

    key, known = new_key("k", account="acme")
    keys = [{"name": "k", "key_sha256": known.key_sha256, "scopes": ["models"], "account": "acme"}]
    accounts = [{"name": "acme", "models": ["tiny:fr", "@test/tiny", "@test/tiny:fr"]}]
    bearer = f"Bearer {key}"
    async with make_site(models=models, keys=keys, accounts=accounts, door={"require_key": True}) as site:
        assert (await call(site.app, CHAT, hello("tiny:fr"), authorization=bearer)).status == 200
        for path, body in ((CHAT, hello("tiny:de")), (RUN, {"prompt": "Hi", "lora": "de"})):
            assert (await call(site.app, path, body, authorization=bearer)).status == 403
        assert (await call(site.app, RUN, {"prompt": "Hi", "lora": "fr"}, authorization=bearer)).status == 200


async def test_embeddings_have_no_adapters(make_site: SiteMaker, models: list[dict[str, Any]]) -> None:
    async with make_site(models=models) as site:
        answer = await call(site.app, "/v1/embeddings", {"model": "tiny:de", "input": "Hi"})
        assert "adapters support neither embeddings" in answer.json["error"]["message"]


async def test_an_adapter_that_a_file_names_is_looked_at_before_the_site_starts(
    make_site: SiteMaker, models: list[dict[str, Any]]
) -> None:
    broken = [{**models[0], "adapters": [{"name": "de", "path": "/nowhere"}]}]
    with pytest.raises(
        ConfigError, match=r"model 'tiny': adapter 'de' cannot be used: /nowhere has no adapter_config\.json"
    ):
        async with make_site(models=broken):
            pass
    twice = [{**models[0], "adapters": models[0]["adapters"] * 2}]
    with pytest.raises(ConfigError, match="adapter of tiny"):
        async with make_site(models=twice):
            pass


@pytest.mark.process
def test_a_site_answers_as_one_with_merged_weights(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    for name in ("a", "b"):
        write_adapter(tmp_path / "adapters" / name, model, seed=ord(name)).save_pretrained(tmp_path / f"merged-{name}")
    for folder in ("tiny", "merged-a", "merged-b"):
        write_tokenizer(tmp_path / folder)
    tables = [
        f'[[models]]\nname = "{name}"\nsource = "{tmp_path}/{name}"\n' for name in ("merged-a", "merged-b", "tiny")
    ]
    file = tmp_path / "ams1.toml"
    file.write_text(
        'name = "ams1"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.03\nadapter_slots = 1\nstandby = false\n'
        + "".join(tables)
        + f'adapters_dir = "{tmp_path}/adapters"\n'
    )
    process = Process(file, tmp_path / "log")
    try:
        with httpx.Client(base_url=process.url, timeout=30) as client:

            def text(name: str) -> str:
                body = hello(name, temperature=0, max_tokens=12, ignore_eos=True)
                answer = client.post(CHAT, json=body).json()
                return str(answer["choices"][0]["message"]["content"])

            said = {name: text(name) for name in ("tiny", "tiny:a", "tiny:b", "tiny:a")}
            assert said["tiny:a"] == text("merged-a")
            assert said["tiny:b"] == text("merged-b")
            assert len(set(said.values())) == 3
        assert process.stop() == 0
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
