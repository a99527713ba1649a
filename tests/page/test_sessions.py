"""Sessions of the page: permissions to view and to act, and their duration."""

import hashlib

import pytest
from starlette.requests import Request
from starlette.responses import Response

from pilotlight.page.sessions import COOKIE, LIFETIME_S, Sessions
from pilotlight.wire.credentials import Access, Key
from pilotlight.wire.errors import ApiError


def known(name: str, *, is_admin: bool = False) -> Key:
    scopes = frozenset({"admin"} if is_admin else {"models", "metrics"})
    return Key(name, hashlib.sha256(f"key-{name}".encode()).hexdigest(), scopes)


ACCESS = Access([known("viewer"), known("boss", is_admin=True)], is_required=True)


def request(**headers: str) -> Request:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request(
        {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": pairs, "scheme": "http"}
    )


def cookie_of(sessions: Sessions, name: str) -> str:
    response = Response()
    sessions.open(f"Bearer key-{name}", response, is_secure=False)
    return response.headers["set-cookie"]


def test_the_cookie_is_no_key_and_no_script_reads_it() -> None:
    cookie = cookie_of(Sessions(ACCESS, "secret"), "boss")
    assert "key-boss" not in cookie
    assert hashlib.sha256(b"key-boss").hexdigest() not in cookie
    assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}


def test_a_viewer_looks_and_an_operator_acts() -> None:
    sessions = Sessions(ACCESS, "secret")
    viewer = request(cookie=cookie_of(sessions, "viewer").partition(";")[0])
    assert sessions.visitor(viewer).name == "viewer"
    with pytest.raises(ApiError, match="scope admin"):
        sessions.actor(viewer)
    assert sessions.actor(request(cookie=cookie_of(sessions, "boss").partition(";")[0])).is_admin
    assert sessions.actor(request(authorization="Bearer key-boss")).is_admin


def test_another_pages_script_is_refused() -> None:
    sessions = Sessions(ACCESS, "secret")
    cookie = cookie_of(sessions, "boss").partition(";")[0]
    assert sessions.actor(request(cookie=cookie, host="net.example", origin="https://net.example"))
    with pytest.raises(ApiError, match="page of another origin"):
        sessions.actor(request(cookie=cookie, host="net.example", origin="https://evil.example"))
    with pytest.raises(ApiError, match="page of another origin"):
        sessions.actor(request(cookie=cookie, host="net.example", origin="null"))


def test_a_session_ends_with_its_time_with_its_key_and_with_a_changed_letter() -> None:
    now = 1000.0
    access = Access([known("boss", is_admin=True)], is_required=True)
    sessions = Sessions(access, "secret", lambda: now)
    cookie = cookie_of(sessions, "boss").partition(";")[0]
    assert sessions.visitor(request(cookie=cookie))
    for at in range(len(COOKIE) + 1, len(cookie)):
        changed = cookie[:at] + ("0" if cookie[at] != "0" else "1") + cookie[at + 1 :]
        with pytest.raises(ApiError):
            sessions.visitor(request(cookie=changed))
    now += LIFETIME_S + 1
    with pytest.raises(ApiError):
        sessions.visitor(request(cookie=cookie))
    now = 1000.0
    access.update_from(Access([known("other", is_admin=True)], is_required=True))
    with pytest.raises(ApiError):
        sessions.visitor(request(cookie=cookie))


@pytest.mark.parametrize("cookie", ["", "x", "1.2", "9" * 30 + ".a.boss", "٣.a.boss", "-1.a.boss"])
def test_what_is_no_cookie_of_ours_is_refused(cookie: str) -> None:
    with pytest.raises(ApiError):
        ACCESS.holder(None)
    with pytest.raises(ApiError):
        Sessions(ACCESS, "secret").visitor(
            Request({"type": "http", "headers": [(b"cookie", f"{COOKIE}={cookie}".encode())]})
        )


def test_routers_of_one_network_know_each_others_cookies_and_no_other_networks() -> None:
    cookie = cookie_of(Sessions(ACCESS, "secret"), "boss").partition(";")[0]
    assert Sessions(ACCESS, "secret").visitor(request(cookie=cookie)).is_admin
    for stranger in ("other", ""):
        with pytest.raises(ApiError):
            Sessions(ACCESS, stranger).visitor(request(cookie=cookie))


def test_without_required_keys_all_local_callers_operate() -> None:
    assert Sessions(Access([], is_required=False), "").actor(request()).is_admin


def test_a_session_survives_the_steps_of_a_rotation_that_know_its_secret() -> None:
    cookie = cookie_of(Sessions(ACCESS, "old"), "boss").partition(";")[0]
    for secret in ("old,new", "new,old"):
        assert Sessions(ACCESS, secret).visitor(request(cookie=cookie)).is_admin
    with pytest.raises(ApiError):
        Sessions(ACCESS, "new").visitor(request(cookie=cookie))
    cookie = cookie_of(Sessions(ACCESS, "new,old"), "boss").partition(";")[0]
    assert Sessions(ACCESS, "new").visitor(request(cookie=cookie)).is_admin
