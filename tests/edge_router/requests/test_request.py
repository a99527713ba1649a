"""Parsing of requests at the router: fields that it reads, requests that it refuses, and headers that it adds."""

import hashlib
import time

import orjson
import pytest
from msgspec.structs import replace

from pilotlight.edge_router.requests.client_places import ClientPlaces
from pilotlight.edge_router.requests.request import (
    AT_ONCE_BYTES,
    Head,
    RequestParser,
    ValidRequest,
    request_id_of,
)
from pilotlight.edge_router.requests.session import FIRST_PREFIXES, LAST_PREFIXES
from pilotlight.wire.chat import MAX_MESSAGES
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.headers import HOP, HOPS, Hop, sign_hop, signed_body
from pilotlight.wire.hop.status import Place

CHAT = "/ai/v1/chat/completions"


def head(path: str = CHAT, method: str = "POST", **headers: str) -> Head:
    return Head(method, path, path, [(name.replace("_", "-"), value) for name, value in headers.items()])


FRONT_END = "10.1.2.3"
PLACES = ClientPlaces(("10.0.0.0/8",))


def look(
    body: bytes, at: Head | None = None, secret: str = "", max_hops: int = 4, address: str = FRONT_END
) -> ValidRequest:
    return RequestParser(secret, max_hops, PLACES.place).parse(at or head(), body, "id-1", address)


def sent(request: ValidRequest, secret: str = "") -> dict[str, str]:
    lines = request.head_lines(secret, time.time(), "ams1", request.body).decode("latin-1").split("\r\n")
    assert lines.pop() == ""
    return dict(line.split(": ", 1) for line in lines)


def test_a_site_learns_how_long_a_request_has_waited_elsewhere() -> None:
    request = look(b'{"model": "ember", "messages": []}', secret="s")
    assert "x-pilotlight-waited" not in sent(request, "s")
    assert sent(replace(request, waited_ms=25_250), "s")["x-pilotlight-waited"] == "25250"


def test_a_request_of_another_router_is_as_old_as_that_one_says() -> None:
    signature = sign_hop("s", time.time(), Hop("POST", CHAT, "id-1", "ams1"), b"{}")
    signed = head(x_pilotlight_waited="1500", x_pilotlight_hop=signature, x_request_id="id-1")
    assert look(b"{}", signed, secret="s").waited_ms == 1500
    assert look(b"{}", head(x_pilotlight_waited="1500"), secret="s").waited_ms == 0, (
        "a client's own word is not believed"
    )


def test_model_and_stream_flag_are_read_and_the_body_stays_as_it_came() -> None:
    body = b'{ "stream": true, "model":"ember", "messages": [] }'
    request = look(body)
    assert (request.model, request.wants_stream, request.body) == ("ember", True, body)


def test_the_model_of_a_run_path_comes_from_the_path() -> None:
    request = look(b'{"prompt": "hi"}', head("/client/v4/accounts/abc/ai/run/@pilotlight/ember"))
    assert request.model == "@pilotlight/ember"
    assert request.head.dialect is Dialect.WORKERS_AI


@pytest.mark.parametrize(
    ("body", "word"),
    [(b'{"model": "ember"', "malformed_json"), (b"model=ember", "malformed_json"), (b"\xff\xfe", "malformed_json"),
     (b"[" * 3000, "malformed_json"), (b"[1, 2]", "invalid_request"), (b'"hello"', "invalid_request"),
     (b'{"messages":[1]}', "invalid_request"), (b'{"messages":[' + b"0," * AT_ONCE_BYTES + b"0]}", "invalid_request"),
     (b'{"messages":[' + b"{}," * MAX_MESSAGES + b"{}]}", "invalid_request"),
     (b'{"messages":[' + b"{}," * AT_ONCE_BYTES + b"{}]}", "invalid_request"),
     (b'{"messages":[{"tool_calls":[' + b"{}," * AT_ONCE_BYTES + b"{}]}]}", "invalid_request"),
     (b'{"messages":[{"content":[' + b"{}," * AT_ONCE_BYTES + b"{}]}]}", "invalid_request"),
     (b'{"tools":[' + b"{}," * AT_ONCE_BYTES + b"{}]}", "invalid_request"),
     (b'{"messages":[' + b"{}," * AT_ONCE_BYTES, "malformed_json")],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes, word: str) -> None:
    with pytest.raises(ApiError) as refused:
        look(body)
    assert refused.value.word == word


