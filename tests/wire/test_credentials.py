"""One key is one key, however a client spells the header around it."""

import hashlib

import pytest

from wire.credentials import Access, Key, bearer_token, bearer_token_or_none
from wire.errors import ApiError, Dialect


@pytest.mark.parametrize(
    "spelled", ["Bearer key", "bearer key", "BEARER key", "bEaReR   key", "Bearer key  ", " \tBearer key"]
)
def test_all_spellings_of_a_header_name_one_key(spelled: str) -> None:
    assert bearer_token(spelled) == "key"


@pytest.mark.parametrize("missing", [None, "", "  "])
def test_a_request_without_credentials_has_no_key(missing: str | None) -> None:
    assert bearer_token(missing) == ""


@pytest.mark.parametrize(
    "other",
    ["key", "Bearer", "Bearer ", "Basic dXNlcjo=", "Bearer a b", "Bearer\tkey", "Bearer k\xe9y", "Bearer a,Bearer b c"],
)
def test_anything_but_bearer_and_a_key_is_refused_by_name(other: str) -> None:
    with pytest.raises(ApiError, match="`Bearer KEY`") as refused:
        bearer_token(other)
    assert refused.value.status(Dialect.OPENAI) == refused.value.status(Dialect.WORKERS_AI) == 401
    assert ("www-authenticate", "Bearer") in refused.value.headers()  # RFC 9110 section 11.6.1 demands one
    assert bearer_token_or_none(other) == ""


def test_a_key_is_known_by_its_digest_and_an_operators_by_its_mark() -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("client", "operator")}
    access = Access([Key(name, digest, name == "operator") for name, digest in digests.items()], is_required=True)
    access.check_client("Bearer client")
    access.check_admin("bearer  operator")
    for unknown in (None, "Bearer nobody", f"Bearer {digests['client']}"):
        with pytest.raises(ApiError) as refused:
            access.check_client(unknown)
        assert refused.value.word == "unauthorized"
    with pytest.raises(ApiError, match="admin key") as forbidden:
        access.check_admin("Bearer client")
    assert forbidden.value.word == "forbidden"


def test_where_no_key_is_required_clients_need_none_and_operators_do() -> None:
    access = Access([], is_required=False)
    access.check_client(None)
    with pytest.raises(ApiError):
        access.check_admin(None)
