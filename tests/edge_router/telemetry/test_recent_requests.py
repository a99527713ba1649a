"""The newest requests of a router."""

import json
from typing import Any

import pytest

from pilotlight.wire.hop.management import REQUESTS_PATH
from tests.edge_router.fakes import Router, answer, router, sites

pytestmark = pytest.mark.process


async def requests(running: Router) -> list[dict[str, Any]]:
    async with running.http.get(f"{running.url}/page/requests") as told:
        assert told.status == 200
        found: list[dict[str, Any]] = (await told.json())["requests"]
        return found


async def test_each_request_is_there_with_its_site_and_outcome_and_nothing_of_its_text() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {"ok": True})
        async with running.chat() as told:
            await told.read()
        fakes[0].behave = answer(400, {"error": {"message": "no"}})
        async with running.chat() as told:
            await told.read()
        first, second = await requests(running)
        assert (first["site"], first["outcome"], first["tries"]) == ("ams1", "ok", 0)
        assert (second["site"], second["outcome"]) == ("ams1", "400")
        assert first["request_id"] != second["request_id"]
        assert first["took_ms"] >= 0
        assert [request.path for request in fakes[0].seen].count(REQUESTS_PATH) == 1
        assert "Hi" not in json.dumps(first)


async def test_a_site_that_does_not_say_its_phases_costs_no_request_of_the_list() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {"ok": True})
        async with running.chat() as told:
            await told.read()
        fakes[0].behave = answer(200, {"not": "a list"})
        (row,) = await requests(running)
        assert row["phases"] is None