@pytest.mark.parametrize(
    "body",
    [b'{"model": 5, "messages": "x", "stream": "yes", "tools": 3, "prompt_cache_key": []}', b'{"messages": [{"role": 2}]}',
     b'{"messages": [], "prompt": {}}', b'{"prompt": [1, 2, 3]}',
     b'{"tools": ' + b"[" * 900 + b"]" * 900 + b', "messages": [' + b'{"content":' * 900 + b"1" + b"}" * 900 + b"]}"],
)  # fmt: skip
def test_odd_types_are_the_sites_to_refuse(body: bytes) -> None:
    request = look(body)
    assert request.model is None
    assert request.wants_stream is False


RUN = "/client/v4/accounts/a/ai/run/@org/m"
TEXT = "word " * 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/embeddings", {"input": TEXT}),
        ("/v1/embeddings", {"input": [TEXT[:500], TEXT[500:]]}),
        ("/v1/embeddings", {"input": [*range(1000, 1200)]}),
        (RUN, {"prompt": TEXT}),
        (RUN, {"input": [{"role": "user", "content": TEXT}]}),
        (RUN, {"text": [TEXT]}),
        ("/fn/@org/m", {"text": TEXT}),
    ],
)
def test_whatever_a_request_asks_its_prompt_has_tokens(path: str, fields: dict[str, object]) -> None:
    """The tokens of a prompt count against an account's limit per minute."""
    assert look(orjson.dumps({"model": "m", **fields}), head(path)).conversation.tokens == pytest.approx(250, rel=0.2)


def test_a_run_in_the_form_of_responses_is_a_conversation_and_texts_to_embed_are_not() -> None:
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    first = look(orjson.dumps({"input": turns[:1]}), head(RUN)).conversation
    later = look(orjson.dumps({"input": turns}), head(RUN)).conversation
    assert first.placement_key == later.placement_key is not None
    assert look(orjson.dumps({"text": ["one"]}), head(RUN)).conversation.prefixes == ()


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 0),
        ({"max_tokens": 5, "n": 2}, 10),
        ({"max_tokens": 5.0, "n": 2.0}, 10),  # some languages have only floats
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_output_tokens": 5, "max_tokens": None}, 5),
        ({"max_tokens": True, "n": -1}, 0),
        ({"max_tokens": 5, "prompt": "a text"}, 5),
        ({"max_tokens": 5, "prompt": [1, 2, 3]}, 5),
        ({"max_tokens": 5, "prompt": []}, 5),
        ({"max_tokens": 5, "prompt": ["a", "b", "c"], "n": 2}, 30),
        ({"max_tokens": 5, "prompt": [[1, 2], [3]]}, 10),
    ],
)
def test_an_answer_may_have_what_its_request_names_for_each_choice_of_each_prompt(
    fields: dict[str, object], most: int
) -> None:
    assert look(orjson.dumps({"model": "ember", **fields})).most_tokens == most


@pytest.mark.parametrize(
    "declared", ["image/png", "multipart/form-data", "application/x-www-form-urlencoded", "text/plain"]
)
def test_a_body_is_read_as_sites_read_it_whatever_type_it_claims(declared: str) -> None:
    request = look(
        b'{"model": "ember", "messages": [{"role": "user", "content": "hello there"}]}', head(content_type=declared)
    )
    assert request.model == "ember"
    assert request.conversation.tokens > 0, "a limit on tokens must not be evaded by a header"
    assert look(b"", head(method="GET", path="/ai/v1/models")).model is None


def test_a_compressed_body_is_refused_with_the_reason() -> None:
    with pytest.raises(ApiError, match="content-encoding"):
        look(b"\x1f\x8b", head(content_encoding="gzip"))


@pytest.mark.parametrize("geo", ["here", "91,0", "1;2", "nan,0", "0,181", "1"])
def test_a_malformed_place_is_refused(geo: str) -> None:
    with pytest.raises(ApiError, match="x-client-geo"):
        look(b"{}", head(x_client_geo=geo))


def test_a_place_is_read() -> None:
    place = look(b"{}", head(x_client_geo="52.3, -4.8")).client
    assert place is not None
    assert (place.latitude, place.longitude) == (52.3, -4.8)


