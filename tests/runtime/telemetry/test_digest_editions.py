"""A site's prefix digests as published, and as a router decodes them: complete at first, and then only changes."""

import random

from msgspec.structs import replace

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.runtime.telemetry.digest_editions import KEPT, DigestEditions
from pilotlight.wire.hop.headers import PREFIXES
from pilotlight.wire.hop.prefixes import MAX_PUBLISHED, encode_prefixes, encode_prompt_prefixes
from pilotlight.wire.hop.status import SiteStatus, decode_status, encode_status
from tests.asgi import call
from tests.edge_router.builders import Clock, model_status, network, site_status
from tests.fakes import says
from tests.runtime.conftest import SiteMaker
from tests.runtime.test_identity import CHAT, HELLO, SECRET, signed


def router() -> Backend:
    return Discovery(network({"ams1": "http://127.0.0.1:1"}), Clock()).backends["ams1"]


def status(sequence: int, pid: int = 1, **held: set[int]) -> SiteStatus:
    models = tuple(model_status(name, prefixes=encode_prefixes(digests)) for name, digests in held.items())
    return site_status("ams1", sequence, models=models, pid=pid)


def test_routers_know_what_a_site_holds_whatever_answers_are_lost_or_late_and_whenever_it_restarts() -> None:
    draw = random.Random(1)
    editions, routers = DigestEditions(), [router() for _ in range(3)]
    held: dict[str, set[int]] = {"a": set(), "b": set()}
    pid, num_changes, late = 1, 0, []
    for sequence in range(1, 600):
        if draw.random() < 0.4:
            name = draw.choice(list(held))
            held[name] = {digest for digest in held[name] if draw.random() < 0.9} | {draw.randrange(99)}
        if draw.random() < 0.02:
            held.pop("b", None) if "b" in held else held.update(b={7})
        if draw.random() < 0.02:
            pid, editions = pid + 1, DigestEditions()
        backend = draw.choice(routers)
        told = editions.publish(status(sequence, pid, **held), backend.published.digests)
        num_changes += told.digests_since > 0
        if draw.random() < 0.2:
            late.append((backend, told))
            continue
        backend.answered(decode_status(encode_status(told)), float(sequence))
        if late and draw.random() < 0.5:
            other, older = late.pop(0)
            if older.processes == told.processes:  # the edition of a dead process may equal one of a new process
                other.answered(older, float(sequence))
        if backend.published.digests:
            assert backend.view().prefixes == frozenset().union(*held.values())
    assert 200 < num_changes < 599


def test_a_status_of_changes_is_small_and_one_without_changes_has_none() -> None:
    editions, backend = DigestEditions(), router()
    held = set(range(0, 4 * MAX_PUBLISHED, 4))
    whole = editions.publish(status(1, m=held), 0)
    backend.answered(whole, 1.0)
    known = backend.published.digests
    assert len(encode_status(editions.publish(status(2, m=held), known))) < 2_000 < len(encode_status(whole)) / 20
    changed = editions.publish(status(3, m=held - {0, 4} | {1}), known)
    assert len(encode_status(changed)) < 2_000
    backend.answered(changed, 3.0)
    assert backend.view().prefixes == held - {0, 4} | {1}


def test_a_router_that_was_away_for_long_gets_everything() -> None:
    editions = DigestEditions()
    first = editions.publish(status(1, m={0}), 0)
    for sequence in range(2, 2 + KEPT):
        told = editions.publish(status(sequence, m={sequence}), first.digests)
    assert told.digests_since == 0
    assert told.models[0].prefixes == encode_prefixes({sequence})


def test_changes_of_an_unknown_edition_are_not_applied_and_all_is_requested() -> None:
    editions, backend = DigestEditions(), router()
    first = editions.publish(status(1, m={5}), 0)
    changes = editions.publish(status(2, m={5, 6}), first.digests)
    backend.answered(changes, 1.0)
    assert (backend.view().prefixes, backend.published.digests) == (frozenset(), 0)


def test_a_site_that_lies_of_its_digests_has_none_and_costs_no_memory() -> None:
    editions, backend = DigestEditions(), router()
    backend.answered(editions.publish(status(1, m=set(range(MAX_PUBLISHED))), 0), 1.0)
    known = backend.published.digests
    more = status(2, m=set(range(MAX_PUBLISHED, 2 * MAX_PUBLISHED)))
    backend.answered(replace(more, digests=known + 1, digests_since=known), 2.0)
    assert (backend.view().prefixes, backend.published.digests) == (frozenset(), 0)


async def test_a_site_answers_a_router_with_changes_and_all_others_in_full(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.script = says("Hello")
        named = encode_prompt_prefixes([(77, 40), (33, 20)])
        await call(site.app, CHAT, HELLO, **signed(), **{PREFIXES: named})
        first = decode_status((await call(site.app, "/status")).body)
        again = decode_status((await call(site.app, f"/status?digests={first.digests}")).body)
        assert first.models[0].prefixes == encode_prefixes({33, 77})
        assert (again.models[0].prefixes, again.digests, again.digests_since) == (b"", first.digests, first.digests)
        for unknown in ("", "0", "1", "x", "-1", "9" * 30, f"{first.digests}x"):
            told = decode_status((await call(site.app, f"/status?digests={unknown}")).body)
            assert told.models[0].prefixes == encode_prefixes({33, 77})
