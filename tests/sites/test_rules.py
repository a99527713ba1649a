"""Rules for single values: the values that they accept, and the errors for others."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET

from pilotlight.sites import rules

PASS: list[tuple[Callable[[Any], None], tuple[Any, ...], tuple[Any, ...]]] = [
    (rules.is_a_device, (UNSET, "auto", "cpu", "cuda", "cuda:0", "cuda:12"), ("", "cuda:", "cuda:x", "gpu", "cpu:0", "auto ")),
    (
        rules.can_stand_together,
        (None, (), ("cpu", "cpu"), ("cuda:0", "cuda:1"), (("cuda:0", "ray:cuda", "ray:cuda"),), (("cpu", "ray:cpu"), "cpu")),
        (
            ("auto",), ("cuda",), ("cuda:0", ("cuda:1", "cuda:0")), (("ray:cpu", "cpu"),), ("ray:cpu",), ("cpu", "cuda:0"),
            (("cpu", "ray:cuda"),), ("ray:cuda:0",),
        ),
    ),
    (
        rules.is_a_speculation,
        ("auto", "off", "suffix", "grammar,suffix", "mtp", "suffix,draft:/d", "eagle3:/e,grammar"),
        ("", "auto,suffix", "draft:", "suffix,suffix", "mtp,draft:/d", "off,off", "suffix,", "eagle:/e"),
    ),
    (
        rules.is_http,
        ("http://h", "https://h:1", "http://h/", "http://[::1]:8"),
        ("h", "ftp://h", "http://", "http://h/x", "//h", "http:///", "http://h:70000", "http://h:x", "http://h:0", "http://h?a=1", "http://h#a",
         "http://user:key@h", "http://a b", "http://h\n", "http://[::1"),
    ),
    (
        rules.are_host_names,
        ((), ("app.example.com", "a_b-1", "2001:db8::1")),
        (("https://a",), ("app:1",), ("127.0.0.1:1",), ("a:1",), ("a/b",), ("",), ("a", "b c"), ("a\n",)),
    ),
    (
        rules.are_origins,
        ((), ("*",), ("https://app.example.com", "http://h:8080", "app+x.y-z://h")),
        (("https://h/",), ("h",), ("https://",), ("https://a,https://b",), ("HTTPS://h",), ("https://*",), ("https://a b",)),
    ),
    (rules.are_networks, ((), ("10.1.0.0/16", "::1/128", "192.0.2.1")), (("10.1.0.1/16",), ("x",), ("10.0.0.0/8", "1"))),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "taken", "refused"), PASS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_takes_what_makes_sense_and_names_what_does_not(
    rule: Callable[[Any], None], taken: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in taken:
        rule(value)
    for value in refused:
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            rule(value)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True), ("127.255.255.254", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
        ("128.0.0.1", False), ("10.0.0.1", False), ("localhost.example.com", False), ("", False), ("Localhost", False),
    ],
)  # fmt: skip
def test_only_addresses_that_no_other_machine_reaches_are_local(host: str, is_local: bool) -> None:
    assert rules.is_loopback(host) == is_local


def test_a_name_that_is_there_twice_is_named() -> None:
    rules.refuse_twice([], "site")
    rules.refuse_twice(["a", "b"], "site")
    with pytest.raises(ValueError, match="the site 'b' is used twice"):
        rules.refuse_twice(["a", "b", "c", "b"], "site")
