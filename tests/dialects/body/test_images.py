"""Images in prompts as a router sees them: it identifies them by digest, and does not hold their bytes."""

from typing import Any

import pytest

from pilotlight.dialects.prefix_pieces import IMAGE_BYTES
from pilotlight.dialects.table import prompt_pieces
from pilotlight.wire.errors import Dialect
from tests.pictures import data_url

LARGE = {letter: data_url(letter.encode() * 600_000) for letter in "ab"}


def chat(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def messages(url: str) -> dict[str, Any]:
    image = {"type": "image", "source": {"type": "base64", "data": url.partition(",")[2]}}
    return {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]}]
    }


def response(url: str) -> dict[str, Any]:
    item = {"type": "function_call_output", "call_id": "t", "output": [{"type": "input_image", "image_url": url}]}
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}, item]}


def run(url: str) -> dict[str, Any]:
    return {"prompt": "What is it?", "image": url}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (Dialect.OPENAI, chat),
        (Dialect.ANTHROPIC, messages),
        (Dialect.OPENAI_RESPONSES, response),
        (Dialect.WORKERS_AI, run),
    ],
)
def test_two_images_are_two_conversations_and_neither_is_held(dialect: Dialect, body: Any) -> None:
    one, same, other = ([piece for piece, _ in prompt_pieces(dialect, body(LARGE[letter]))] for letter in "aab")
    assert one == same
    assert all(a != b for a, b in zip(one, other, strict=True) if a != b"What is it?")
    assert sum(map(len, one)) < 2 * IMAGE_BYTES + 500
