"""The response cache: content, expiry, and size limit."""

import pytest

from pilotlight.functions.bindings.storage.response_cache import ResponseMemory, lifetime_s

NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z


@pytest.mark.parametrize(
    ("headers", "status", "expected"),
    [
        ({}, 200, 7200.0),
        ({}, 404, 180.0),
        ({}, 500, 0.0),
        ({"Cache-Control": "max-age=60"}, 500, 60.0),
        ({"cache-control": 'public, max-age=60, S-MaxAge="90"'}, 200, 90.0),
        ({"cache-control": "max-age=nonsense"}, 200, 0.0),
        ({"cache-control": "max-age=60, no-cache"}, 200, 0.0),
        ({"expires": "Fri, 15 Jan 2027 08:01:00 GMT"}, 200, 60.0),
        ({"expires": "Fri, 15 Jan 2027 07:59:00 GMT"}, 200, 0.0),
        ({"expires": "0"}, 200, 0.0),
        ({"cache-control": "max-age=5", "expires": "Fri, 15 Jan 2027 08:01:00 GMT"}, 200, 5.0),
        ({"set-cookie": "a=b", "cache-control": "max-age=60"}, 200, 0.0),
        ({"vary": "*"}, 200, 0.0),
        ({"vary": "accept"}, 200, 7200.0),
    ],
)
def test_the_headers_say_for_how_long(headers: dict[str, str], status: int, expected: float) -> None:
    assert lifetime_s(status, list(headers.items()), NOW_S) == expected


class Clock:
    now_s = NOW_S


def test_a_response_is_gone_when_its_time_is_over() -> None:
    clock = Clock()
    memory = ResponseMemory(now_s=lambda: clock.now_s)
    memory.put(("f", "", "u"), 200, [], b"x", 60.0)
    clock.now_s += 59.0
    assert memory.get(("f", "", "u")) is not None
    clock.now_s += 1.0
    assert memory.get(("f", "", "u")) is None
    assert not memory.delete(("f", "", "u"))


def test_beyond_its_size_the_longest_unused_is_forgotten() -> None:
    memory = ResponseMemory(max_bytes=10_000)
    for name in "abcd":
        memory.put(("f", "", name), 200, [("a", "b")], bytes(2000), 60.0)
    assert memory.get(("f", "", "b")) is not None, "b was used recently, so a and c are evicted"
    for name in "ef":
        memory.put(("f", "", name), 200, [], bytes(2000), 60.0)
    assert [name for name in "abcdef" if memory.get(("f", "", name)) is not None] == ["b", "e", "f"]
    memory.put(("f", "", "b"), 200, [], b"", 60.0)
    memory.put(("f", "", "long"), 200, [], bytes(20_000), 60.0)
    assert memory.get(("f", "", "long")) is None, "larger than the whole cache"
