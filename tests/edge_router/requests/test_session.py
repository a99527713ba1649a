"""Conversations return to their site, found by name or by fingerprint, also after a branch, but never across tenants (I4)."""

from collections import OrderedDict

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.edge_router.requests.client_places import ClientPlaces
from pilotlight.edge_router.requests.request import Head, RequestParser, ValidRequest
from pilotlight.edge_router.requests.session import (
    FIRST_PREFIXES,
    HOLDERS,
    LAST_PREFIXES,
    REMEMBERED_PREFIXES,
    ConversationFingerprint,
    Prefix,
    Recall,
    SessionTable,
    prefix_chain,
    session_digest,
    tenant_salt,
)
from pilotlight.edge_router.routing.views import Home
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


class PlainTable:
    """The expected content of a table, as lists.
    For each digest it has its sites, the newest first, each with its time, and the newest number of tokens."""

    def __init__(self, ttl_s: float) -> None:
        self.told: OrderedDict[bytes, tuple[dict[str, float], int]] = OrderedDict()
        self._ttl_s = ttl_s

    def learn(self, asked: ConversationFingerprint, site: str, now: float, most: int) -> None:
        kept = [*asked.prefixes[-REMEMBERED_PREFIXES:]]
        if asked.prefixes and not asked.prefixes[0].is_telling:
            kept.append(asked.prefixes[0])
        named = [] if asked.session is None else [(asked.session, asked.tokens)]
        for digest, tokens in [*((prefix.digest, prefix.tokens) for prefix in kept), *named]:
            sites, _ = self.told.pop(digest, ({}, 0))
            sites.pop(site, None)
            newest = {site: now + self._ttl_s, **sites}
            self.told[digest] = dict([*newest.items()][:HOLDERS]), tokens
        while self.told:
            oldest = next(iter(self.told))
            if len(self.told) <= most and next(iter(self.told[oldest][0].values())) > now:
                break
            del self.told[oldest]

    def holders(self, digest: bytes | None, now: float) -> list[str]:
        sites, _ = self.told.get(digest or b"", ({}, 0))
        return [site for site, until in sites.items() if until > now]

    def recall(self, asked: ConversationFingerprint, now: float) -> Recall:
        held: dict[str, int] = {}
        home: Home | None = None
        for digest, tokens, is_telling in reversed(asked.prefixes):
            sites = self.holders(digest, now)
            held = {**dict.fromkeys(sites, tokens), **held}
            if sites and is_telling and home is None:
                home = Home(sites[0], tokens, by_name=False)
        if named := self.holders(asked.session, now):
            tokens = held.get(named[0], self.told[asked.session or b""][1])
            held[named[0]] = min(tokens, asked.tokens)
            home = Home(named[0], held[named[0]], by_name=True)
        return Recall(home, held)


CHAIN = [Prefix(bytes([n]) * 16, 10 * n + 10, is_telling=n > 0) for n in range(4)]
ASKED = st.builds(
    ConversationFingerprint,
    st.sampled_from([None, b"one", b"other"]),
    st.integers(0, 4).map(lambda n: tuple(CHAIN[:n])),
    st.sampled_from([5, 25, 60]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(ASKED, st.sampled_from("abcdef"), st.sampled_from([0.0, 1.0, 30.0, 60.0])), max_size=20))
def test_a_table_knows_the_last_site_and_for_how_long(steps: list[tuple[ConversationFingerprint, str, float]]) -> None:
    sessions, clock = table(entries=5)
    plain = PlainTable(60.0)
    for asked, site, passed in steps:
        clock.advance(passed)
        sessions.learn(asked, site)
        plain.learn(asked, site, clock.now, 5)
        assert len(sessions) == len(plain.told)
        for again in (asked, ConversationFingerprint(b"one", tuple(CHAIN), 30), ConversationFingerprint(None, (), 0)):
            found, expected = sessions.recall(again), plain.recall(again, clock.now)
            assert (found.home, found.held) == (expected.home, expected.held)


def test_of_many_sites_the_newest_are_known_to_hold_a_beginning() -> None:
    sessions, _ = table()
    asked = ConversationFingerprint(None, tuple(CHAIN), 40)
    for site in "abcdefgh":
        sessions.learn(asked, site)
    assert sessions.recall(asked) == Recall(Home("h", 40, by_name=False), dict.fromkeys("hgfedc", 40))
    assert HOLDERS == 6


def test_a_chain_covers_all_before_it_and_keeps_its_beginning_and_its_end() -> None:
    pieces = [(b"%03d." % n, n > 0) for n in range(FIRST_PREFIXES + LAST_PREFIXES + 3)]
    chain = prefix_chain(b"k" * 32, b"seed", pieces)
    sizes = [(4 + 4 * (n + 1)) // 4 for n in range(len(pieces))]
    assert [prefix.tokens for prefix in chain] == sizes[:FIRST_PREFIXES] + sizes[-LAST_PREFIXES:]
    assert [prefix.is_telling for prefix in chain[:2]] == [False, True]
    assert prefix_chain(b"k" * 32, b"seed", pieces[:5]) == chain[:5]
    changed = prefix_chain(b"k" * 32, b"seed", [pieces[0], (b"x", True), *pieces[2:5]])
    assert [a == b for a, b in zip(changed, chain, strict=False)] == [True] + [False] * 4
    for salt, seed in ((b"l" * 32, b"seed"), (b"k" * 32, b"need"), (b"k" * 32, b"s" * 300), (b"k" * 32, b"t" * 300)):
        assert not {prefix.digest for prefix in prefix_chain(salt, seed, pieces[:5])} & {one.digest for one in chain}


def test_a_name_is_one_tenants_and_one_models() -> None:
    digests = {
        session_digest(salt * 32, model, name)
        for salt, model, name in (
            (b"a", "m", "n"),
            (b"b", "m", "n"),
            (b"a", "n", "n"),
            (b"a", "m", "m"),
            (b"a", "mn", ""),
            (b"a", "", "mn"),
        )
    }
    assert len(digests) == 6


def test_a_conversation_is_placed_by_its_name_or_by_the_first_words_that_tell_it_apart() -> None:
    def key(session: bytes | None, num_prefixes: int) -> bytes | None:
        return ConversationFingerprint.of(session, tuple(CHAIN[:num_prefixes]), 9).placement_key

    assert [key(b"name", 4), key(None, 4), key(None, 2)] == [b"name", CHAIN[1].digest, CHAIN[1].digest]
    assert key(None, 1) is key(None, 0) is None
    short = ConversationFingerprint.of(None, tuple(CHAIN), 9).short_digests
    assert [tokens for _, tokens in short] == [40, 30, 20, 10], "the longest first"
