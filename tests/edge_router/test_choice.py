"""The choice of a site for a request, through a real router: sessions, models, load."""

from typing import Any

import pytest

from pilotlight.wire.hop.status import FunctionsStatus, FunctionStatus
from tests.edge_router.builders import model_status
from tests.edge_router.fakes import WHOLE, answer, refuse, router, sites

pytestmark = pytest.mark.process


async def test_a_session_sticks_to_its_site_survives_its_loss_and_stays_at_the_new_one() -> None:
    async with sites("ams1", "iad1", "sin1") as fakes, router(fakes) as running:
        headers = {"x-session-affinity": "conversation-1"}

        async def turn(text: str) -> str:
            async with running.chat(headers=headers, messages=[{"role": "user", "content": text}]) as response:
                assert await response.read() == WHOLE
            return response.headers["x-pilotlight-route"].split("; ")[0].removeprefix("site=")

        homes = {await turn(f"turn {i}") for i in range(6)}
        assert len(homes) == 1
        home = next(fake for fake in fakes if fake.name in homes)
        await home.stop()
        refuges = {await turn(f"turn {i}") for i in range(6, 12)}
        assert len(refuges) == 1
        assert home.name not in refuges
        await home.start()
        await running.until_states(**{home.name: "healthy"})
        assert {await turn("again")} == refuges


async def test_a_request_goes_to_the_site_that_has_its_model() -> None:
    async with sites("ams1", "iad1") as fakes:
        fakes[1].status_fields = {"models": (model_status("big", aliases=("@org/big",)),)}
        async with router(fakes) as running:
            for model in ("big", "@org/big", "big:adapter", "@org/big:adapter") * 3:
                async with running.chat(model=model) as response:
                    assert "site=iad1" in response.headers["x-pilotlight-route"]
            fakes[0].behave = fakes[1].behave = answer(404, {"error": {"code": "model_not_found"}})
            async with running.chat(model="nobody-has-it") as response:
                assert response.status == 404


async def test_a_request_goes_to_a_site_that_serves_its_function_and_nowhere_else_while_that_one_is_away() -> None:
    async with sites("ams1", "iad1") as fakes:
        for fake, names in zip(fakes, (["one", "both@0123456789abcdef"], ["two", "both"]), strict=True):
            served = tuple(FunctionStatus(name) for name in names)
            fake.status_fields = {"functions": FunctionsStatus(isolation_tier=2, functions=served)}
            fake.behave = answer(200, {"site": fake.name})
        async with router(fakes) as running:

            async def ask(name: str) -> tuple[int, dict[str, Any]]:
                async with running.http.get(f"{running.url}/fn/{name}/path") as response:
                    return response.status, await response.json()

            for name, site in (("one", "ams1"), ("two", "iad1")) * 3:
                assert await ask(name) == (200, {"site": site})
            assert (await ask("both"))[0] == (await ask("nobody-says-so"))[0] == 200
            fakes[0].behave = refuse(
                "misdirected_request", 421
            )  # like a site that has just learnt from its router that the function's home is elsewhere
            assert {(await ask("nobody-says-so-yet"))[1]["site"] for _ in range(4)} == {"iad1"}
            fakes[0].behave = answer(200, {"site": "ams1"})
            await fakes[1].stop()
            await running.until_states(iad1="unhealthy")
            assert await ask("both") == (200, {"site": "ams1"})
            status, told = await ask("two")
            assert status == 503
            assert told["error"]["message"].endswith(
                "iad1: cannot connect: Connection refused; this function runs at iad1 only"
            )


async def test_a_model_whose_only_site_is_away_is_not_said_to_be_unknown() -> None:
    async with sites("ams1", "iad1") as fakes:
        fakes[1].status_fields = {"models": (model_status("coal"),)}
        fakes[1].behave = answer(404, {"error": {"message": "no such model", "code": "model_not_found"}})
        async with router(fakes) as running:
            async with running.chat(model="nobody-has-it") as response:
                assert response.status == 404
            fakes[1].bodies.clear()
            fakes[0].status_fields = {"draining": True}
            await running.until_states(ams1="draining")
            async with running.chat() as response:
                assert (response.status, fakes[1].bodies) == (503, [])
                assert int(response.headers["retry-after"]) >= 1
            await fakes[0].stop()
            await running.until_states(ams1="unhealthy")
            async with running.chat() as response:
                assert (response.status, fakes[1].bodies) == (503, [])
            async with running.chat("/client/v4/accounts/a/ai/run/ember") as response:
                assert (response.status, fakes[1].bodies) == (503, [])
            async with running.chat(model="nobody-has-it") as response:
                assert response.status == 404


async def test_what_a_site_that_was_never_heard_of_may_have_is_not_said_to_be_unknown() -> None:
    async with sites("ams1", "iad1") as fakes:
        fakes[1].status_fields = {"models": (model_status("coal"),)}
        fakes[1].behave = answer(404, {"error": {"message": "there is none", "code": "model_not_found"}})
        await fakes[0].stop()
        async with router(fakes, until={"ams1": "unhealthy", "iad1": "healthy"}) as running:
            async with running.chat() as response:
                assert (response.status, "ams1: cannot connect" in await response.text()) == (503, True)
            async with running.http.get(f"{running.url}/fn/notes/") as response:
                assert response.status == 503
            async with running.http.get(f"{running.url}/v1/models/ember") as response:
                assert response.status == 503
            assert fakes[1].bodies == []
            fakes[0].behave = fakes[1].behave
            await fakes[0].start()
            await running.until_states(ams1="healthy")
            async with running.chat(model="nobody-has-it") as response:
                assert response.status == 404
            async with running.http.get(f"{running.url}/fn/notes/") as response:
                assert response.status == 404


async def test_a_model_that_its_only_site_could_not_load_is_not_said_to_be_unknown() -> None:
    async with sites("ams1", "iad1") as fakes:
        fakes[0].status_fields = {"models": (model_status(residency="failed"),)}
        fakes[0].behave = refuse("model_load_failed", 500)
        fakes[1].status_fields = {"models": (model_status("coal"),)}
        fakes[1].behave = answer(404, {"error": {"message": "no such model", "code": "model_not_found"}})
        async with router(fakes) as running:
            for _ in range(4):
                async with running.chat() as response:
                    assert response.status == 503
            assert fakes[1].bodies == []


async def test_with_no_healthy_site_the_unhealthy_are_tried_and_the_refusal_has_the_results() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        fakes[0].status_fields = {"draining": True}
        await fakes[1].stop()
        await running.until_states(ams1="draining", iad1="unhealthy")
        async with running.chat() as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            message = (await response.json())["error"]["message"]
        assert "tried: iad1: cannot connect" in message
        async with running.chat("/client/v4/accounts/a/ai/run/ember") as response:
            assert (response.status, (await response.json())["errors"][0]["code"]) == (503, 3040)
