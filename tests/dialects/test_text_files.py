"""Files of text in messages: the same text in all dialects, and refusals with the path of the field."""

from base64 import b64encode
from typing import Any

import orjson
import pytest

from pilotlight.dialects.anthropic import parse_count, parse_messages
from pilotlight.dialects.body.text_files import NO_PDF
from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.dialects.openai_responses import parse_response
from pilotlight.dialects.requests import ValidGeneration
from pilotlight.dialects.table import prompt_pieces
from pilotlight.dialects.workers_ai_api import parse_run
from pilotlight.wire.errors import ApiError, Dialect

PARSERS: dict[str, Any] = {
    "chat": parse_chat, "messages": parse_messages, "count": parse_count, "responses": parse_response, "run": parse_run,
}  # fmt: skip
DATA_AT = {
    "chat": "messages[0].content[1].file.file_data", "run": "messages[0].content[1].file.file_data",
    "messages": "messages[0].content[1].source.data", "count": "messages[0].content[1].source.data",
    "responses": "input[0].content[1].file_data",
}  # fmt: skip
PDF = b64encode(b"%PDF-1.7 ...").decode()
PICTURE = "data:image/png;base64,aaaa"


def base64_of(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def part_of(dialect: str, data: Any, name: Any = None, media_type: str = "text/plain") -> dict[str, Any]:
    """Return a part with a file, in the form of a dialect's clients."""
    if dialect in ("messages", "count"):
        source = {"type": "base64", "media_type": media_type, "data": data}
        return {"type": "document", "source": source, **({} if name is None else {"title": name})}
    url = f"data:{media_type};base64,{data}" if isinstance(data, str) else data
    fields = {"file_data": url, **({} if name is None else {"filename": name})}
    return {"type": "input_file", **fields} if dialect == "responses" else {"type": "file", "file": fields}


def body_of(dialect: str, *parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    text = "input_text" if dialect == "responses" else "text"
    messages = [{"role": role, "content": [{"type": text, "text": "Look:"}, *parts]}]
    return {"model": "m", "max_tokens": 5, "input" if dialect == "responses" else "messages": messages}


def parsed(dialect: str, *parts: dict[str, Any], strict: bool = False, role: str = "user") -> ValidGeneration:
    body = body_of(dialect, *parts, role=role)
    if dialect == "responses":
        del body["max_tokens"]
    model = {"model": "m"} if dialect == "run" else {}
    if dialect == "run":
        del body["model"]
    request: ValidGeneration = PARSERS[dialect](orjson.dumps(body), lambda name: name, **model, strict=strict)
    return request


def content_of(request: ValidGeneration) -> Any:
    return request.prompt.messages[0]["content"]


@pytest.mark.parametrize("dialect", PARSERS)
@pytest.mark.parametrize(
    ("name", "media_type", "text"),
    [
        ("notes.txt", "text/plain", "Grüße,\nAda"),
        (None, "application/json", '{"a": 1}'),
        ("a.ts", "video/mp2t", "let a = 1"),  # what browsers send for TypeScript
        ("a.csv", "application/vnd.ms-excel", "a;b"),
        ("a.svg", "image/svg+xml", "<svg/>"),
        ("a.bin", "application/octet-stream", ""),
        ("a.md", "text/markdown;charset=utf-8", "# a"),
    ],
)
def test_a_file_of_text_becomes_its_name_and_text(dialect: str, name: str | None, media_type: str, text: str) -> None:
    request = parsed(dialect, part_of(dialect, base64_of(text), name, media_type))
    assert content_of(request) == "\n".join(["Look:", *([name] if name else []), text])
    assert request.ignored == ()


def test_a_byte_order_mark_is_no_text() -> None:
    assert content_of(parsed("chat", part_of("chat", base64_of(b"\xef\xbb\xbfHi")))) == "Look:\nHi"


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_base64_without_a_data_url_is_read(dialect: str) -> None:
    part = part_of(dialect, "")
    part.get("file", part)["file_data"] = base64_of("Hi")
    assert content_of(parsed(dialect, part)) == "Look:\nHi"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_files_in_other_roles_messages_are_text_too(role: str) -> None:
    for dialect in ("chat", "responses"):
        request = parsed(dialect, part_of(dialect, base64_of("Hi"), "a.txt"), role=role)
        assert "a.txt\nHi" in content_of(request)


def test_a_file_beside_an_image_is_one_text() -> None:
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    content = content_of(parsed("chat", part_of("chat", base64_of("Hi"), "a.txt"), image))
    assert content == [{"type": "text", "text": "Look:"}, {"type": "text", "text": "a.txt\nHi"}, {"type": "image"}]


def test_a_tools_output_may_have_files() -> None:
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [part_of("responses", base64_of("Hi"), "a.txt")],
    }
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    request = parse_response(orjson.dumps({"model": "m", "input": [call, output]}), lambda name: name)
    assert request.prompt.messages[1]["content"] == "a.txt\nHi"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [part_of("messages", base64_of("Hi"), "a.txt")]}
    assert parsed("messages", result).prompt.messages[1]["content"] == "a.txt\nHi"


