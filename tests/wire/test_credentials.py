"""One key is one key, however a client spells the header around it."""

import pytest

from wire.credentials import bearer_token, bearer_token_or_none
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