def test_a_place_is_the_front_ends_word_alone_and_no_other_router_hears_an_invented_one() -> None:
    said = {"x_client_geo": "52.3, -4.8"}
    believed, invented = look(b"{}", head(**said)), look(b"{}", head(**said), address="192.0.2.1")
    assert b"x-client-geo: 52.3,-4.8\r\n" in believed.forwarded_lines
    assert invented.client is None
    assert b"x-client-geo" not in invented.forwarded_lines
    signature = sign_hop("s3cret", time.time(), Hop("POST", CHAT, "id-1", "ams1"), b"{}")
    by_router = look(
        b"{}", head(**said, x_pilotlight_hop=signature, x_request_id="id-1"), "s3cret", address="192.0.2.1"
    )
    assert by_router.client == believed.client


def test_a_clients_request_id_is_kept_only_if_short_and_printable() -> None:
    assert request_id_of(head(x_request_id="trace-7")) == "trace-7"
    for bad in ("", "x" * 129, "a b", "caf\xe9", "a\x1b[31m"):
        made = request_id_of(head(x_request_id=bad))
        assert made != bad
        assert len(made) == 32


def test_forged_headers_of_ours_and_hop_by_hop_headers_do_not_travel() -> None:
    request = look(b"{}", head(
        x_pilotlight_route="site=evil", x_pilotlight_hop="1.2", connection="close, x-private", x_private="1", te="trailers",
        accept_encoding="gzip", authorization="Bearer t", content_length="2", host="h", expect="100-continue", x_other="kept",
    ))  # fmt: skip
    assert sent(request) == {
        "authorization": "Bearer t", "x-other": "kept", "x-request-id": "id-1", "accept-encoding": "identity", HOPS: "1",
    }  # fmt: skip


def test_the_hop_is_signed_where_the_network_has_a_secret() -> None:
    signed = sent(look(b"{}", secret="s3cret"), "s3cret")
    assert (
        signed_body(signed[HOP], "s3cret", time.time(), Hop("POST", CHAT, "id-1", "ams1"))
        == hashlib.sha256(b"{}").hexdigest()
    )


def test_hops_are_counted_and_a_loop_is_refused() -> None:
    assert sent(look(b"{}", head(x_pilotlight_hops="3")))[HOPS] == "4"
    with pytest.raises(ApiError, match="passed 4 routers"):
        look(b"{}", head(x_pilotlight_hops="4"))


def test_with_a_secret_only_signed_hops_count() -> None:
    assert sent(look(b"{}", head(x_pilotlight_hops="9"), secret="s"), "s")[HOPS] == "1"
    signature = sign_hop("s", time.time(), Hop("POST", CHAT, "id-0", "ams1"), b"{}")
    for body, why in ((b"{}", "passed 4 routers"), (b'{"n": 2}', "differs from the signed one")):
        with pytest.raises(ApiError, match=why):
            look(body, head(x_pilotlight_hops="9", x_pilotlight_hop=signature, x_request_id="id-0"), secret="s")


def test_two_clients_with_the_same_head_stand_each_in_their_own_place() -> None:
    places = {"192.0.2.1": Place("client", 1.0, 2.0), "192.0.2.2": Place("client", 3.0, 4.0)}
    same = head()

    def look_from(address: str) -> ValidRequest:
        parser = RequestParser("", 4, lambda address, header, is_hop: places.get(address))
        return parser.parse(same, b"{}", "id-1", address)

    for address, line in (("192.0.2.1", "1,2"), ("192.0.2.2", "3,4"), ("192.0.2.1", "1,2")):
        request = look_from(address)
        assert request.client == places[address]
        assert sent(request)["x-client-geo"] == line
    assert "x-client-geo" not in sent(look_from("192.0.2.3"))


def test_of_a_long_conversation_a_bounded_number_of_prefixes_is_kept_and_the_next_turn_finds_them() -> None:
    messages = [{"role": "user", "content": str(i)} for i in range(5000)]
    before, after = (
        look(orjson.dumps({"model": "ember", "messages": messages[:number]})).conversation for number in (4999, 5000)
    )
    assert len(after.prefixes) == FIRST_PREFIXES + LAST_PREFIXES
    assert before.prefixes[-1] in after.prefixes
    assert before.placement_key == after.placement_key
    assert after.tokens > 5000


def test_a_cache_salt_parts_the_conversations_of_one_tenant() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chains = [
        look(orjson.dumps({"model": "m", "messages": messages, **salt})).conversation.prefixes
        for salt in ({}, {"cache_salt": ""}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": 5})
    ]
    assert chains[0] == chains[1] == chains[4]
    assert len({chain[-1].digest for chain in chains}) == 3
