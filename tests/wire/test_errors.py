"""Each code of the error table has a form in every dialect."""

import orjson
import pytest

from pilotlight.wire.errors import ERRORS, ApiError, Dialect, RateQuota, dialect_of
from pilotlight.wire.sse import parse_event


@pytest.mark.parametrize("word", ERRORS)
def test_every_word_has_an_error_status_in_both_dialects(word: str) -> None:
    error = ApiError(word, "Say what to change.")
    assert 400 <= error.status(Dialect.OPENAI) <= 599
    assert 400 <= error.status(Dialect.WORKERS_AI) <= 599


def test_an_openai_body_names_the_word_and_the_field() -> None:
    error = ApiError("invalid_request", "max_tokens must be positive.", param="max_tokens")
    assert error.body(Dialect.OPENAI) == {
        "error": {
            "message": "max_tokens must be positive.",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "invalid_request",
        }
    }


def test_a_workers_ai_body_is_the_documented_envelope() -> None:
    body = ApiError("model_not_found", "No such model.").body(Dialect.WORKERS_AI)
    assert body == {
        "result": None, "success": False, "errors": [{"code": 5007, "message": "No such model."}], "messages": []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "status", "kind"),
    [
        ("invalid_request", 400, "invalid_request_error"),
        ("unauthorized", 401, "authentication_error"),
        ("quota_exceeded", 429, "rate_limit_error"),
        ("overloaded", 529, "overloaded_error"),
        ("draining", 529, "overloaded_error"),
        ("upstream_timeout", 504, "timeout_error"),
        ("conflict", 409, "invalid_request_error"),  # from here on: codes that have no separate type at Anthropic
        ("headers_too_large", 431, "invalid_request_error"),
        ("not_implemented", 501, "api_error"),
        ("upstream_lost", 502, "api_error"),
    ],
)
def test_an_anthropic_body_has_the_type_nearest_to_its_status(word: str, status: int, kind: str) -> None:
    error = ApiError(word, "Say what to change.")
    assert error.status(Dialect.ANTHROPIC) == status
    assert error.body(Dialect.ANTHROPIC) == {
        "type": "error",
        "error": {"type": kind, "message": "Say what to change.", "code": word},
    }


def test_retry_after_is_at_least_one_second() -> None:
    assert ApiError("overloaded", "Full.", retry_after_s=0.2).headers() == [("retry-after", "1")]
    assert ApiError("overloaded", "Full.").headers() == []


def test_a_limit_per_minute_is_sent_in_openais_headers() -> None:
    error = ApiError("quota_exceeded", "Too many.", retry_after_s=7.4, rate_limit=RateQuota("tokens", 1000.0))
    assert error.headers()[1:] == [
        ("x-ratelimit-limit-tokens", "1000"),
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-ratelimit-reset-tokens", "7s"),
    ]


def test_the_path_decides_the_dialect() -> None:
    assert dialect_of("/client/v4/accounts/a/ai/run/m") is Dialect.WORKERS_AI
    assert dialect_of("/v1/models") is Dialect.OPENAI


@pytest.mark.parametrize("dialect", Dialect)
def test_the_event_that_ends_a_stream_has_a_name_where_its_dialect_wants_one(dialect: Dialect) -> None:
    error = ApiError("overloaded", "Full.", param="n")
    event = parse_event(error.event(dialect))
    is_named = dialect in (Dialect.ANTHROPIC, Dialect.OPENAI_RESPONSES)
    assert event.name == (b"error" if is_named else None)
    told = orjson.loads(event.data or b"")
    if dialect is Dialect.OPENAI_RESPONSES:
        assert told == {"type": "error", "code": "overloaded", "message": "Full.", "param": "n"}
    else:
        assert told == error.body(dialect)


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", Dialect.OPENAI),
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v1/messages/batches", Dialect.ANTHROPIC),
        ("/v1/responses", Dialect.OPENAI_RESPONSES),
        ("/client/v4/accounts/a/ai/run/m", Dialect.WORKERS_AI),
        ("/client/v4/accounts/a/ai/v1/chat/completions", Dialect.OPENAI),
        ("/fn/f", Dialect.OPENAI),
    ],
)
def test_every_path_has_a_dialect(path: str, dialect: Dialect) -> None:
    assert dialect_of(path) is dialect
    named = dialect_of(path, [(b"anthropic-version", b"2023-06-01")])
    assert named is dialect, "the path takes precedence over a header"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/files", "/v1/none", "/"])
def test_paths_of_several_dialects_are_anthropics_for_clients_that_name_its_version(path: str) -> None:
    assert dialect_of(path) is Dialect.OPENAI
    assert dialect_of(path, [(b"host", b"a"), (b"anthropic-version", b"2023-06-01")]) is Dialect.ANTHROPIC
