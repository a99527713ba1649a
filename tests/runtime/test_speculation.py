"""Speculation at a site: in the usage of an answer, and in the engine host's load command."""

from pathlib import Path

from pilotlight.engine.api.protocol import TokenOutput
from tests.asgi import call
from tests.runtime.conftest import SiteMaker

REQUEST = {"model": "tiny", "prompt": [5, 6], "max_tokens": 20}
OUTPUTS = (
    TokenOutput("s", (70,), num_cached_tokens=0),
    TokenOutput("s", (71, 72, 73), num_drafted=4, num_accepted=2),
    TokenOutput("s", (74,), num_drafted=3),
    TokenOutput("s", (75, 76), finish_reason="length", num_drafted=1, num_accepted=1),
)


async def test_usage_says_how_many_drafts_were_right_and_wrong(make_site: SiteMaker) -> None:
    async with make_site() as site:
        site.engine.answer = lambda submit: [
            TokenOutput(submit.sequence_id, each.token_ids, each.finish_reason, each.num_cached_tokens,
                        num_drafted=each.num_drafted, num_accepted=each.num_accepted)
            for each in OUTPUTS
        ]  # fmt: skip
        usage = (await call(site.app, "/v1/completions", REQUEST)).json["usage"]
    assert usage["completion_tokens"] == 7, "rejected drafts are not counted as tokens"
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 5)


async def test_a_model_is_loaded_with_the_drafters_that_its_site_names(
    make_site: SiteMaker, model_directory: Path
) -> None:
    model = {"name": "tiny", "source": str(model_directory), "speculate": "suffix,grammar"}
    async with make_site(models=[model]) as site:
        await call(site.app, "/v1/completions", REQUEST)
        assert site.engine.specs["tiny"].speculate == "suffix,grammar"
