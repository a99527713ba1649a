"""Meters of requests in a file: they survive a killed process, slots are reused, and foreign files are refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pilotlight.wire.hop.meters import OUTCOMES, REQUEST_AT, SITE_BYTES, SLOT_BYTES, MeterFile, MetersError
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest, UsageRecord

USE = ResourceUse(2**40, 5, 70_000, 3, 9, 4, 2**41)


def request(name: str = "1", **more: str) -> MeteredRequest:
    return MeteredRequest(
        **{"id": name, "request_id": "r", "account": "acme", "key": "ci", "model": "m", "started_s": 7.5, **more}
    )


KILLED = """
import os, signal, sys
from pathlib import Path
from pilotlight.wire.hop.meters import MeterFile
from pilotlight.wire.hop.usage_records import MeteredRequest
from pilotlight.wire.hop.usage import ResourceUse
meters = MeterFile(Path(sys.argv[1]), 16)
for name in ("open", "ended", "none"):
    meter = meters.begin(MeteredRequest(name, "r", "acme", "ci", "m", 7.5))
    meter.answered_by("ams1")
    if name != "none":
        meter.count(ResourceUse(2**40, 5, 70_000, 3, 9, 4, 2**41))
        meter.sends(700)
        meter.sends(77)
    if name == "ended":
        meters.end(meter.number, "cut", 9.25)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_what_was_counted_is_there_after_kill_9(tmp_path: Path) -> None:
    file = tmp_path / "meters"
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    meters = MeterFile(file, 16)
    found = {record.request.id: record for _, record in meters.left_behind()}
    assert (found["open"].use, found["open"].outcome, found["open"].site) == (USE, "recovered", "ams1")
    assert (found["ended"].use, found["ended"].outcome, found["ended"].ended_s) == (USE, "cut", 9.25)
    assert [found[name].bytes_out for name in ("open", "ended", "none")] == [777, 777, 0]
    assert found["none"].use == ResourceUse()
    assert found["open"].request == request("open")
    for number, _ in list(meters.left_behind()):
        meters.free(number)
    assert not [*meters.left_behind()]
    assert meters.num_used == 0
    meters.close()


def test_slots_are_used_again_and_begin_empty(tmp_path: Path) -> None:
    meters = MeterFile(tmp_path / "meters", 2)
    first, second = meters.begin(request("1")), meters.begin(request("2"))
    assert first is not None
    assert second is not None
    assert meters.begin(request("3")) is None
    first.count(USE)
    first.sends(5)
    first.answered_by("a-site-with-a-long-name" * 9)
    meters.free(first.number)
    third = meters.begin(request("3"))
    assert third is not None
    (record,) = [record for _, record in meters.left_behind() if record.request.id == "3"]
    assert (record.use, record.bytes_out, record.site) == (ResourceUse(), 0, "")
    meters.close()


@pytest.mark.parametrize("model", ["m" * 5000, "é" * 400, "\0" * 600, '"' * 600])
def test_a_name_that_is_too_long_is_shortened_and_spoils_no_neighbour(tmp_path: Path, model: str) -> None:
    meters = MeterFile(tmp_path / "meters", 3)
    for name, named in (("1", "before"), ("2", model), ("3", "behind")):
        assert meters.begin(request(name, model=named, account="a" * 63, key="k" * 63)) is not None
    found = {record.request.id: record.request for _, record in meters.left_behind()}
    assert (found["1"].model, found["3"].model) == ("before", "behind")
    assert len(found["2"].model) <= 200
    meters.close()


@pytest.mark.parametrize("text", ["\\", '"', "\1", "é", "m"])
def test_names_that_are_too_long_together_spoil_no_neighbour_that_is_in_progress(tmp_path: Path, text: str) -> None:
    meters = MeterFile(tmp_path / "meters", 2)
    first, second = meters.begin(request("1")), meters.begin(request("2"))
    assert first is not None
    assert second is not None
    second.count(USE)
    meters.free(first.number)
    long = {"model": text * 400, "adapter": text * 400, "request_id": "r" * 128, "account": "a" * 63, "key": "k" * 63}
    assert meters.begin(request("a-batchs-request-of-forty-characters.000", **long)) is not None
    (_, other), (_, neighbour) = meters.left_behind()
    assert (neighbour.request.id, neighbour.use) == ("2", USE)
    assert other.use == ResourceUse()
    meters.close()


