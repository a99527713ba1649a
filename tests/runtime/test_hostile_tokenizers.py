"""A tokenizer that would crash the process that loads it, or never finish, is refused, and the site's other models answer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.errors import TokenizerError
from pilotlight.runtime.fetching.store import STORE_ENV
from pilotlight.runtime.models.text import NOTED_FROM_BYTES, require_safe_tokenizer
from pilotlight.runtime.timings import SiteTimings
from tests.asgi import call, eventually
from tests.fakes import write_model_directory
from tests.runtime.conftest import SiteMaker

CHAT = "/ai/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
NO_TIME = 0.0001  # seconds, in which no tokenizer can be checked
# applied three times, this makes one word of 125 TB
GROWS = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 5000}


def change_tokenizer(directory: Path, **parts: Any) -> None:
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))


@pytest.mark.process
@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 3}}, "memory"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}, "is not a tokenizer"),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 10**8}, "unk_token": "a"}},
            "has the token id 100000000",
        ),
        ({"decoder": []}, "is not a tokenizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "is not a tokenizer: Precompiled"),
        (
            {
                "model": {
                    "type": "BPE",
                    "vocab": {"a": 0, "b": 1},
                    "merges": [["a", "b"]],
                    "continuing_subword_prefix": "a" * 99,
                }
            },
            "is not a tokenizer: range end index",
        ),
    ],
)
async def test_a_hostile_tokenizer_costs_no_other_model_anything(
    make_site: SiteMaker, model_directory: Path, tmp_path: Path, parts: dict[str, Any], reason: str
) -> None:
    hostile = write_model_directory(tmp_path / "hostile")
    change_tokenizer(hostile, **parts)
    models = [
        {"name": "tiny", "source": str(model_directory)},
        {"name": "hostile", "source": str(hostile), "residency": "disk"},
    ]
    async with make_site(models=models) as site:
        refused = await call(site.app, CHAT, {**HELLO, "model": "hostile"})
        assert (refused.status, refused.json["error"]["code"]) == (500, "model_load_failed")
        assert reason in refused.json["error"]["message"]
        assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_a_tokenizer_that_takes_for_ever_is_given_up(make_site: SiteMaker, model_directory: Path) -> None:
    async with make_site(wait=False, timings=SiteTimings(tokenizer_cpu_s=NO_TIME)) as site:
        await eventually(lambda: "CPU time" in str(site.app.site.why_not_ready()))
        assert "has a tokenizer that cannot be used" in str(site.app.site.why_not_ready())


async def test_a_large_tokenizer_is_checked_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_ENV, str(tmp_path / "store"))
    directory = write_model_directory(tmp_path / "model")
    with pytest.raises(TokenizerError, match="CPU time"):
        await require_safe_tokenizer(directory, NO_TIME)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "x" * NOTED_FROM_BYTES}))
    with pytest.raises(TokenizerError, match="CPU time"):
        await require_safe_tokenizer(directory, NO_TIME)
    await require_safe_tokenizer(directory, 60.0)
    await require_safe_tokenizer(directory, NO_TIME)
    config.write_text(json.dumps({"chat_template": "y" * NOTED_FROM_BYTES}))
    with pytest.raises(TokenizerError, match="CPU time"):
        await require_safe_tokenizer(directory, NO_TIME)
    (tmp_path / "store").rename(tmp_path / "moved")
    (tmp_path / "store").write_text("not a folder")
    await require_safe_tokenizer(directory, 60.0)


async def test_a_tokenizer_larger_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "model")
    os.truncate(directory / "tokenizer.json", 1 << 40)  # a sparse file
    with pytest.raises(TokenizerError, match="it is larger than 256 MiB"):
        await require_safe_tokenizer(directory, 60.0)
