"""API keys: how headers are parsed, and what the accounts of keys may use."""

import hashlib
from datetime import UTC, datetime
from typing import Any

import pytest

from pilotlight.sites.accounts import AccountConfig, KeyConfig
from pilotlight.wire.credentials import (
    ANONYMOUS,
    Access,
    Account,
    Key,
    bearer_token,
    known_keys,
    owner_of,
    tenant_of,
    with_bearer,
)
from pilotlight.wire.errors import ApiError, Dialect


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
def test_anything_but_bearer_and_a_key_is_refused_by_name_where_a_key_is_required(other: str) -> None:
    with pytest.raises(ApiError, match="`Bearer KEY`") as refused:
        Access([], is_required=True).holder(other)
    assert refused.value.status(Dialect.OPENAI) == refused.value.status(Dialect.WORKERS_AI) == 401
    assert ("www-authenticate", "Bearer") in refused.value.headers()  # required by RFC 9110 section 11.6.1
    assert bearer_token(other) == ""
    assert Access([], is_required=False).holder(other) is None
    assert tenant_of(owner_of(other, ""), None) == ANONYMOUS


def known(name: str, *scopes: str, **more: Any) -> Key:
    return Key(name, hashlib.sha256(name.encode()).hexdigest(), frozenset(scopes or ("models",)), **more)


def test_a_key_is_known_by_its_digest_and_opens_what_its_scopes_say() -> None:
    access = Access([known("client"), known("operator", "admin"), known("watcher", "metrics")], is_required=True)
    assert access.holder("Bearer client") == access.key("bearer  client", "models")
    for unknown in (None, "Bearer nobody", f"Bearer {hashlib.sha256(b'client').hexdigest()}"):
        with pytest.raises(ApiError) as refused:
            access.holder(unknown)
        assert refused.value.word == "unauthorized"
    for name, scope in (("client", "admin"), ("client", "metrics"), ("client", "deploy"), ("watcher", "models")):
        with pytest.raises(ApiError, match=f"scope {scope}, and {name} has") as forbidden:
            access.key(f"Bearer {name}", scope)
        assert forbidden.value.word == "forbidden"
    for scope in ("admin", "models", "deploy", "metrics"):
        assert access.key("Bearer operator", scope).is_admin


def test_where_no_key_is_required_clients_need_none_and_operators_do() -> None:
    access = Access([known("client")], is_required=False)
    assert access.holder(None) is access.holder("Bearer other") is None
    assert access.holder("Bearer client") == known("client")
    with pytest.raises(ApiError):
        access.key(None, "admin")


def test_a_key_that_has_expired_or_was_revoked_is_refused_with_the_reason() -> None:
    now = 1_800_000_000.0
    keys = [known("old", expires_s=now), known("gone", is_revoked=True), known("fresh", expires_s=now + 1)]
    access = Access(keys, is_required=True, clock=lambda: now)
    assert access.holder("Bearer fresh") == keys[2]
    for name, why in (("old", "the key old expired at 2027-01-15 08:00:00Z"), ("gone", "the key gone was revoked")):
        with pytest.raises(ApiError, match=why) as refused:
            access.holder(f"Bearer {name}")
        assert refused.value.word == "unauthorized"
        assert access.find(name) is None


def test_a_rotated_key_is_known_until_its_grace_is_over_and_is_of_the_same_account() -> None:
    moment = datetime(2027, 1, 15, 8, tzinfo=UTC)
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("new", "old")}
    entry = KeyConfig(
        name="ci", account="acme", key_sha256=digests["new"], former_sha256=digests["old"], former_expires=moment
    )
    keys = known_keys([AccountConfig(name="acme", models=("llama-*",))], [entry])
    access = Access(keys, is_required=True, clock=lambda: moment.timestamp() - 1)
    new, old = access.key("Bearer new", "models"), access.key("Bearer old", "models")
    assert new.account == old.account == Account("acme", ("llama-*",))
    access = Access(keys, is_required=True, clock=moment.timestamp)
    assert access.holder("Bearer new") == new
    with pytest.raises(ApiError, match="expired"):
        access.holder("Bearer old")


def test_a_rotated_key_never_outlives_the_end_that_was_set_for_it() -> None:
    end, moment = datetime(2027, 1, 15, tzinfo=UTC), datetime(2027, 1, 14, tzinfo=UTC)
    for grace, former_end in ((end.replace(year=2028), end), (moment, moment)):
        entry = KeyConfig(name="ci", key_sha256="1" * 64, former_sha256="2" * 64, former_expires=grace, expires=end)
        new, former = known_keys([], [entry])
        assert (new.expires_s, former.expires_s) == (end.timestamp(), former_end.timestamp())


