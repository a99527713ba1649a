"""Headers between router and site: which are forwarded, and which signatures are trusted."""

import hashlib
import hmac

from msgspec.structs import replace

from pilotlight.wire.hop.headers import (
    Hop,
    age_of_hop,
    forwardable,
    hop_is_genuine,
    lasting,
    sign_hop,
    signed_body,
    signing,
    site_of_hop,
    tell_clock,
    told_clock,
)


def test_hop_by_hop_headers_and_those_named_by_connection_stay_behind() -> None:
    sent = [
        ("Connection", "close, X-Private"), ("X-Private", "1"), ("Transfer-Encoding", "chunked"), ("TE", "trailers"),
        ("Host", "h"), ("Content-Length", "3"), ("Authorization", "Bearer k"), ("traceparent", "00-1-2-01"),
    ]  # fmt: skip
    assert forwardable(sent) == [("authorization", "Bearer k"), ("traceparent", "00-1-2-01")]


def test_every_connection_header_is_heeded() -> None:
    sent = [
        ("connection", "x-one"),
        ("x-one", "1"),
        ("x-two", "2"),
        ("Connection", "X-Two, keep-alive"),
        ("x-three", "3"),
    ]
    assert forwardable(sent) == [("x-three", "3")]


def test_a_client_cannot_forge_our_own_headers() -> None:
    assert forwardable([("X-Pilotlight-Hop", "x"), ("x-pilotlight-route", "y"), ("x-session-affinity", "s")]) == [
        ("x-session-affinity", "s")
    ]


ASKED = Hop("POST", "/v1/chat/completions", "r1", "ams1", "a=b")


def test_a_hop_is_believed_for_a_minute_and_for_its_own_request_only() -> None:
    signature = sign_hop("secret", 1000.4, ASKED, b"body")
    assert hop_is_genuine(signature, "secret", 1059.0, ASKED)
    assert signed_body(signature, "secret", 1059.0, ASKED) == hashlib.sha256(b"body").hexdigest()
    assert not hop_is_genuine(signature, "secret", 1061.0, ASKED)
    assert not hop_is_genuine(signature, "other", 1000.0, ASKED)
    for field, value in (
        ("method", "GET"),
        ("path", "/v1/models"),
        ("request_id", "r2"),
        ("site", "iad1"),
        ("query", ""),
    ):
        assert not hop_is_genuine(signature, "secret", 1000.0, replace(ASKED, **{field: value})), field


def test_a_hop_from_the_future_is_refused_as_one_from_the_past_is() -> None:
    signature = sign_hop("secret", 1000.0, ASKED)
    assert hop_is_genuine(signature, "secret", 940.0, ASKED)
    assert not hop_is_genuine(signature, "secret", 939.0, ASKED)


def test_no_part_of_a_signature_can_be_exchanged() -> None:
    stamp, digest, mac, site = sign_hop("secret", 1000.0, ASKED, b"body").split(".", 3)
    _, other_digest, other_mac, _ = sign_hop("secret", 1001.0, ASKED, b"another").split(".", 3)
    for parts in (
        ("1001", digest, mac, site),
        (stamp, other_digest, mac, site),
        (stamp, digest, other_mac, site),
        (stamp, digest, mac, "iad1"),
    ):
        assert not hop_is_genuine(".".join(parts), "secret", 1000.0, ASKED)
    moved = replace(ASKED, query="", path="/v1/chat/completions\na=b"), replace(ASKED, request_id="r1\na=b", query="")
    assert not any(hop_is_genuine(f"{stamp}.{digest}.{mac}.{site}", "secret", 1000.0, hop) for hop in moved)


def test_a_site_whose_name_has_points_is_named_whole() -> None:
    hop = replace(ASKED, site="ams1.example.com")
    signature = sign_hop("secret", 1000.0, hop)
    assert site_of_hop(signature) == "ams1.example.com"
    assert hop_is_genuine(signature, "secret", 1000.0, hop)
    assert site_of_hop("1.2") == ""


def test_garbage_signatures_are_false_not_errors() -> None:
    garbage = (
        "", ".", "x.y", "1000", "1000.", "١٠٠٠.ab", "9" * 50 + ".ab", "1000.é", "1000.a.b.ams1",
        "1000.a.é.ams1", "...ams1",
    )  # fmt: skip
    for each in garbage:
        assert not hop_is_genuine(each, "secret", 1000.0, ASKED)


def test_a_signature_is_hmac_sha256_for_keys_of_any_length() -> None:
    digest = hashlib.sha256(b"body").hexdigest()
    message = f"1000\n{digest}\nams1\nPOST\nr1\na=b\n/v1/chat/completions".encode()
    for secret in ("", "s", "k" * 64, "k" * 65, "\u00e9" * 200):
        mac = hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()
        assert sign_hop(secret, 1000.4, ASKED, b"body") == f"1000.{digest}.{mac}.ams1"


def test_a_clock_is_trusted_for_its_site_for_one_answer_and_only_with_the_secret() -> None:
    value = tell_clock("secret", 1234.9, "ams1", "r1")
    assert told_clock(value, "secret", "ams1", "r1") == 1234.0
    stamp, _, mac = value.partition(".")
    for other, secret, site, request_id in (
        (value, "other", "ams1", "r1"),
        (value, "secret", "iad1", "r1"),
        (value, "secret", "ams1", "r2"),
        (f"1235.{mac}", "secret", "ams1", "r1"),
        (f"{stamp}.{mac}é", "secret", "ams1", "r1"),
        (f"{stamp}.", "secret", "ams1", "r1"),
        (stamp, "secret", "ams1", "r1"),
        (f"-{value}", "secret", "ams1", "r1"),
        ("", "secret", "ams1", "r1"),
    ):
        assert told_clock(other, secret, site, request_id) is None, other
    assert told_clock(sign_hop("secret", 1234.0, ASKED), "secret", "ams1", "r1") is None, (
        "the signature of a hop must not pass as a clock"
    )


def test_a_signatures_age_is_what_its_stamp_says_and_what_has_none_is_no_signature() -> None:
    ages = [age_of_hop(text, 1000.0) for text in ("990.a.b.c", "1010", "", ".a", "-5.a", "1" * 20, "1" * 19, "١٠")]
    assert ages[:6] == [10.0, -10.0, None, None, None, None]
    assert ages[6] is not None
    assert ages[7] is None


def test_while_one_secret_replaces_another_either_is_believed_and_the_first_signs() -> None:
    """The processes get the new secrets one after another, and all trust each other at every moment."""
    hop, old, new = Hop("GET", "/status", "r1", "ams1"), "o" * 16, "n" * 16
    both, back = f"{new},{old}", f"{old},{new}"
    for signer, believer in (
        (old, both),
        (both, back),
        (both, both),
        (new, both),
        (both, new),
        (back, both),
        (back, old),
    ):
        assert hop_is_genuine(sign_hop(signer, 0.0, hop), believer, 0.0, hop)
        assert told_clock(tell_clock(signer, 7.0, "ams1", "r1"), believer, "ams1", "r1") == 7.0
    for signer, believer in ((both, old), (old, new), (new, old)):
        assert not hop_is_genuine(sign_hop(signer, 0.0, hop), believer, 0.0, hop)
        assert told_clock(tell_clock(signer, 7.0, "ams1", "r1"), believer, "ams1", "r1") is None
    assert (signing(both), lasting(both), lasting(new)) == (new, old, new)