@pytest.mark.parametrize("dialect", PARSERS)
@pytest.mark.parametrize(
    ("data", "media_type", "sentence"),
    [
        ("aGk", "text/plain", "is no base64"),
        ("a b\n", "text/plain", "is no base64"),
        (base64_of(b"\x89PNG\r\n\x1a\n\x00\xff"), "image/png", "is no text in UTF-8 but image/png"),
        (base64_of(b"\xff\xfea\x00"), "text/plain", "is no text in UTF-8"),
        (base64_of("a\0b"), "text/plain", "is no text in UTF-8"),
        (None, "text/plain", "send the file itself, as base64"),
        (7, "text/plain", "send the file itself, as base64"),
    ],
)
def test_what_is_no_text_is_refused_with_the_fields_path(
    dialect: str, data: Any, media_type: str, sentence: str
) -> None:
    for strict in (False, True):
        with pytest.raises(ApiError) as refused:
            parsed(dialect, part_of(dialect, data, "a.txt", media_type), strict=strict)
        assert (refused.value.word, refused.value.param) == ("invalid_request", DATA_AT[dialect])
        assert refused.value.message.startswith(f"{DATA_AT[dialect]}: {sentence}")


@pytest.mark.parametrize(
    ("part", "word", "param"),
    [
        ({"type": "input_file", "file_id": "file_1"}, "unsupported_parameter", "file_id"),
        ({"type": "input_file", "file_url": "https://a.example/a.txt"}, "unsupported_parameter", "file_url"),
        ({"type": "input_file", "file_data": "data:text/plain,Hi"}, "invalid_request", "file_data"),
        ({"type": "input_file", "file_data": "aGk=", "filename": 7}, "invalid_request", "filename"),
    ],
)
def test_files_that_are_not_in_the_request_are_refused_by_name(part: dict[str, Any], word: str, param: str) -> None:
    wrapped = {"type": "file", "file": {name: value for name, value in part.items() if name != "type"}}
    for dialect, sent, at in (
        ("responses", part, "input[0].content[1]"),
        ("chat", wrapped, "messages[0].content[1].file"),
    ):
        with pytest.raises(ApiError) as refused:
            parsed(dialect, sent)
        assert (refused.value.word, refused.value.param) == (word, f"{at}.{param}")


@pytest.mark.parametrize("file", [None, 7, "a.txt", {}])
def test_a_file_part_without_a_file_is_refused_by_name(file: Any) -> None:
    with pytest.raises(ApiError) as refused:
        parsed("chat", {"type": "file", "file": file})
    assert refused.value.param == DATA_AT["chat"]


@pytest.mark.parametrize("dialect", PARSERS)
@pytest.mark.parametrize(("data", "media_type"), [(PDF, ""), (base64_of("no matter"), "application/pdf")])
def test_a_pdf_file_is_named_as_ignored(dialect: str, data: str, media_type: str) -> None:
    request = parsed(dialect, part_of(dialect, data, "plan", media_type))
    assert content_of(request) == f"Look:\nplan\n{NO_PDF}"
    assert request.ignored == (DATA_AT[dialect].replace("source.data", "source"),)


def test_strict_bodies_have_no_pdf_files() -> None:
    with pytest.raises(ApiError) as refused:
        parsed("chat", part_of("chat", PDF), strict=True)
    assert (refused.value.word, refused.value.param) == ("unsupported_parameter", DATA_AT["chat"])


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [("chat", Dialect.OPENAI), ("responses", Dialect.OPENAI_RESPONSES), ("messages", Dialect.ANTHROPIC)],
)
def test_a_router_sees_the_text_that_the_model_reads(dialect: str, kind: Dialect) -> None:
    def piece(data: str, name: str = "a.txt", media_type: str = "text/plain") -> bytes:
        ((found, _),) = prompt_pieces(kind, body_of(dialect, part_of(dialect, data, name, media_type)))
        return found

    assert b"It is green." in piece(base64_of("It is green."))
    assert piece(base64_of("a"), media_type="text/x-c") == piece(base64_of("a"))
    assert piece(base64_of("a")) != piece(base64_of("b")) != piece(base64_of("b"), "b.txt")
    assert len(piece(base64_of(b"%PDF-1.7" + b"a" * 9000))) < 200  # the model reads a sentence
    assert piece("a") != piece("b")  # no base64: a site refuses both
