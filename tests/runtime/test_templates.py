"""Compiling a model's chat template, and reporting an invalid one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pilotlight.runtime.timings import SiteTimings
from tests.asgi import call, eventually, start
from tests.fakes import FakeLauncher
from tests.runtime.conftest import Site, SiteMaker

CHAT, COMPLETIONS = "/ai/v1/chat/completions", "/ai/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
ONCE = {"model": "tiny", "prompt": "Once"}
SENTENCE = "the model's chat template is not valid Jinja"


@pytest.fixture
def broken(model_directory: Path) -> Path:
    (model_directory / "chat_template.jinja").write_text("{% if %}")
    return model_directory


def asleep(directory: Path) -> list[dict[str, Any]]:
    return [{"name": "tiny", "source": str(directory), "residency": "disk"}]


async def model_status(site: Site) -> Any:
    return (await call(site.app, "/status")).json["models"][0]


async def test_a_model_with_a_broken_template_is_not_loaded_without_a_waiting_request(
    make_site: SiteMaker, broken: Path
) -> None:
    async with make_site(wait=False) as site:
        await eventually(lambda: SENTENCE in str(site.app.site.why_not_ready()))
        model = await model_status(site)
        assert model["residency"] == "failed"
        assert SENTENCE in model["detail"]
        for path, body in ((CHAT, HELLO), (COMPLETIONS, ONCE)):
            answer = await call(site.app, path, body)
            assert (answer.status, answer.json["error"]["code"]) == (500, "model_load_failed")
            assert SENTENCE in answer.json["error"]["message"]


@pytest.mark.process
async def test_a_text_that_woke_a_model_is_answered_before_its_template_is_compiled(
    make_site: SiteMaker, model_directory: Path
) -> None:
    async with make_site(models=asleep(model_directory)) as site:
        assert (await call(site.app, COMPLETIONS, ONCE)).status == 200
        rendering = site.app.site.models.states["tiny"].text.rendering
        assert not rendering.is_checked
        assert (await call(site.app, CHAT, HELLO)).status == 200
        assert rendering.is_checked


@pytest.mark.process
async def test_a_conversation_wakes_a_model(make_site: SiteMaker, model_directory: Path) -> None:
    async with make_site(models=asleep(model_directory)) as site:
        answers = await asyncio.gather(*(call(site.app, CHAT, HELLO) for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4


async def test_a_conversation_finds_a_broken_template_where_texts_are_answered(
    make_site: SiteMaker, broken: Path
) -> None:
    async with make_site(models=asleep(broken)) as site:
        assert (await call(site.app, COMPLETIONS, ONCE)).status == 200
        for _ in range(2):
            answer = await call(site.app, CHAT, HELLO)
            assert (answer.status, answer.json["error"]["code"]) == (500, "model_load_failed")
            assert answer.json["error"]["message"].startswith(f"model 'tiny' takes no conversations: {SENTENCE}")
        model = await model_status(site)
        assert model["residency"] == "device"
        assert SENTENCE in model["detail"]
        assert (await call(site.app, COMPLETIONS, ONCE)).status == 200
        await site.is_idle()


async def test_a_broken_template_is_found_soon_without_a_conversation(
    make_site: SiteMaker, broken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()
    launcher = FakeLauncher(lambda client: setattr(client, "load_gate", gate))
    async with make_site(launcher=launcher, wait=False, timings=SiteTimings(template_after_s=0.0)) as site:
        waiting = start(site.app, COMPLETIONS, ONCE)
        await eventually(lambda: site.app.site.models.states["tiny"].demand.waiters == 1)
        gate.set()
        assert (await waiting.done()).status == 200
        await eventually(lambda: SENTENCE in str(site.app.site.why_not_ready()))
        ready = await call(site.app, "/readyz")
        assert ready.status == 503
        assert ready.json["reasons"][0].startswith(f"model 'tiny': {SENTENCE}")
        assert SENTENCE in (await model_status(site))["detail"]
    assert any(SENTENCE in record.message for record in caplog.records)


@pytest.mark.process
async def test_a_site_that_stops_waits_for_no_template(make_site: SiteMaker, model_directory: Path) -> None:
    async with make_site(models=asleep(model_directory)) as site:
        assert (await call(site.app, COMPLETIONS, ONCE)).status == 200
        checks = site.app.site.models._waker.checks
        assert len(checks) == 1
    assert not checks


async def test_an_unreadable_template_fails_the_load_although_a_request_waits(
    make_site: SiteMaker, model_directory: Path
) -> None:
    config = json.loads((model_directory / "tokenizer_config.json").read_text())
    (model_directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": [1]}))
    async with make_site(models=asleep(model_directory)) as site:
        answer = await call(site.app, COMPLETIONS, ONCE)
        assert (answer.status, answer.json["error"]["code"]) == (500, "model_load_failed")
        assert "a string or a list" in answer.json["error"]["message"]
