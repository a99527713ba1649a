"""Prefer headers as RFC 7240 defines them, and malformed ones."""

import pytest

from pilotlight.edge_router.requests.preferences import preferences


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
