"""A signature uses the clock of its site, so that no request fails because of a wrong clock."""

import pytest

from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.wire.hop.headers import HOP_SECRET_ENV, tell_clock, told_clock
from tests.edge_router.fakes import router, sites

SECRET = "a secret of these tests"


@pytest.mark.parametrize(
    ("site_s", "is_ours"), [((3600.2, 3599.7), True), ((3600.0, 0.0), False), ((3600.0, 90.0), False)]
)
def test_a_router_whose_clock_differs_from_every_sites_says_so(
    site_s: tuple[float, float], is_ours: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = SiteClocks(("ams1", "iad1"), lambda: 1_000_000.0)
    for site, ahead_s in zip(("ams1", "iad1"), site_s, strict=True):
        if ahead_s:
            clocks.record(site, 1_000_000.0 + ahead_s)
            assert clocks.now_s(site) == pytest.approx(1_000_000.0 + ahead_s)
    said = [record.message for record in caplog.records if "own clock" in record.message]
    assert said == (["this router's own clock differs from every site's by 3600 s: set it"] if is_ours else [])


def test_a_site_that_is_not_known_has_this_routers_time() -> None:
    assert SiteClocks((), lambda: 5.0).now_s("nowhere") == 5.0


def test_the_time_comes_only_with_the_secret_and_only_in_answer_to_one_request() -> None:
    told = tell_clock(SECRET, 123_456.7, "ams1", "id")
    assert told_clock(told, SECRET, "ams1", "id") == 123_456.0
    for secret, site, request_id in (("another", "ams1", "id"), (SECRET, "iad1", "id"), (SECRET, "ams1", "other")):
        assert told_clock(told, secret, site, request_id) is None
    for damaged in ("", "x", "1", f"9{told}", told[:-1], "\u00b2" + told[1:], told + "\u00e9"):
        assert told_clock(damaged, SECRET, "ams1", "id") is None


@pytest.mark.process
@pytest.mark.parametrize("ahead_s", [-3600.0, 180.0])
async def test_a_site_with_another_clock_serves_and_the_log_says_by_how_much(
    ahead_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, SECRET)
    async with sites("ams1") as [site]:
        site.secret, site.clock_ahead_s = SECRET, ahead_s
        async with router([site]) as client:
            await client.until_states(ams1="healthy")
            async with client.chat() as answer:
                assert answer.status == 200
            site.clock_ahead_s = 0.0  # the clock was corrected
            await client.until(lambda: len(_said(caplog)) == 2)
            async with client.chat() as answer:
                assert answer.status == 200
    assert f"site ams1's clock is {abs(ahead_s):.0f} s" in _said(caplog)[0].replace("179", "180").replace(
        "3601", "3600"
    )


@pytest.mark.process
async def test_a_clock_that_is_set_between_two_probes_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, SECRET)
    async with sites("ams1") as [site]:
        site.secret = SECRET
        async with router([site], probe_interval_s=3600.0) as client:
            for ahead_s in (180.0, -3600.0):
                site.clock_ahead_s = ahead_s
                async with client.chat() as answer:
                    assert answer.status == 200


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "clock is" in record.message]
