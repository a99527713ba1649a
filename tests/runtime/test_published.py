"""A site's /status after a router's requests: cached prefixes, arrival rates; and refusals over HTTP."""

import pytest

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.engine.api.protocol import ModelLoad
from pilotlight.wire.hop.headers import MAX_QUEUE_WAIT, PREFIXES, QUEUE
from pilotlight.wire.hop.prefixes import decode_prefixes, encode_prompt_prefixes
from pilotlight.wire.hop.status import ModelStatus, decode_status
from tests.asgi import call
from tests.edge_router.builders import Clock, network
from tests.fakes import says
from tests.runtime.conftest import Site, SiteMaker
from tests.runtime.test_identity import CHAT, HELLO, SECRET, signed

NAMED = encode_prompt_prefixes([(77, 40), (33, 20)])


async def model_status(site: Site) -> ModelStatus:
    answer = await call(site.app, "/status")
    return decode_status(answer.body).models[0]


async def test_a_routers_prompt_is_published_under_the_digests_that_it_came_with(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.script = says("Hello")
        assert (await call(site.app, CHAT, HELLO, **signed(), **{PREFIXES: NAMED})).status == 200
        status = await model_status(site)
        assert decode_prefixes(status.prefixes) == {33, 77}
        assert status.prefixes_complete
        assert status.arriving_per_s > 0
        assert status.arriving_tokens_per_s > 0


async def test_the_store_below_the_cache_is_published_with_its_pace(make_site: SiteMaker) -> None:
    async with make_site() as site:
        site.engine.loads = {"tiny": ModelLoad(store="5eed", store_tokens_per_s=900.0)}
        status = await model_status(site)
        assert (status.kv_store, status.kv_store_tokens_per_s) == ("5eed", 900.0)


async def test_a_stranger_publishes_nothing(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.script = says("Hello")
        assert (await call(site.app, CHAT, HELLO, **{PREFIXES: NAMED})).status == 200
        assert (await model_status(site)).prefixes == b""


@pytest.mark.parametrize("named", ["nonsense", "AAAA", ""])
async def test_digests_that_make_no_sense_do_no_harm(make_site: SiteMaker, named: str) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.script = says("Hello")
        assert (await call(site.app, CHAT, HELLO, **signed(), **{PREFIXES: named})).status == 200
        assert (await model_status(site)).prefixes == b""


async def test_a_long_queue_declines_a_router_with_its_length_in_a_header(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.script = says("Hello")
        site.engine.loads = {"tiny": ModelLoad(waiting_tokens=900, prefill_tokens_per_s=1000.0, total_blocks=100)}
        declined = await call(site.app, CHAT, HELLO, **signed(), **{MAX_QUEUE_WAIT: "899"})
        assert (declined.status, declined.headers[QUEUE]) == (503, "900")
        assert declined.json["error"]["code"] == "overloaded"
        assert (await call(site.app, CHAT, HELLO, **signed(), **{MAX_QUEUE_WAIT: "900"})).status == 200
        assert (await call(site.app, CHAT, HELLO, **{MAX_QUEUE_WAIT: "0"})).status == 200
        await site.is_idle()


async def test_a_router_reads_what_a_site_publishes(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.script = says("Hello")
        await call(site.app, CHAT, HELLO, **signed(), **{PREFIXES: NAMED})
        clock = Clock()
        backend: Backend = Discovery(network({"ams1": "http://127.0.0.1:1"}), clock).backends["ams1"]
        backend.answered(decode_status((await call(site.app, "/status")).body), clock())
        assert backend.view().prefixes == {33, 77}
