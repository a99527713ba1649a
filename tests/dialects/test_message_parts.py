"""Parts of messages that no model takes, in each dialect: the error names what can be sent."""

from typing import Any

import orjson
import pytest

from pilotlight.dialects.anthropic import parse_messages
from pilotlight.dialects.body.text_files import NO_PDF
from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.dialects.openai_responses import parse_response
from pilotlight.dialects.requests import Conversation
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


TEXT = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
BLOCKS = {"type": "content", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}
FOUND = {
    "type": "search_result",
    "source": "https://a.example",
    "title": "Sky",
    "content": [{"type": "text", "text": "Blue."}],
}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": TEXT}, "The sky is green."),
        ({"type": "document", "source": TEXT, "title": "Sky", "context": None}, "Sky\nThe sky is green."),
        ({"type": "document", "source": BLOCKS, "title": "Sky", "context": "Old."}, "Sky\nOld.\nOne.\nTwo."),
        ({"type": "document", "source": {"type": "content", "content": "One."}}, "One."),
        (FOUND, "Sky\nhttps://a.example\nBlue."),
        ({"type": "tool_reference", "tool_name": "f"}, "The tool f can be called now."),
    ],
)
def test_documents_and_search_results_become_text_of_users_and_of_tools(block: dict[str, Any], text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    read = messages_of({"role": "user", "content": [result, {"type": "text", "text": "So?"}, block]})
    assert [message["content"] for message in read] == [text, f"So?\n{text}"]


def test_images_of_a_document_are_the_messages() -> None:
    source = {"type": "content", "content": [{"type": "text", "text": "One."}, PICTURE]}
    (read,) = messages_of({"role": "user", "content": [{"type": "document", "source": source}]})
    assert [part["type"] for part in read["content"]] == ["text", "image"]


def test_citations_are_named_as_ignored() -> None:
    document = {"type": "document", "source": TEXT, "citations": {"enabled": True}}
    off = {**FOUND, "citations": {"enabled": False}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [result, off, document]}]}
    ignored = parse_messages(orjson.dumps(body), lambda name: name).ignored
    assert ignored == ("messages[0].content[0].content[0].citations", "messages[0].content[2].citations")


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "aa"},
        {"type": "url", "url": "https://a.example/a.pdf"},
        {"type": "file", "file_id": "file_1"},
    ],
)
def test_a_pdf_file_does_not_end_an_agents_session(source: dict[str, Any]) -> None:
    file = {"type": "document", "source": source, "title": "Plan"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [file]}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [result, file]}]}
    parsed = parse_messages(orjson.dumps(body), lambda name: name)
    assert parsed.ignored == ("messages[0].content[0].content[0].source", "messages[0].content[1].source")
    assert str(parsed.prompt).count(NO_PDF) == 2


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"type": "document", "source": {"type": "text"}}, "messages[0].content[0].source.data: must be a string"),
        ({"type": "document"}, 'source: must have the type "text" or "content"'),
        ({**FOUND, "title": None}, "messages[0].content[0].title: must be a string"),
        ({**FOUND, "content": None}, "messages[0].content[0].content: must be a string or a list of blocks"),
        ({"type": "tool_reference"}, "messages[0].content[0].tool_name: must be a string"),
    ],
)  # fmt: skip
def test_a_document_that_is_not_read_is_refused_by_name(block: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal("messages", messages=[{"role": "user", "content": [block]}])


def messages_of(*given: dict[str, Any]) -> list[dict[str, Any]]:
    body = orjson.dumps({"model": "m", "max_tokens": 5, "messages": given})
    prompt = parse_messages(body, lambda name: name).prompt
    assert isinstance(prompt, Conversation)
    return list(prompt.messages)
