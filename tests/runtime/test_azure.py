"""Azure's paths and its header for keys at a site, and fine-tuning jobs without stored adapters."""

from typing import Any

import pytest

from tests.asgi import call
from tests.fakes import says
from tests.runtime.conftest import Site

CHAT = "/openai/deployments/tiny/chat/completions?api-version=2024-10-21"


async def test_a_deployments_path_is_the_chat_of_its_model(site: Site) -> None:
    site.engine.script = says("Hello")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    answer = await call(site.app, CHAT, asked, api_key="abc")
    assert answer.json["choices"][0]["message"]["content"] == "Hello"
    assert (await call(site.app, "/openai/models")).json["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": "gpt-4o"}])
async def test_a_deployment_is_the_model_whatever_the_body_says(site: Site, named: dict[str, Any]) -> None:
    site.engine.script = says("Hello")
    asked = {"messages": [{"role": "user", "content": "Hi"}], **named}
    assert (await call(site.app, CHAT, asked, api_key="abc")).json["model"] == "tiny"


async def test_fine_tuning_jobs_are_listed_and_none_can_be_started(site: Site) -> None:
    assert (await call(site.app, "/v1/fine_tuning/jobs")).json == {"object": "list", "data": [], "has_more": False}
    started = await call(site.app, "/v1/fine_tuning/jobs", {"model": "tiny", "training_file": "f"})
    assert (started.status, "training is not supported" in started.json["error"]["message"]) == (501, True)
