"""The first turns of a conversation at sites that have just started or were slow once: it stays at the site with its cache."""

import random
from typing import Any, cast

import orjson
import pytest

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.edge_router.backends.lateness import Lateness
from pilotlight.edge_router.forwarding.request_state import RequestState
from pilotlight.edge_router.requests.request import Head, RequestParser, ValidRequest
from pilotlight.edge_router.requests.session import SessionTable
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.edge_router.routing.selection import SiteSelector
from pilotlight.edge_router.services.finetune_registry import SiteFinetunes
from pilotlight.sites.network import RelayConfig
from tests.edge_router.builders import PLACES, Clock, model_status, network, site_status
from tests.edge_router.routing.test_selection import Hints, Metrics

PATH = "/v1/chat/completions"


class StreamStarted:
    status, body, failure = 200, None, None


class Network:
    """Three simulated sites: `publish` publishes statuses, `turn` answers a turn in a given time."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = Clock()
        net = network({name: f"http://127.0.0.1:{i + 1}" for i, name in enumerate(PLACES)})
        self.backends: dict[str, Backend] = Discovery(net, self.clock).backends
        self.sessions = SessionTable(999, 600.0, self.clock)
        places, metrics, hints = DataPlaces(net), cast(Any, Metrics()), cast(Any, Hints())
        finetunes = SiteFinetunes(self.backends, places, cast(Any, None))
        self.selector = SiteSelector(
            self.backends, CostPolicy(), self.sessions, metrics, self.clock, places, finetunes, hints
        )
        self.rates: dict[str, dict[str, float]] = {}  # rates that each site has measured
        self.sequence = 0

    def publish(self, *names: str) -> None:
        """Let sites publish a status; their round trips vary."""
        self.sequence += 1
        self.clock.advance(1.0)
        for name in names or PLACES:
            model = model_status(**cast(Any, self.rates.get(name, {})))
            self.backends[name].answered(site_status(name, self.sequence, models=(model,)), self.clock())
            self.backends[name].round_trip.observe(self.dice.uniform(0.3, 6.0))

    def turn(self, messages: list[dict[str, str]], slow_ms: float = 0.0, at: str | None = None) -> tuple[str, str]:
        """Answer a turn at the site `at`, or else at the policy's choice, `slow_ms` later than expected.

        Return its site, and the policy's reason.
        """
        request = parsed(messages)
        proxied = RequestState(request, RelayConfig(), self.clock())
        _, preferences = self.selector.rank(request)
        chosen = next(each for each in preferences if at in (None, each.backend.name))
        name = chosen.backend.name
        took_s = (chosen.expected_ms + slow_ms) / 1000
        with self.backends[name].inflight(request.conversation.tokens, None, proxied.expected_ms(chosen)) as ticket:
            self.clock.advance(took_s)
            ticket.answering()
            self.selector.note_answer(proxied, chosen, cast(Any, StreamStarted()), took_s)
        # From now on the site publishes its own measurements, which include the slow answer.
        self.rates[name] = {
            "prefill_tokens_per_s": min(2000.0, 1000 * request.conversation.tokens / (slow_ms + 1)),
            "decode_tokens_per_s": self.dice.uniform(15, 200),
        }
        return name, chosen.reason


def parsed(messages: list[dict[str, str]]) -> ValidRequest:
    body = orjson.dumps({"model": "ember", "stream": True, "messages": messages})
    return RequestParser("", 4, lambda *_: None).parse(Head("POST", PATH, PATH, []), body, "id", "127.0.0.1")


def conversation(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me about airport {number}, and all that there is to see."}]


def answered(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": "It is large."}, {"role": "user", "content": "And at night?"}]


@pytest.mark.parametrize("known", [0, 1, 3])
def test_the_second_turn_of_the_first_conversation_after_a_start_is_cached(known: int) -> None:
    """`known` sites have published a status before the first turn."""
    for seed in range(50):
        net = Network(seed)
        if known:
            net.publish(*[*PLACES][:known])
        messages = conversation(seed)
        home, _ = net.turn(messages, slow_ms=net.dice.uniform(100, 8000))
        net.publish()
        for _ in range(2):
            messages = answered(messages)
            assert net.turn(messages, slow_ms=net.dice.uniform(0, 10)) == (home, "home"), f"seed {seed}"
            net.publish()


def test_a_site_that_was_slow_once_keeps_its_conversations_and_newcomers_look_elsewhere() -> None:
    for seed in range(50):
        net = Network(seed)
        net.publish()
        conversations = [conversation(100 * seed + number) for number in range(6)]
        for messages in conversations:
            net.turn(messages, at="ams1")
        net.publish()
        net.turn(answered(conversations[0]), slow_ms=net.dice.uniform(500, 8000), at="ams1")
        net.rates["ams1"]["prefill_tokens_per_s"] = 2000.0
        net.publish()
        for messages in conversations:
            _, ranked = net.selector.rank(parsed(answered(messages)))
            assert (ranked[0].backend.name, ranked[0].reason) == ("ams1", "home"), f"seed {seed}"
        _, ranked = net.selector.rank(parsed(conversation(-1 - seed)))
        assert ranked[0].backend.name != "ams1"
        net.turn(answered(conversations[1]), slow_ms=20_000, at="ams1")
        net.rates = {name: {"prefill_tokens_per_s": 2000.0, "decode_tokens_per_s": 50.0} for name in PLACES}
        net.publish()
        _, ranked = net.selector.rank(parsed(answered(conversations[2])))
        assert ranked[0].reason == "home_too_dear", "two have shown it"


def test_what_one_late_answer_shows_proves_nothing_and_two_prove_what_both_have_shown() -> None:
    lateness = Lateness(Clock())
    lateness.observe(100.0, 5150.0)
    assert (lateness.mean_ms(), lateness.proven_ms()) == (1250.0, 0.0)
    assert lateness.proven_ms(overdue_ms=1000.0) == 1000 / 5, "the overdue answer is the second"
    assert Lateness(Clock()).proven_ms(overdue_ms=9000.0) == 0.0
    assert Lateness(Clock()).proven_ms(overdue_ms=9000.0, next_overdue_ms=1000.0) == 1000 / 5
    lateness.observe(100.0, 1150.0)
    assert (lateness.mean_ms(), lateness.proven_ms()) == (6000 / 5, 1000 / 5)
