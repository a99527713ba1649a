"""A model that is computed in another type than it is stored in is reported once in the log, and in the list of models."""

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from pilotlight.engine.api.protocol import ModelInfo
from tests.asgi import call
from tests.fakes import FakeEngineClient, FakeLauncher
from tests.runtime.conftest import SiteMaker

CHAT = "/ai/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("dtype", "stored", "words"),
    [
        ("bfloat16", ("F16",), ["model tiny is stored in float16 and computed in bfloat16, which keeps 8 of"]),
        (
            "float32",
            ("BF16", "F16"),
            ["model tiny is stored in float16 and computed in float32, with the same weights"],
        ),
        ("bfloat16", ("BF16", "F32"), []),
    ],
)
async def test_a_conversion_is_logged_once_and_listed(
    make_site: SiteMaker, caplog: pytest.LogCaptureFixture, dtype: str, stored: tuple[str, ...], words: list[str]
) -> None:
    class Converting(FakeEngineClient):
        async def load_model(self, *arguments: Any) -> ModelInfo:
            return replace(await super().load_model(*arguments), dtype=dtype, stored_dtypes=stored)

    launcher = FakeLauncher()
    launcher.client_class = Converting
    with caplog.at_level(logging.INFO):
        async with make_site(launcher=launcher) as site:
            await site.app.site.models.put_to_sleep("tiny")
            assert (await call(site.app, CHAT, HELLO)).status == 200  # this wakes the model again
            listed = (await call(site.app, "/v1/models")).json["data"][0]
    assert (listed["dtype"], listed["stored_dtypes"]) == (dtype, list(stored))
    logged = [message for message in caplog.messages if "is stored in" in message]
    assert len(logged) == len(words)
    assert all(message.startswith(word) for message, word in zip(logged, words, strict=True))
