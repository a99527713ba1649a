"""A site's file can reduce a model's context, but not increase it."""

from pathlib import Path

from tests.asgi import call, eventually
from tests.runtime.conftest import SiteMaker


def model(directory: Path, context_tokens: int) -> list[dict[str, object]]:
    return [{"name": "tiny", "source": str(directory), "context_tokens": context_tokens}]


async def test_prompt_and_answer_have_no_more_than_the_file_gives(make_site: SiteMaker, model_directory: Path) -> None:
    async with make_site(models=model(model_directory, 64)) as site:
        listed = (await call(site.app, "/v1/models", method="GET")).json["data"]
        assert (listed[0]["max_model_len"], listed[0]["context_length"]) == (64, 64)
        refused = await call(site.app, "/v1/completions", {"model": "tiny", "prompt": [5] * 64})
        assert "maximum context length is 64 tokens" in refused.json["error"]["message"]
        served = await call(site.app, "/v1/completions", {"model": "tiny", "prompt": [5] * 60, "max_tokens": 100})
        assert served.status == 200
        (submitted,) = site.engine.submits
        assert submitted.sampling.max_tokens == 4


async def test_more_than_there_is_is_refused_with_both_numbers(make_site: SiteMaker, model_directory: Path) -> None:
    async with make_site(models=model(model_directory, 513), wait=False) as site:
        refused = await call(site.app, "/v1/completions", {"model": "tiny", "prompt": [5]})
        assert refused.json["error"]["code"] == "model_load_failed"
        assert (
            "its context_tokens are 513, and the model and its KV cache allow 512" in refused.json["error"]["message"]
        )


async def test_a_model_that_was_loaded_and_cannot_be_used_leaves_its_host(
    make_site: SiteMaker, model_directory: Path
) -> None:
    async with make_site(models=model(model_directory, 513), wait=False) as site:
        refused = await call(site.app, "/v1/completions", {"model": "tiny", "prompt": [5]})
        assert refused.json["error"]["code"] == "model_load_failed"
        engine = site.engine
        assert engine.specs["tiny"].path == str(model_directory), "its weights were loaded"
        await eventually(lambda: engine.loaded == [])
        replica = site.app.site.models.states["tiny"].replicas[0]
        await eventually(lambda: not (replica.is_changing or replica.holds_memory))
