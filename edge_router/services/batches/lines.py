"""Read and write the lines of OpenAI's batch files (https://platform.openai.com/docs/guides/batch)."""

from typing import Any, NamedTuple

import orjson

from pilotlight.dialects.body.exact_json import encoded, exact_loads
from pilotlight.wire.errors import ApiError, Dialect

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_REQUESTS = 50_000  # limit of one batch, as at OpenAI
MOST_FAULTS = 100  # errors reported for one file
OUT_OF_TIME = "the request was not answered within the batch's time"

Fields = dict[str, Any]


class AskedLine(NamedTuple):
    """One request of a batch."""

    name: str  # the client's name for it: `custom_id`, or `external_reference`
    model: str
    body: bytes


def read_lines(content: bytes, endpoint: str, most: int = MOST_REQUESTS) -> tuple[list[AskedLine], list[Fields]]:
    """Return a file's requests, and its errors in OpenAI's form; a file with errors is not processed."""
    lines: list[AskedLine] = []
    faults: list[Fields] = []
    names: set[str] = set()
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            line = _read_line(raw, endpoint)
            if line.name in names:
                raise ApiError("invalid_request", f"custom_id {line.name[:100]!r} is used twice", param="custom_id")
        except ApiError as error:
            faults.append({"code": error.word, "line": number, "message": error.message, "param": error.param})
            if len(faults) == MOST_FAULTS:
                break
            continue
        names.add(line.name)
        lines.append(line)
    if not faults and not 1 <= len(lines) <= most:
        sentence = f"a batch has 1 to {most} requests, and this file has {len(lines)}"
        faults.append({"code": "invalid_request", "line": None, "message": sentence, "param": None})
    return lines, faults


def _read_line(raw: bytes, endpoint: str) -> AskedLine:
    try:
        fields = exact_loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed_json", f"the line is not valid JSON: {error}") from None
    _check(isinstance(fields, dict), "a line must be an object", None)
    name, body = fields.get("custom_id"), fields.get("body")
    _check(
        isinstance(name, str) and 0 < len(name) <= 512, "custom_id must be a text of 1 to 512 characters", "custom_id"
    )
    _check(fields.get("method") == "POST", "method must be POST", "method")
    _check(fields.get("url") == endpoint, f"url must be the batch's endpoint, {endpoint}", "url")
    _check(isinstance(body, dict), "body must be an object", "body")
    model = body.get("model")
    _check(isinstance(model, str), "body.model must name a model", "body.model")
    _check(not body.get("stream"), "a batch is answered as a whole: leave stream out", "body.stream")
    return AskedLine(name, model, encoded(body))


def read_queued(fields: Fields, model: str) -> list[AskedLine]:
    """Return the requests of a Workers AI batch: `{"requests": [{..., "external_reference"?}]}`.
    Raises ApiError."""
    requests: Any = fields.get("requests")
    sentence = f"requests must be a list of 1 to {MOST_REQUESTS} objects"
    _check(isinstance(requests, list) and 1 <= len(requests) <= MOST_REQUESTS, sentence, "requests")
    lines = []
    for each in requests:
        _check(isinstance(each, dict), sentence, "requests")
        _check(not each.get("stream"), "a batch is answered as a whole: leave stream out", "stream")
        reference = each.pop("external_reference", None)
        _check(
            reference is None or isinstance(reference, str), "external_reference must be a text", "external_reference"
        )
        lines.append(AskedLine(reference or "", model, encoded(each)))
    return lines


def read_object(body: bytes) -> Fields:
    """Return a body's fields. Raises ApiError if it is not a JSON object."""
    try:
        fields = exact_loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed_json", f"the body is not valid JSON: {error}") from None
    _check(isinstance(fields, dict), "the body must be a JSON object", None)
    found: Fields = fields
    return found


def _check(is_good: bool, sentence: str, param: str | None) -> None:
    if not is_good:
        raise ApiError("invalid_request", sentence, param=param)


def written_line(request_id: str, name: str, status: int, answer: bytes) -> bytes:
    """Return a line of an output or error file.
    A status of 0 means that the batch's time ended before the request's turn."""
    told: Fields = {"id": request_id, "custom_id": name, "response": None, "error": None}
    if status:
        told["response"] = {"status_code": status, "request_id": request_id, "body": _json_or_text(answer)}
    else:
        told["error"] = {"code": "batch_expired", "message": OUT_OF_TIME}
    return orjson.dumps(told) + b"\n"


def queued_response(position: int, name: str, status: int, answer: bytes) -> Fields:
    """Return one response of a Workers AI batch."""
    fields = _json_or_text(answer) if status else ApiError("request_timeout", OUT_OF_TIME).body(Dialect.WORKERS_AI)
    success = status == 200 and isinstance(fields, dict)
    told: Fields = {"id": position, "success": success}
    if success:
        told["result"] = fields.get("result")
    else:
        told["errors"] = fields.get("errors") if isinstance(fields, dict) else [{"code": 5000, "message": str(fields)}]
    if name:
        told["external_reference"] = name
    return told


def _json_or_text(answer: bytes) -> Any:
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError:
        return answer.decode(errors="replace")
