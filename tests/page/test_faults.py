"""The page's list of faults: which changes of a site count as one, and when they end."""

from msgspec.structs import replace

from pilotlight.page.faults import KEPT_S, Faults, SiteFault
from pilotlight.wire.hop.status import ModelStatus, ProcessStatus
from tests.page.fakes import row

AMS = row("ams1", models=(), uptime_s=100.0)


def test_a_site_that_was_unhealthy_for_a_while_is_one_fault_with_its_end() -> None:
    faults = Faults()
    faults.note(1.0, [AMS])
    for at_s in (2.0, 3.0):
        faults.note(at_s, [replace(AMS, state="unhealthy", detail="connection refused")])
    assert faults.newest(3.0) == [SiteFault(2.0, "ams1", "cannot be reached or is not ready", "connection refused")]
    faults.note(5.0, [replace(AMS, state="draining")])
    assert [fault.until_s for fault in faults.newest(5.0)] == [5.0]
    assert faults.newest(5.0 + KEPT_S) == []


def test_a_model_that_failed_an_engine_host_that_was_replaced_and_a_restart_are_faults() -> None:
    faults = Faults()
    engine = ProcessStatus("engine", 7, device="cpu")
    failed = ModelStatus("big", "failed", detail="no room")
    faults.note(1.0, [replace(AMS, processes=(engine,))])
    faults.note(2.0, [replace(AMS, processes=(replace(engine, pid=8),), models=(failed,))])
    faults.note(3.0, [replace(AMS, processes=(replace(engine, pid=9),), uptime_s=0.0)])
    said = [(fault.what, fault.cause) for fault in faults.newest(3.0)]
    assert said == [
        ("was restarted", ""),
        ("the engine host on cpu was replaced", "process 7 ended"),
        ("big could not be loaded", "no room"),
    ]


def test_what_stays_as_it_is_is_no_fault() -> None:
    faults = Faults()
    for at_s in range(5):
        faults.note(float(at_s), [replace(AMS, inflight=at_s)])
    assert faults.newest(5.0) == []
