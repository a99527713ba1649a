"""Conversations find their home: by name, by fingerprint, after a branch; and never across tenants (I4)."""

import orjson

from edge_router.client_places import ClientPlaces
from edge_router.policy import Home
from edge_router.request import Head, RequestParser, ValidRequest
from edge_router.session import SessionTable, tenant_salt
from tests.edge_router.builders import Clock

SYSTEM = {"role": "system", "content": "You are terse. " * 40}
OPENING = [SYSTEM, {"role": "user", "content": "Where is Schiphol? " * 20}]
REPLY = {"role": "assistant", "content": "In Amsterdam. " * 10}


def ask(
    messages: list[dict[str, str]] | None = None,
    *,
    token: str = "Bearer one",
    path: str = "/ai/v1/chat/completions",
    headers: dict[str, str] | None = None,
    secret: str = "",
    **fields: object,
) -> ValidRequest:
    body = {"model": "ember", **({"messages": messages} if messages is not None else {}), **fields}
    head = Head("POST", path, path, [("authorization", token), *(headers or {}).items()])
    return RequestParser(secret, 4, ClientPlaces(()).place).parse(head, orjson.dumps(body), "id", "192.0.2.1")


def table(**limits: float) -> tuple[SessionTable, Clock]:
    clock = Clock()
    return SessionTable(int(limits.get("entries", 1000)), limits.get("ttl_s", 60.0), clock), clock


def test_the_next_turn_without_any_header_finds_its_home_and_its_cached_tokens() -> None:
    sessions, _ = table()
    first = ask(OPENING)
    sessions.learn(first.conversation, "iad1")
    follow_up = ask([*OPENING, REPLY, {"role": "user", "content": "And Changi?"}])
    assert sessions.recall(follow_up.conversation).home == Home("iad1", first.conversation.tokens, by_name=False)


def test_an_edited_message_finds_home_at_the_branch() -> None:
    sessions, _ = table()
    sessions.learn(ask(OPENING).conversation, "iad1")
    long = [*OPENING, REPLY, {"role": "user", "content": "And Changi?"}, REPLY, {"role": "user", "content": "Thanks"}]
    sessions.learn(ask(long).conversation, "sin1")
    home = sessions.recall(ask([*long[:3], {"role": "user", "content": "And Dulles instead?"}]).conversation).home
    assert home is not None
    assert home.site == "sin1"
    assert 0 < home.cached_tokens < ask(long).conversation.tokens


def test_a_shared_system_prompt_alone_is_no_home() -> None:
    sessions, _ = table()
    sessions.learn(ask(OPENING).conversation, "iad1")
    assert sessions.recall(ask([SYSTEM, {"role": "user", "content": "Something else"}]).conversation).home is None


def test_other_tools_or_another_model_make_another_prefix() -> None:
    sessions, _ = table()
    sessions.learn(ask(OPENING).conversation, "iad1")
    assert sessions.recall(ask(OPENING, tools=[{"type": "function"}]).conversation).home is None
    assert sessions.recall(ask(OPENING, model="other").conversation).home is None


def test_a_growing_text_prompt_finds_home_by_its_pieces() -> None:
    sessions, _ = table()
    sessions.learn(ask(prompt="once upon a time " * 400).conversation, "sin1")
    home = sessions.recall(ask(prompt="once upon a time " * 500).conversation).home
    assert home is not None
    assert home.site == "sin1"
    assert home.cached_tokens > 1000


def test_a_named_session_is_found_by_header_or_by_prompt_cache_key() -> None:
    sessions, _ = table()
    sessions.learn(ask(OPENING, headers={"x-session-affinity": "s-1"}).conversation, "sin1")
    other_words = [{"role": "user", "content": "New topic"}]
    home = sessions.recall(ask(other_words, prompt_cache_key="s-1").conversation).home
    assert home is not None
    assert (home.site, home.by_name) == ("sin1", True)
    assert home.cached_tokens <= ask(other_words, prompt_cache_key="s-1").conversation.tokens


def test_two_tenants_never_share_an_entry() -> None:
    sessions, _ = table()
    named = {"x-session-affinity": "s-1"}
    sessions.learn(ask(OPENING, headers=named).conversation, "iad1")
    stranger = ask(OPENING, headers=named, token="Bearer two").conversation
    assert sessions.recall(stranger).home is None
    mine = ask(OPENING, headers=named).conversation
    assert not {mine.session, *(p.digest for p in mine.prefixes)} & {
        stranger.session,
        *(p.digest for p in stranger.prefixes),
    }


def test_two_accounts_behind_one_token_are_two_tenants() -> None:
    sessions, _ = table()
    sessions.learn(ask(OPENING, path="/client/v4/accounts/a/ai/run/ember").conversation, "iad1")
    assert sessions.recall(ask(OPENING, path="/client/v4/accounts/b/ai/run/ember").conversation).home is None
    assert sessions.recall(ask(OPENING, path="/client/v4/accounts/a/ai/run/ember").conversation).home is not None


def test_a_salt_has_no_seam_between_account_and_authorization() -> None:
    assert tenant_salt("bc", "a") != tenant_salt("c", "ab")
    assert tenant_salt("t", "a", "secret one") != tenant_salt("t", "a", "secret two")


def test_all_turns_of_a_conversation_have_one_placement_key() -> None:
    first, second = ask(OPENING), ask([*OPENING, REPLY, {"role": "user", "content": "More"}])
    assert first.conversation.placement_key == second.conversation.placement_key is not None


def test_an_entry_expires_and_its_use_renews_it() -> None:
    sessions, clock = table(ttl_s=60.0)
    conversation = ask(OPENING).conversation
    sessions.learn(conversation, "iad1")
    clock.advance(50)
    sessions.learn(conversation, "iad1")
    clock.advance(50)
    assert sessions.recall(conversation).home is not None
    clock.advance(11)
    assert sessions.recall(conversation).home is None
    sessions.learn(ask([{"role": "user", "content": "x"}]).conversation, "ams1")
    assert len(sessions) == 1


def test_the_table_is_bounded_and_forgets_the_oldest_first() -> None:
    sessions, _ = table(entries=10)
    conversations = [ask([{"role": "user", "content": f"topic {i}"}]).conversation for i in range(25)]
    for conversation in conversations:
        sessions.learn(conversation, "iad1")
    assert len(sessions) == 10
    assert [sessions.recall(c).home is not None for c in conversations] == [False] * 15 + [True] * 10


def test_a_conversation_that_moved_is_found_at_its_new_home() -> None:
    sessions, _ = table()
    conversation = ask(OPENING, headers={"x-session-affinity": "s-1"}).conversation
    sessions.learn(conversation, "iad1")
    sessions.learn(conversation, "ams1")
    home = sessions.recall(conversation).home
    assert home is not None
    assert home.site == "ams1"
