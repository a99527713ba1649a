"""Heads that come again are the same object; what is kept of them is bounded."""

from wire.request_head import MAX_KEPT, MAX_KEPT_BYTES, KnownHeads

HEADERS = [(b"host", b"x"), (b"authorization", b"Bearer t")]


def test_a_head_that_comes_again_is_known_and_any_other_is_not() -> None:
    heads = KnownHeads()
    known = heads.head(b"POST", b"/v1/x?a=1", "1.1", list(HEADERS), 30)
    assert heads.head(b"POST", b"/v1/x?a=1", "1.1", list(HEADERS), 30) is known
    assert (known.scope["path"], known.scope["query_string"], known.keep_alive) == ("/v1/x", b"a=1", True)
    others = [
        heads.head(b"GET", b"/v1/x?a=1", "1.1", list(HEADERS), 30),
        heads.head(b"POST", b"/v1/x", "1.1", list(HEADERS), 30),
        heads.head(b"POST", b"/v1/x?a=1", "1.0", list(HEADERS), 30),
        heads.head(b"POST", b"/v1/x?a=1", "1.1", [(b"host", b"x"), (b"authorization", b"Bearer u")], 30),
    ]
    assert len({id(head) for head in (known, *others)}) == 5


def test_what_is_kept_is_bounded_in_number_and_size() -> None:
    heads = KnownHeads()
    for i in range(2 * MAX_KEPT):
        heads.head(b"GET", b"/%d" % i, "1.1", HEADERS, 30)
    assert len(heads) == MAX_KEPT
    long = [(b"x", b"y" * MAX_KEPT_BYTES)]
    assert heads.head(b"GET", b"/", "1.1", long, MAX_KEPT_BYTES) is not heads.head(
        b"GET", b"/", "1.1", long, MAX_KEPT_BYTES
    )
