"""Usage of functions: each record goes to one ledger and survives SIGKILL; without a ledger nothing is recorded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.functions.bindings.usage import BATCH, CPU_RECORD_S, GONE_S, FunctionUsage
from pilotlight.functions.channel.failure import Failure
from pilotlight.runtime.generation.inference import SiteInference
from pilotlight.sites.config import ConfigError
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import UsageAsked, UsageRecord
from tests.clock import Clock
from tests.functions.bindings.conftest import Wire
from tests.runtime.conftest import Site, make_site, model_directory, site  # noqa: F401 - fixtures

MODEL = "@test/tiny"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


def usage(directory: Path, clock: Clock | None = None) -> FunctionUsage:
    return FunctionUsage(directory, "ams1", {"hello": "acme"}.__getitem__, clock or Clock(1000.0))


def opened(directory: Path, clock: Clock | None = None) -> FunctionUsage:
    kept = usage(directory, clock)
    assert told(kept, "first") == []
    return kept


def told(kept: FunctionUsage, ledger: str, *written: str) -> list[UsageRecord]:
    return [*kept.hand_out(UsageAsked(ledger, written)).records]


def use(kept: FunctionUsage, tokens: int) -> None:
    meter = kept.begin("hello", "m", "french", bytes_in=9)
    assert meter is not None
    meter.count(ResourceUse(3, 0, tokens))
    meter.sends(70)
    kept.end(meter, "complete")


def test_nothing_is_kept_before_a_ledger_has_asked(tmp_path: Path) -> None:
    kept = usage(tmp_path)
    assert kept.begin("hello", "m") is None
    kept.computed("hello", 1.0)
    assert not [*tmp_path.iterdir()]
    assert told(kept, "one") == []
    assert kept.begin("hello", "m") is not None
    kept.close()


def test_a_record_is_reported_until_it_is_written_and_no_longer(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    use(kept, 5)
    (record,) = told(kept, "one")
    assert (record.request.account, record.request.function, record.request.model) == ("acme", "hello", "m")
    assert (record.request.adapter, record.request.bytes_in, record.bytes_out) == ("french", 9, 70)
    assert (record.site, record.outcome, record.use.output) == ("ams1", "complete", 5)
    assert told(kept, "one") == [record], "repeated until the ledger confirms it"
    assert told(kept, "one", record.request.id) == []
    kept.close()
    assert told(usage(tmp_path), "one") == []


def test_what_one_ledger_was_handed_no_other_gets_but_when_it_is_gone(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    kept = opened(tmp_path, clock)
    use(kept, 5)
    (record,) = told(kept, "one")
    assert told(kept, "two") == []
    kept.close()
    again = usage(tmp_path, clock)  # a restarted process keeps the records for ledger "one"
    assert told(again, "two") == []
    clock.now += GONE_S - 1
    assert told(again, "two") == []
    assert told(again, "one") == [record]
    clock.now += GONE_S - 1
    assert told(again, "two") == [], "the first ledger has polled meanwhile"
    clock.now += 1
    assert told(again, "two") == [record]
    assert told(again, "two", record.request.id) == []
    again.close()


def test_more_than_one_answer_holds_comes_in_several(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    for number in range(BATCH + 7):
        use(kept, number + 1)
    first = told(kept, "one")
    second = told(kept, "one", *(record.request.id for record in first))
    assert (len(first), len(second)) == (BATCH, 7)
    assert len({record.request.id for record in first + second}) == BATCH + 7
    kept.close()


def test_models_refuse_functions_while_nothing_can_be_written_down(tmp_path: Path) -> None:
    kept = FunctionUsage(tmp_path, "ams1", lambda function: "acme", Clock(1000.0), max_unwritten=2)
    told(kept, "one")
    use(kept, 1)
    use(kept, 1)
    with pytest.raises(ApiError, match="cannot be recorded") as refused:
        kept.begin("hello", "m")
    assert refused.value.word == "overloaded"
    kept.computed("hello", 1.0)  # ignored, because no ledger has polled
    told(kept, "one", *(record.request.id for record in told(kept, "one")))
    assert kept.begin("hello", "m") is not None
    kept.close()


def test_processor_time_is_a_record_for_every_ten_seconds_of_use(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    kept = opened(tmp_path, clock)
    for _ in range(4):
        kept.computed("hello", 0.25)
    assert told(kept, "one") == []
    clock.now += CPU_RECORD_S
    (record,) = told(kept, "one")
    assert (record.cpu_us, record.request.function, record.request.model) == (1_000_000, "hello", "")
    kept.computed("hello", 0.5)
    kept.close()
    again = usage(tmp_path, clock)
    assert sorted(record.cpu_us for record in told(again, "one")) == [500_000, 1_000_000]
    again.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from pilotlight.functions.bindings.usage import FunctionUsage
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import UsageAsked
usage = FunctionUsage(Path(sys.argv[1]), "ams1", lambda function: "acme")
usage.hand_out(UsageAsked("one"))
meter = usage.begin("hello", "m")
meter.count(ResourceUse(3, 0, 41))
meter.count(ResourceUse(3, 0, 42))
usage.begin("hello", "nothing came of it")
usage.computed("hello", 0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_usage_at_a_sites_death_is_reported_by_the_next_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    kept = usage(tmp_path)
    records = told(kept, "one")
    assert sorted((each.use.output, each.cpu_us, each.outcome) for each in records) == [
        (0, 500_000, "recovered"),
        (42, 0, "recovered"),
    ]
    assert told(kept, "one", *(record.request.id for record in records)) == []
    kept.close()


def test_a_file_that_cannot_be_used_stops_the_start_by_its_reason(tmp_path: Path) -> None:
    (tmp_path / "function-usage").mkdir()
    with pytest.raises(ConfigError, match=r"usage of functions cannot be counted in .*function-usage"):
        FunctionUsage(tmp_path, "ams1", lambda function: "acme")


def test_an_end_that_is_no_longer_counted_is_no_fault(tmp_path: Path) -> None:
    usage = FunctionUsage(tmp_path, "ams1", lambda function: "acme")
    usage.hand_out(UsageAsked("ledger", ()))
    meter = usage.begin("hello", "m")
    usage.close()
    usage.end(meter, "complete")
    usage.end(None, "complete")
    assert usage.begin("hello", "m") is None


async def test_a_functions_calls_are_counted_whole_streamed_and_refused(site: Site, wire: Wire, tmp_path: Path) -> None:  # noqa: F811
    kept = opened(tmp_path / "usage")
    made = await wire(("ai", "AI", {}), inference=SiteInference(site.app.site), usage=kept, function="hello")
    ai = made.env["AI"]
    await ai.run(MODEL, ASKED)
    await (await ai.run(MODEL, {**ASKED, "stream": True})).text()
    with pytest.raises(Failure):
        await ai.run("@cf/nope", ASKED)
    records = told(kept, "one")
    assert [(record.use.output, record.outcome) for record in records] == [(13, "complete"), (13, "complete")]
    assert all(record.use.prompt and record.request.bytes_in and record.bytes_out for record in records)
    assert {record.request.account for record in records} == {"acme"}
    kept.close()


async def test_a_stream_that_its_function_leaves_counts_what_was_generated(
    site: Site,  # noqa: F811
    wire: Wire,
    tmp_path: Path,
) -> None:
    kept = opened(tmp_path / "usage")
    made = await wire(("ai", "AI", {}), inference=SiteInference(site.app.site), usage=kept, function="hello")
    stream = await made.env["AI"].run(MODEL, {**ASKED, "stream": True})
    await anext(aiter(stream))
    await stream.cancel()
    await site.is_idle()
    (record,) = told(kept, "one")
    assert record.outcome in ("cut", "complete")
    assert 1 <= record.use.output <= 13
    kept.close()


async def test_a_batchs_requests_are_counted_each(site: Site, wire: Wire, tmp_path: Path) -> None:  # noqa: F811
    kept = opened(tmp_path / "usage")
    made = await wire(("ai", "AI", {}), inference=SiteInference(site.app.site), usage=kept, function="hello")
    queued = await made.env["AI"].run(MODEL, {"requests": [ASKED, ASKED]}, {"queueRequest": True})
    while (await made.env["AI"].run(MODEL, {"request_id": queued["request_id"]}))["status"] != "complete":
        pass
    assert [record.use.output for record in told(kept, "one")] == [13, 13]
    kept.close()