def test_an_account_uses_the_models_and_deploys_the_functions_that_its_patterns_name() -> None:
    account = Account("acme", ("llama-*", "ember"), ("acme-*",))
    for model in ("llama-8b", "ember"):
        account.check_model(model)
    for refused in ("embers", "qwen", "", None):
        with pytest.raises(ApiError, match=r"account acme, which may use llama-\*, ember") as error:
            account.check_model(refused)
        assert (error.value.word, error.value.param) == ("forbidden", "model")
    Account("free").check_model(None)
    account.check_function("acme-web")
    with pytest.raises(ApiError, match=r"acme may deploy acme-\*, and not 'web'"):
        account.check_function("web")


def test_an_account_is_one_tenant_by_whichever_key_and_no_keys_owner() -> None:
    assert tenant_of(owner_of("Bearer a", "acme"), None) == tenant_of(owner_of("Bearer b", "acme"), None)
    assert tenant_of(owner_of("Bearer acme", ""), None) != tenant_of(owner_of(None, "acme"), None)
    assert bearer_token(f"Bearer {owner_of(None, 'acme')}") == "", "the owner's name must not be usable as a key"


def test_no_key_and_account_are_another_key_and_account_put_together() -> None:
    pairs = [("a", "b"), ("a:b", ""), ("a", ""), ("", "a"), ("a:b", "c"), ("a", "b:c"), ("1:a", ""), ("", "1:a")]
    tenants = {tenant_of(owner_of(f"Bearer {key}" if key else None, ""), account) for key, account in pairs}
    assert len({tenant.salt for tenant in tenants}) == len({tenant.id for tenant in tenants}) == len(pairs)
    assert tenant_of(owner_of("bearer  a", ""), "b") == tenant_of(owner_of("Bearer a", ""), "b")


def test_a_key_in_anthropics_header_is_read_where_there_is_no_other() -> None:
    before, key, bearer = (b"a", b"b"), (b"x-api-key", b"k"), (b"authorization", b"Bearer other")
    assert with_bearer([before, key]) == [before, (b"authorization", b"Bearer k")]
    for headers in ([], [before], [key, bearer], [bearer, before]):
        assert with_bearer(headers) == headers


def test_what_is_read_again_takes_the_place_of_what_was_known() -> None:
    now = [100.0]
    access = Access([known("old")], is_required=False, clock=lambda: now[0])
    access.update_from(Access([known("new", expires_s=200.0), known("gone", is_revoked=True)], is_required=True))
    assert access.is_required
    assert [access.find(token) is not None for token in ("old", "new", "gone", "")] == [False, True, False, False]
    now[0] = 200.0
    assert access.find("new") is None
    with pytest.raises(ApiError, match="this needs a key"):
        access.holder("")
    for name in ("old", "new", "gone"):
        with pytest.raises(ApiError):
            access.holder(f"Bearer {name}")


def test_an_account_that_is_named_nowhere_may_use_everything_and_a_key_without_one_is_its_own() -> None:
    entries = [
        KeyConfig(name="ci", key_sha256="1" * 64, account="acme", scopes=("models", "deploy")),
        KeyConfig(name="alone", key_sha256="2" * 64, revoked=True),
    ]
    ci, alone = known_keys([AccountConfig(name="alone", models=("m",))], entries)
    assert (ci.account, ci.scopes, ci.expires_s, ci.is_revoked) == (Account("acme"), {"models", "deploy"}, None, False)
    assert (alone.account, alone.is_revoked, alone.sha256) == (Account("alone", ("m",)), True, "2" * 64)
    assert [ci.opens(scope) for scope in ("models", "deploy", "metrics", "admin")] == [True, True, False, False]


def test_an_account_id_of_a_path_is_another_tenant_with_the_same_owner() -> None:
    plain, named = tenant_of("key", None), tenant_of("key", "id")
    assert (plain.owner, named.owner) == (plain.id, plain.id)
    assert plain.id != named.id
    assert plain.salt != named.salt
    assert tenant_of("", None) is tenant_of("", "") is ANONYMOUS
    assert tenant_of("", "id").owner == "anonymous"


@pytest.mark.parametrize("header", [b"x-api-key", b"api-key"])
def test_a_key_may_come_in_a_header_of_its_own(header: bytes) -> None:
    assert with_bearer([(header, b"abc")]) == [(b"authorization", b"Bearer abc")]
    both = [(b"authorization", b"Bearer a"), (header, b"b")]
    assert with_bearer(both) == both
