"""Responses that count as a site's failure, and the values that are read from them."""

from typing import cast

import orjson
import pytest

from pilotlight.edge_router.forwarding.site_failure import SiteFailed, raise_refusal
from pilotlight.wire.hop.headers import QUEUE, REFUSAL, REFUSALS
from pilotlight.wire.http.client import ResponseParser


class Response:
    def __init__(self, status: int, **headers: str) -> None:
        self.status = status
        self._headers = headers

    def header(self, name: str) -> str:
        return self._headers.get(name, "")


def failure(status: int, body: bytes = b"", *, is_for_function: bool = False, **headers: str) -> SiteFailed | None:
    try:
        raise_refusal(cast(ResponseParser, Response(status, **headers)), body, is_for_function=is_for_function)
    except SiteFailed as failed:
        return failed
    return None


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 501, 502, 503, 504, 505])
def test_a_status_alone_is_a_gateways_and_believed_where_no_function_answers(status: int) -> None:
    failed = failure(status)
    assert (failed is not None) == (status in (502, 503, 504))
    assert failed is None or (failed.kind, failed.detail) == ("full", f"it answered {status}")
    assert failure(status, is_for_function=True) is None


@pytest.mark.parametrize("is_for_function", [True, False])
def test_a_sites_own_word_is_believed_whatever_the_status(is_for_function: bool) -> None:
    kinds = {
        "draining": "draining", "overloaded": "full", "engine_error": "lost", "model_load_failed": "no_model",
        "misdirected_request": "no_model", "signature": "untrusted", "clock": "untrusted",
    }  # fmt: skip
    assert kinds.keys() == REFUSALS
    for word, kind in kinds.items():
        for status in (200, 403, 503):
            failed = failure(status, is_for_function=is_for_function, **{REFUSAL: word})
            assert failed is not None
            assert (failed.kind, failed.queued_tokens, failed.retry_after_s) == (kind, 0, None)


@pytest.mark.parametrize(
    ("queue", "tokens"), [("0", 0), ("7", 7), ("9" * 11, 10**11 - 1), ("9" * 12, None), ("-1", None), ("٣", None)]
)
def test_a_site_that_declines_says_how_long_its_queue_is(queue: str, tokens: int | None) -> None:
    failed = failure(503, **{REFUSAL: "overloaded", QUEUE: queue, "retry-after": "2"})
    assert failed is not None
    assert (failed.kind, failed.queued_tokens) == (("full", 0) if tokens is None else ("declined", tokens))
    unasked = failure(503, **{QUEUE: queue})
    assert unasked is not None
    assert unasked.kind == "full", "a gateway does not send a queue length"


@pytest.mark.parametrize(
    ("after", "seconds"), [("0", 0.0), ("99999", 99999.0), ("100000", None), ("soon", None), ("٣", None)]
)
def test_a_site_says_when_to_come_back_and_why(after: str, seconds: float | None) -> None:
    body = orjson.dumps({"error": {"message": "m" * 300}})
    failed = failure(503, body, **{"retry-after": after})
    assert failed is not None
    assert (failed.retry_after_s, failed.detail) == (seconds, f"it answered 503 ({'m' * 200})")
