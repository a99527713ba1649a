"""The data that a router adds to its client's request: a site uses it on a genuine hop, and ignores it from other senders."""

import json
from typing import Any

import pytest

from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.runtime.api.middleware import ACCOUNT, GENUINE_HOP, HOLDER
from pilotlight.runtime.api.router_context import (
    Declined,
    RouterContext,
    body_limit,
    check_model,
    router_context,
    tenant_in,
)
from pilotlight.wire.credentials import Account, Key, owner_of, tenant_of
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import (
    ANSWER,
    MAX_DELIVERED_BYTES,
    NOTHING_DELIVERED,
    AnswerName,
    Delivered,
    Delivery,
    encode_answer,
    encode_delivery,
)
from pilotlight.wire.hop.headers import MAX_QUEUE_WAIT, PREFIXES, QUEUE, WAITED
from pilotlight.wire.hop.prefixes import encode_prompt_prefixes

NAME = AnswerName(5, 6, "0" * 24)
DELIVERY = Delivery((Delivered((1, 2)),), 3, 4)
DELIVERED = encode_delivery(DELIVERY)


def scope(*, genuine: bool = True, **headers: str) -> dict[str, Any]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"headers": raw, GENUINE_HOP: genuine, "path_params": {}}


def test_a_routers_words_are_heard_on_a_genuine_hop_alone() -> None:
    prefixes = ((2**31, 64), (7, 16))
    said = {
        MAX_QUEUE_WAIT: "250", PREFIXES: encode_prompt_prefixes(prefixes),
        ANSWER: encode_answer(NAME, DELIVERED), WAITED: "25250",
    }  # fmt: skip
    context, body = router_context(scope(**said), DELIVERED + b"{}")
    assert context == RouterContext(NAME, DELIVERY, prefixes, 250, 25_250)
    assert body == b"{}"
    assert router_context(scope(genuine=False, **said), DELIVERED + b"{}") == (RouterContext(), DELIVERED + b"{}")
    missing = {"headers": scope(**said)["headers"]}
    assert router_context(missing, b"{}") == (RouterContext(), b"{}"), "nobody has judged it"


def test_a_router_need_not_say_anything_and_what_of_it_is_no_sense_is_no_harm() -> None:
    assert router_context(scope(), b"{}") == (RouterContext(), b"{}")
    assert router_context(scope(**{PREFIXES: "nonsense"}), b"{}")[0] == RouterContext()
    assert router_context(scope(**{WAITED: "-1"}), b"{}")[0] == RouterContext()
    assert router_context(scope(**{ANSWER: encode_answer(NAME)}), b"{}") == (RouterContext(NAME), b"{}")
    for value, body in (
        ("nonsense", b"{}"),
        (encode_answer(NAME, DELIVERED), DELIVERED[:-1]),
        (encode_answer(NAME, b"x" * 3), b"[[]{}"),
    ):
        with pytest.raises(ApiError) as refused:
            router_context(scope(**{ANSWER: value}), body)
        assert refused.value.word == "invalid_request"
    whole, rest = router_context(scope(**{ANSWER: encode_answer(NAME, DELIVERED)}), DELIVERED)
    assert (whole.delivery, rest) == (DELIVERY, b"")


def asked(n: int = 1, *, stream: bool = True) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": n, "stream": stream}
    return parse_chat(json.dumps(body).encode(), lambda name: name)


OPEN, ENDED = Delivered((1,)), Delivered((1,), "stop")


@pytest.mark.parametrize(
    ("choices", "n", "stream", "says"),
    [
        ((), 1, False, ""),
        ((OPEN,), 1, True, ""),
        ((OPEN, ENDED), 2, True, ""),
        ((ENDED,), 2, True, ""),  # nothing of the second choice has arrived
        ((OPEN, OPEN), 1, True, "2 choices were delivered of 1"),
        ((OPEN,), 1, False, "only a stream can be continued"),
        ((ENDED,), 1, True, "all of this answer was delivered"),
        ((ENDED, ENDED), 2, True, "all of this answer was delivered"),
    ],
)
def test_an_answer_is_continued_where_something_is_left_of_it(
    choices: tuple[Delivered, ...], n: int, stream: bool, says: str
) -> None:
    context = RouterContext(NAME, Delivery(choices), ((1, 2),))
    if says:
        with pytest.raises(ApiError, match=says) as refused:
            context.applied_to(asked(n, stream=stream), 9)
        assert refused.value.word == "invalid_request"
        return
    request = context.applied_to(asked(n, stream=stream), 9)
    assert (request.num_bytes, request.answer_name, request.delivery) == (9, NAME, Delivery(choices))
    assert request.prefixes == ((1, 2),)


def test_an_answer_that_no_router_has_named_keeps_the_name_that_it_has() -> None:
    plain = asked()
    told = RouterContext().applied_to(plain, 3)
    assert (told.answer_name, told.delivery) == (plain.answer_name, NOTHING_DELIVERED)


def test_a_body_may_be_longer_by_what_a_router_puts_before_it() -> None:
    named, continued = encode_answer(NAME), encode_answer(NAME, b"x")
    assert body_limit(scope(), 7) == body_limit(scope(genuine=False), 7) == 7
    assert body_limit(scope(**{ANSWER: named}), 7) == 7 + MAX_DELIVERED_BYTES
    assert body_limit(scope(genuine=False, **{ANSWER: named}), 7) == 7
    with pytest.raises(ApiError, match="only the network's routers") as refused:
        body_limit(scope(genuine=False, **{ANSWER: continued}), 7)
    assert refused.value.word == "forbidden"


def test_a_request_belongs_to_the_routers_account_or_else_to_its_keys() -> None:
    key = {"authorization": "Bearer k"}
    assert tenant_in(scope(**key)) == tenant_of("k", None)
    assert tenant_in({**scope(**key), ACCOUNT: "acme"}) == tenant_of(owner_of(None, "acme"), None)
    assert tenant_in({**scope(**key), "path_params": {"account_id": "id"}}) == tenant_of("k", "id")
    check_model(scope(), "m")
    holder = Key("k", "", account=Account("acme", models=("n",)))
    check_model({**scope(), HOLDER: holder}, "n")
    with pytest.raises(ApiError, match="not available to the account acme"):
        check_model({**scope(), HOLDER: holder}, "m")


def test_a_site_that_declines_says_so_as_one_that_is_full_and_how_long_its_queue_is() -> None:
    declined = Declined(7, 12.4, 5)
    full = ApiError("overloaded", "full", retry_after_s=1.0)
    assert declined.headers() == [*full.headers(), (QUEUE, "7")]
    assert (declined.word, declined.queued_tokens) == ("overloaded", 7)
    assert "the queue is 12 ms long, longer than the 5 ms" in declined.message