def test_a_file_has_one_process_and_grows_but_never_shrinks(tmp_path: Path) -> None:
    file = tmp_path / "meters"
    meters = MeterFile(file, 4)
    with pytest.raises(MetersError, match="another running router"):
        MeterFile(file, 4)
    meters.begin(request())
    meters.close()
    for wanted, slots in ((2, 4), (8, 8)):
        again = MeterFile(file, wanted)
        assert (again.num_slots, again.num_used) == (slots, 1)
        assert file.stat().st_size == (slots + 1) * SLOT_BYTES
        assert file.stat().st_blocks * 512 >= file.stat().st_size, (
            "the blocks must be allocated before the disk can fill up"
        )
        again.close()


def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "meters"
    file.write_bytes(b"a letter to a friend")
    with pytest.raises(MetersError, match="not a file of meters"):
        MeterFile(file, 4)
    assert file.read_bytes() == b"a letter to a friend"
    file.write_bytes(b"")
    MeterFile(file, 4).close()
    assert len(os.listdir("/proc/self/fd")) < 200


def test_half_a_slot_is_no_record(tmp_path: Path) -> None:
    file = tmp_path / "meters"
    meters = MeterFile(file, 4)
    meter = meters.begin(request())
    assert meter is not None
    meters.close()
    with open(file, "r+b") as opened:
        opened.seek(meter.number * SLOT_BYTES + 128)
        opened.write(b"\xff" * 10)
    again = MeterFile(file, 4)
    assert not [*again.left_behind()]
    assert again.num_used == 0
    again.close()


def test_all_counts_are_read_as_they_were_written_whatever_the_outcome(tmp_path: Path) -> None:
    meters = MeterFile(tmp_path / "meters", len(OUTCOMES) + 1)
    expected = []
    for number, outcome in enumerate((*OUTCOMES, None), 1):
        asked = request(f"{number}", function="f" * number, adapter="a")
        meter = meters.begin(asked)
        assert meter is not None
        use = ResourceUse(*range(number, number + 7))
        for _ in range(2):
            meter.answered_by("before")
            meter.answered_by(site := "s" * (SITE_BYTES - 1 + number % 2))
        meter.count(ResourceUse(*[2**60] * 7))
        meter.count(use)
        for part in (number, 100):
            meter.sends(part)
            meter.computes(3 * part)
        assert (meter.number, meter.use, meter.site, meter.bytes_out, meter.cpu_us) == (
            number, use, site, number + 100, 3 * number + 300,
        )  # fmt: skip
        if outcome is not None:
            meters.end(meter.number, outcome, 100.25 + number)
        ended_s = asked.started_s if outcome is None else 100.25 + number
        told = UsageRecord(asked, site, ended_s, outcome or "recovered", use, number + 100, cpu_us=3 * number + 300)
        expected.append((number, told))
    assert meters.begin(request()) is None
    assert meters.num_used == meters.num_slots == len(OUTCOMES) + 1
    assert [*meters.left_behind()] == expected
    meters.end(1, OUTCOMES[0], -5.0)  # with a clock that is before the epoch
    assert next(meters.left_behind())[1].ended_s == 0.0
    meters.free(2)
    assert [number for number, _ in meters.left_behind()] == [1, *range(3, len(OUTCOMES) + 2)]
    again = meters.begin(request("again"))
    assert again is not None
    assert again.number == 2
    assert [record for number, record in meters.left_behind() if number == 2] == [
        UsageRecord(request("again"), "", 7.5, "recovered", ResourceUse())
    ]
    meters.close()


@pytest.mark.parametrize("more", [{"adapter": "a" * 2000}, {"request_id": "r" * 2000}])
def test_a_model_is_priced_by_its_own_name_however_long_what_stands_beside_it_is(
    tmp_path: Path, more: dict[str, str]
) -> None:
    meters = MeterFile(tmp_path / "meters", 1)
    meter = meters.begin(request(model="llama-8b", **more))
    assert meter is not None
    ((_, found),) = meters.left_behind()
    assert (found.request.model, found.request.adapter) == ("llama-8b", more.get("adapter", "")[:100])
    meters.close()


@pytest.mark.parametrize("longer", [0, 1])
def test_a_request_that_fills_its_slot_is_kept_whole_and_a_longer_one_by_its_beginning(
    tmp_path: Path, longer: int
) -> None:
    most = SLOT_BYTES - 64 - REQUEST_AT
    plain = len(msgspec.json.encode(request(model="")))
    asked = request(model="m" * (most - plain + longer))
    meters = MeterFile(tmp_path / "meters", 1)
    meter = meters.begin(asked)
    assert meter is not None
    meter.count(USE)
    ((_, found),) = meters.left_behind()
    assert found.use == USE
    assert found.request.model == ("m" * 200 if longer else asked.model)
    assert msgspec.structs.replace(found.request, model="") == msgspec.structs.replace(asked, model="")
    meters.close()
