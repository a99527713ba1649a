"""Which headers go on, and which hops are believed."""

import hashlib
import hmac

from wire.headers import forwardable, hop_is_genuine, sign_hop


def test_hop_by_hop_headers_and_those_named_by_connection_stay_behind() -> None:
    sent = [
        ("Connection", "close, X-Private"), ("X-Private", "1"), ("Transfer-Encoding", "chunked"), ("TE", "trailers"),
        ("Host", "h"), ("Content-Length", "3"), ("Authorization", "Bearer k"), ("traceparent", "00-1-2-01"),
    ]  # fmt: skip
    assert forwardable(sent) == [("authorization", "Bearer k"), ("traceparent", "00-1-2-01")]


def test_a_client_cannot_forge_our_own_headers() -> None:
    assert forwardable([("X-Pilotlight-Hop", "x"), ("x-pilotlight-route", "y"), ("x-session-affinity", "s")]) == [
        ("x-session-affinity", "s")
    ]


def test_a_hop_is_believed_for_a_minute_and_for_its_own_request_only() -> None:
    signature = sign_hop("secret", 1000.4, "POST", "/v1/chat/completions", "r1")
    assert hop_is_genuine(signature, "secret", 1059.0, "POST", "/v1/chat/completions", "r1")
    assert not hop_is_genuine(signature, "secret", 1061.0, "POST", "/v1/chat/completions", "r1")
    assert not hop_is_genuine(signature, "other", 1000.0, "POST", "/v1/chat/completions", "r1")
    assert not hop_is_genuine(signature, "secret", 1000.0, "GET", "/v1/chat/completions", "r1")
    assert not hop_is_genuine(signature, "secret", 1000.0, "POST", "/v1/chat/completions", "r2")


def test_garbage_signatures_are_false_not_errors() -> None:
    for garbage in ("", ".", "x.y", "1000", "1000.", "١٠٠٠.ab", "9" * 50 + ".ab", "1000.é"):
        assert not hop_is_genuine(garbage, "secret", 1000.0, "GET", "/", "r")


def test_a_signature_is_hmac_sha256_for_keys_of_any_length() -> None:
    for secret in ("", "s", "k" * 64, "k" * 65, "\u00e9" * 200):
        stamp, _, mac = sign_hop(secret, 1000.4, "POST", "/v1/x", "r1").partition(".")
        assert stamp == "1000"
        assert mac == hmac.new(secret.encode(), b"1000\nPOST\n/v1/x\nr1", hashlib.sha256).hexdigest()
