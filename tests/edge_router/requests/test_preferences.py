"""Prefer headers as RFC 7240 defines them, and malformed ones."""

import orjson
import pytest

from pilotlight.edge_router.requests.preferences import preferences
from pilotlight.edge_router.requests.request import Head, parse_durable

STREAM = orjson.dumps({"stream": True})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["respond-async, wait=100"], {"respond-async": "", "wait": "100"}),
        (["handling=lenient; foo"], {"handling": "lenient"}),
        (["handling=lenient; foo, respond-async"], {"handling": "lenient", "respond-async": ""}),
        (["respond-async; foo=bar;  baz", "Wait = 10 "], {"respond-async": "", "wait": "10"}),
        (['Lenient, foo="a, respond-async; b"'], {"lenient": "", "foo": "a, respond-async; b"}),
        ([r'foo="a\"b, c"; x="y, z", d'], {"foo": 'a"b, c', "d": ""}),
        (["foo=1, FOO=2", "foo=3"], {"foo": "1"}),
        (['foo="", bar='], {"foo": "", "bar": ""}),
        (["", " ", ", ,a,, b"], {"a": "", "b": ""}),
        (["a b, c", "?, d"], {"c": "", "d": ""}),
        (['a, foo="never closed, bar', "baz"], {"a": "", "baz": ""}),
        ([r'a="\\"b, c', r'd="\"e, f'], {"c": ""}),
    ],
)
def test_preferences_are_read_as_the_rfc_writes_them(values: list[str], expected: dict[str, str]) -> None:
    assert preferences(values) == expected


@pytest.mark.parametrize(
    ("values", "is_async"),
    [
        (["respond-async"], True),
        (["handling=lenient; foo", "Respond-Async; x=y, wait=5"], True),
        (["wait=5", "respond-async"], True),
        (["handling=strict; respond-async"], False),
        (['foo="a, respond-async"'], False),
        (["respond-async=no"], False),
    ],
)
def test_a_client_need_not_wait_where_it_says_so_in_any_of_its_headers(values: list[str], is_async: bool) -> None:
    head = Head("POST", "/v1/chat/completions", "/v1/chat/completions", [("prefer", value) for value in values])
    assert parse_durable(head, STREAM) == (is_async, is_async, STREAM)
