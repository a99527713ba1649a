"""Lines of batches: messages of errors, their number, and the form of answers."""

import json
from typing import Any

import pytest

from pilotlight.edge_router.services.batches.lines import (
    MOST_FAULTS,
    MOST_REQUESTS,
    OUT_OF_TIME,
    AskedLine,
    queued_response,
    read_lines,
    read_object,
    read_queued,
)
from pilotlight.wire.errors import ApiError

CHAT = "/v1/chat/completions"


def line(**changes: Any) -> bytes:
    row = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "ember", "n": 1}, **changes}
    return json.dumps(row).encode()


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b"{", None, "not valid JSON"),
        (b"[]", None, "a line must be an object"),
        (line(custom_id=""), "custom_id", "1 to 512 characters"),
        (line(custom_id="x" * 513), "custom_id", "1 to 512 characters"),
        (line(custom_id=7), "custom_id", "1 to 512 characters"),
        (line(method="GET"), "method", "must be POST"),
        (line(url="/v1/embeddings"), "url", f"the batch's endpoint, {CHAT}"),
        (line(body="hello"), "body", "must be an object"),
        (line(body={}), "body.model", "must name a model"),
        (line(body={"model": "ember", "stream": True}), "body.stream", "leave stream out"),
    ],
)
def test_a_line_with_an_invalid_request_is_reported_with_its_number_and_field(
    raw: bytes, param: str, words: str
) -> None:
    asked, (fault,) = read_lines(b"\n".join((line(custom_id="b"), b"", raw, b"")), CHAT)
    assert [each.name for each in asked] == ["b"]
    assert (fault["line"], fault["param"], words in fault["message"]) == (3, param, True)
    assert fault["code"] == ("malformed_json" if raw == b"{" else "invalid_request")


def test_a_line_is_asked_as_it_stands() -> None:
    longest = "x" * 512
    assert read_lines(line(custom_id=longest, body={"model": "m", "n": 2, "stream": False}), CHAT) == (
        [AskedLine(longest, "m", b'{"model":"m","n":2,"stream":false}')],
        [],
    )


def test_faults_and_requests_of_one_file_are_reported_up_to_a_limit() -> None:
    faults = read_lines(b"{\n" * (MOST_FAULTS + 1), CHAT)[1]
    assert [fault["line"] for fault in faults] == [*range(1, MOST_FAULTS + 1)]
    rows = [line(custom_id=str(i)) for i in range(3)]
    assert read_lines(b"\n".join(rows[:2]), CHAT, most=2)[1] == []
    (fault,) = read_lines(b"\n".join(rows), CHAT, most=2)[1]
    assert (fault["line"], fault["message"]) == (None, "a batch has 1 to 2 requests, and this file has 3")
    with pytest.raises(ApiError, match=f"1 to {MOST_REQUESTS} objects"):
        read_queued({"requests": [{}] * (MOST_REQUESTS + 1)}, "m")


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (None, "a list of 1 to"),
        ([], "a list of 1 to"),
        (["a"], "a list of 1 to"),
        ([{"stream": True}], "leave stream out"),
        ([{"external_reference": 7}], "external_reference must be a text"),
    ],
)
def test_requests_of_workers_ai_that_cannot_be_asked_are_refused(requests: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        read_queued({"requests": requests}, "m")


def test_requests_of_workers_ai_are_asked_without_their_references() -> None:
    asked = read_queued({"requests": [{"prompt": "p", "external_reference": "r"}, {"prompt": "q"}]}, "m")
    assert asked == [AskedLine("r", "m", b'{"prompt":"p"}'), AskedLine("", "m", b'{"prompt":"q"}')]


@pytest.mark.parametrize(("body", "words"), [(b"{", "not valid JSON"), (b"[]", "must be a JSON object")])
def test_a_body_is_an_object(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        read_object(body)


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (200, b'{"result": {"response": "Hi"}}', {"success": True, "result": {"response": "Hi"}}),
        (400, b'{"errors": [{"code": 5004}]}', {"success": False, "errors": [{"code": 5004}]}),
        (502, b"<html>\xff", {"success": False, "errors": [{"code": 5000, "message": "<html>\ufffd"}]}),
        (200, b"text", {"success": False, "errors": [{"code": 5000, "message": "text"}]}),
        (0, b"", {"success": False, "errors": [{"code": 3007, "message": OUT_OF_TIME}]}),
    ],
)
def test_the_outcome_of_a_request_of_workers_ai_is_at_its_place(
    status: int, answer: bytes, told: dict[str, Any]
) -> None:
    assert queued_response(3, "", status, answer) == {"id": 3, **told}
    assert queued_response(3, "r", status, answer) == {"id": 3, "external_reference": "r", **told}
