"""Host patterns: their syntax, the hosts that they match, and which of two is more specific."""

import pytest

from pilotlight.wire.host_patterns import HostPattern, covers, parse_pattern


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("shop.example/*", HostPattern("shop.example", False, True, "/", True)),
        ("Shop.Example/a/b", HostPattern("shop.example", False, True, "/a/b", False)),
        ("*.shop.example/api*", HostPattern("shop.example", True, False, "/api", True)),
        ("*shop.example/", HostPattern("shop.example", True, True, "/", False)),
        ("https://shop.example/*", HostPattern("shop.example", False, True, "/", True)),
        ("localhost/*", HostPattern("localhost", False, True, "/", True)),
    ],
)
def test_a_pattern_is_a_host_and_a_path(text: str, pattern: HostPattern) -> None:
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/x",
        "a b/*",
        "shop.example:8080/*",
        "shop.*.example/*",
        "shop.example/*/x",
        "shop.example/?a=1",
        "-a.example/*",
    ],
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_pattern(text)


@pytest.mark.parametrize("text", ["shop.example/*", "*.shop.example"])
def test_a_custom_domain_is_a_host_alone(text: str) -> None:
    assert parse_pattern("shop.example", is_custom_domain=True) == parse_pattern("shop.example/*")
    with pytest.raises(ValueError, match="a host name alone"):
        parse_pattern(text, is_custom_domain=True)


def test_the_more_specific_comes_first() -> None:
    texts = ["a.example/x", "a.example/x*", "a.example/*", "*.b.a.example/x*", "*.a.example/*"]
    assert sorted(map(parse_pattern, reversed(texts)), key=lambda pattern: pattern.rank) == sorted(
        map(parse_pattern, texts), key=lambda pattern: pattern.rank
    )
    assert [pattern.path for pattern in sorted(map(parse_pattern, texts[2::-1]), key=lambda pattern: pattern.rank)] == [
        "/x",
        "/x",
        "/",
    ]


@pytest.mark.parametrize(
    ("allowed", "wanted", "is_covered"),
    [
        ("a.example/*", "a.example/x", True),
        ("a.example/*", "*.a.example/*", False),
        ("*.a.example/*", "b.a.example/*", True),
        ("*.a.example/*", "*.b.a.example/*", True),
        ("*.a.example/*", "*.a.example/*", True),
        ("*.a.example/*", "a.example/*", False),
        ("*.a.example/*", "*a.example/*", False),
        ("*a.example/*", "a.example/*", True),
        ("*a.example/*", "nota.example/*", False),
        ("*.a.example/*", "example/*", False),
    ],
)
def test_an_account_may_take_what_its_hosts_cover(allowed: str, wanted: str, is_covered: bool) -> None:
    assert covers(parse_pattern(allowed), parse_pattern(wanted)) is is_covered
