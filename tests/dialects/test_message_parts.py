"""Parts of messages that no model takes, in each dialect: the error names what can be sent."""

from typing import Any

import orjson
import pytest

from pilotlight.dialects.anthropic import parse_messages
from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.dialects.openai_responses import parse_response
from pilotlight.wire.errors import ApiError

AUDIO = {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
PARSERS = {"chat": parse_chat, "messages": parse_messages, "responses": parse_response}


def refusal(dialect: str, **fields: Any) -> str:
    with pytest.raises(ApiError) as refused:
        PARSERS[dialect](orjson.dumps({"model": "m", "max_tokens": 5} | fields), lambda name: name)
    assert refused.value.word in ("unsupported_parameter", "invalid_request")
    return str(refused.value)


@pytest.mark.parametrize("part", [AUDIO, VIDEO], ids=["audio", "video"])
@pytest.mark.parametrize("dialect", PARSERS)
def test_audio_and_video_are_refused_by_name_and_with_what_models_take(dialect: str, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    said = refusal(dialect, **{"input" if dialect == "responses" else "messages": messages})
    assert f"of type {part['type']!r} are not supported; send text, and image" in said
    assert "to models that take" in said


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [PICTURE], "messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [PICTURE]}]},
    ],
    ids=["system", "assistant"],
)
def test_an_image_of_anothers_message_is_not_called_unsupported(fields: dict[str, Any]) -> None:
    assert "only users and tools may send images" in refusal("messages", **fields)
