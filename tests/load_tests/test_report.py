"""README, docs and plots match the records of measurements. A region without a record has a note, or the reason why its record is refused."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from load_tests import report
from load_tests.bars import Group, draw
from load_tests.records import RESULTS, doubt, history
from load_tests.report import (
    DRAFTS_PLOT,
    MEASURED_PAGES,
    MEASUREMENTS,
    NOTHING,
    PAGES,
    PLOT,
    REGIONS,
    STALE,
    marks,
    measurements_regions,
    newest,
    plot,
    readme_regions,
    redrawn,
    trusted,
    undated,
)
from load_tests.scenarios.functions_neighbours import summary
from load_tests.tables import shipping, speculation
from load_tests.tables.functions import neighbours


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_in_step_with_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    drawn = redrawn(text, PAGES[page](newest(RESULTS)))
    assert undated(text) == undated(drawn), f"{page.name} is stale: run make report"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_table_of_figures_but_from_records(page: Path) -> None:
    """Right-aligned columns mark tables of measurements, which only `make report` writes."""
    by_hand = page.read_text(encoding="utf-8")
    for region in PAGES[page]({}):
        begin, end = marks(region)
        by_hand = by_hand.split(begin)[0] + by_hand.split(end)[1]
    assert "--:" not in by_hand


def test_the_plot_is_in_step_with_the_records() -> None:
    records = trusted(newest(RESULTS))
    assert (RESULTS / PLOT).read_text(encoding="utf-8") == plot(records), "the plot is stale: run make report"
    if "speculation" in records:
        drawn = speculation.rates(records["speculation"]["results"])
        assert (RESULTS / DRAFTS_PLOT).read_text(encoding="utf-8") == drawn, "the plot is stale: run make report"


def test_installations_rotations_and_backups_are_shown_as_they_were_recorded() -> None:
    found = {"python": "3.14.0", "install_s": 9.5, "mib": 100, "chat_s": None, "function_s": 1.5}
    assert list(shipping.bare_machines({"sid, wheel": found}))[1] == ["sid, wheel", "3.14.0", "9.5", "100", "", "1.5"]
    phases = {"streams": 64, "rotation": {"all replaced": {"streams": 1000, "refused": 2}}}
    assert list(shipping.maintenance(phases))[1] == ["all replaced", "1,000", "0", "0", "0", "2", "0"]
    kinds = {"acknowledged_before_the_mark": {"d1": 5, "ledger": 7}, "missing": {"d1": 1, "ledger": 0}}
    rows = list(shipping.backup({"writes_per_s": 101.5, "torn": ["a"], "twice_in_the_ledger": [], **kinds}))
    assert rows[1:] == [["d1", "5", "1", ""], ["ledger", "7", "0", ""], ["all", "12", "1", "1"]]


def test_drafts_are_shown_by_workload_by_kind_and_by_what_steps_took() -> None:
    ratio = {"median": 1.5, "min": 1.25, "max": 2.0, "n": 4}
    found = {
        "workloads": {"copying, batch 1": {"decode_ratio": ratio}},
        "drafters": {
            "copying, batch 1": {
                "kinds": {"suffix 4": {"checked": 40, "rate": 0.75}, "grammar": {"checked": 2, "rate": 1.0}},
                "acceptance_length": 2.5,
            }
        },
        "steps": {"copying, batch 1": {"3": {"predicted_ms": {"median": 1.0}, "actual_ms": {"median": 1.25, "n": 9}}}},
        "mixed": {"64 streams": {"answer_ratio": ratio}},
        "replay": {"shape": "tiny", "batch 1, each right with 0.6": {"decode_ratio": ratio, "acceptance_length": 2.0}},
    }
    _, copying, streams, replayed = speculation.workloads(found)
    assert copying == ["copying, batch 1", "1.50", "1.25 to 2.00", "4", "2.50"]
    assert streams == ["64 streams", "1.50", "1.25 to 2.00", "4", ""]
    assert replayed[0] == "tiny shape, batch 1, each right with 0.6"
    assert list(speculation.steps(found))[1] == ["copying, batch 1: 3", "1.00", "1.25", "9"]
    assert "75%" in speculation.rates(found)
    assert "grammar" not in speculation.rates(found), "two drafts are too few for a rate"


def test_every_region_has_its_page() -> None:
    assert {name for regions in MEASURED_PAGES.values() for name in regions} == {*REGIONS, "plot", "drafts-plot"}
    assert {path.stem for path in MEASUREMENTS.glob("*.md")} == set(MEASURED_PAGES)


@pytest.mark.parametrize("made", ["0123456789ab+", "unknown", "0123456789ab"])
def test_a_record_of_an_unavailable_commit_is_refused(made: str) -> None:
    refused = {**record("site-death", {}), "commit": made}
    assert doubt(refused, frozenset()) is not None
    assert doubt({**refused, "commit": "0123456789ab"}, frozenset({"0123456789ab"})) is None
    text = rewritten(empty(), {"site-death": {**refused, "commit": f"{made.rstrip('+')}+"}})
    assert "Not shown" in text
    assert text.count(NOTHING) == len(REGIONS) - 1


def test_a_clean_record_counts_before_a_newer_one_of_a_changed_tree(tmp_path: Path) -> None:
    for name, date, made in (("a", "2026-03-01T10:00:00+00:00", "abc"), ("b", "2026-03-02T10:00:00+00:00", "abd+")):
        made_record = {**record("kernels", {"name": name}, date), "commit": made}
        (tmp_path / f"{name}.json").write_text(json.dumps(made_record))
    assert newest(tmp_path)["kernels"]["results"] == {"name": "a"}


def test_a_record_that_is_older_than_its_code_is_marked() -> None:
    made = {"step-cost": record("site-death", {})}
    assert STALE not in report.heading(made["step-cost"], REGIONS["site-death"]), "git does not know the commit"
    marked = report.heading(made["step-cost"], REGIONS["site-death"], lambda made, paths: True)
    assert STALE in marked
    assert undated(marked) == [marked.replace(STALE, "")]


@pytest.fixture(autouse=True)
def history_that_cannot_be_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave git without a repository, because the made-up commits of test records are in no history; tests of real pages keep it."""
    if "page" in request.fixturenames or "in_step" in request.node.name:
        yield
        return
    with monkeypatch.context() as without_git:
        without_git.setenv("GIT_DIR", os.devnull)
        history.cache_clear()
        yield
    history.cache_clear()


def empty() -> str:
    return "before\n" + "".join("".join(marks(region)) for region in [*REGIONS, "plot", "drafts-plot"]) + "after\n"


def rewritten(text: str, records: dict[str, Any]) -> str:
    return redrawn(text, measurements_regions(records))


def record(subject: str, results: dict[str, Any], date: str = "2026-01-02T00:00:00+00:00") -> dict[str, Any]:
    machine = {"processor": "Abacus", "cores": 3, "accelerator": None}
    return {
        "subject": subject,
        "date": date,
        "commit": "abc",
        "machine": machine,
        "versions": {"torch": "9"},
        "results": results,
    }


def test_without_records_every_region_says_so_and_the_rest_stays() -> None:
    text = rewritten(empty(), {})
    assert text.count(NOTHING) == len(REGIONS)  # plots without bars have no note
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert rewritten(text, {}) == text


def test_the_newest_record_of_a_subject_counts(tmp_path: Path) -> None:
    for name, date in (("b", "2026-03-01T10:00:00+00:00"), ("a", "2026-03-02T09:00:00+00:00")):
        (tmp_path / f"{name}.json").write_text(json.dumps(record("kernels", {"name": name}, date)))
    assert newest(tmp_path)["kernels"]["results"] == {"name": "a"}


def test_engines_are_shown_on_each_kind_of_cpu(tmp_path: Path) -> None:
    for day, flags in enumerate((["avx2", "amx_bf16"], ["avx2"], ["avx2"]), 1):
        made = record("engines", {"batch": day}, f"2026-03-0{day}T00:00:00+00:00")
        made["machine"] = {**made["machine"], "flags": flags}
        (tmp_path / f"{day}.json").write_text(json.dumps(made))
    found = newest(tmp_path)
    shown = [found["engines"], *found["engines"]["others"]]
    assert [one["date"][:10] for one in shown] == ["2026-03-03", "2026-03-01"]
    region = REGIONS["engines"]._replace(rows=lambda results: [["batch"], [str(results["batch"])]])
    text = report.drawn({"engines": region}, found)["engines"]
    assert text.index("Abacus with AVX2, no GPU; 2026-03-03") < text.index("with AMX, no GPU; 2026-03-01")
    assert text.count("| batch |") == 2


def test_a_record_with_limited_kernels_follows_older_ones_without(tmp_path: Path) -> None:
    for day, limit in enumerate(({}, {"forced": "avx2"}), 1):
        made = record("engines", {"batch": day}, f"2026-03-0{day}T00:00:00+00:00")
        made["machine"] = {**made["machine"], "flags": ["avx2", "avx512f"], **limit}
        (tmp_path / f"{day}.json").write_text(json.dumps(made))
    found = newest(tmp_path)["engines"]
    assert [one["results"]["batch"] for one in (found, *found["others"])] == [1, 2]
    assert "with AVX-512, limited to avx2, no GPU" in report.heading(found["others"][0], REGIONS["engines"])


@pytest.mark.parametrize("subject", sorted([*REGIONS, "plot"]))
def test_a_lost_mark_is_an_error(subject: str) -> None:
    begin, end = marks(subject)
    for text in (empty().replace(begin, ""), empty().replace(end, ""), empty() + begin + end):
        with pytest.raises(ValueError, match=subject):
            rewritten(text, {})


def test_headlines_are_drawn_from_the_records_that_exist() -> None:
    row = {"task": "1 stream", "router": "pilotlight", "added_first_p50_ms": {"median": 1.1}}
    one = {**row, "router": "vllm-router", "added_first_p50_ms": {"median": 0.5}}
    many = [{"task": "requests, 64 connections", "router": "pilotlight", "rate": 4000.0}]
    killed = {"kill": {"lost": 1, "streams": 64, "pause_ms": {"p50": 241.6}}}
    measured = {
        "router-overhead": record("router-overhead", {"rows": [row, one, *many]}),
        "site-death": record("site-death", killed),
    }
    drawn = readme_regions(measured)
    assert drawn["headlines"].splitlines()[2:] == [
        "| added by the router to a first token, median | 1.10 ms | vllm-router 0.50 ms | 3 cores, Abacus | 2026-01-02, abc |",
        "| requests/s through the router, 64 connections | 4,000 |  | 3 cores, Abacus | 2026-01-02, abc |",
    ]
    assert "1 of 64 lost, 242 ms pause" in " ".join(drawn["why"].split())
    assert readme_regions({})["headlines"] == NOTHING
    assert "lost" not in readme_regions({})["why"], "a figure needs its record"


def test_a_requests_path_is_shown_by_package_and_process() -> None:
    def tree(commit: str, site: str) -> dict[str, Any]:
        process = {"module": site, "files": {}, "tasks": ["Exchange._run (new)", "Pump._collect (new)"]}
        packages = {"wire": {"files": 1, "functions": 2}}
        found = {"packages": packages, "processes": [process], "callbacks_on_path": ["a.py:1 b in c"]}
        return {"commit": commit, "files": 1, "functions": 2, **found}

    made = record("request-path", {"trees": [tree("old", "runtime"), tree("new", "pilotlight.runtime.serve")]})
    text = rewritten(empty(), {"request-path": made})
    assert "| `wire/` | 1, 2 | 1, 2 |" in text
    assert "| asyncio tasks of the site | 2 | 2 |" in text
    assert "| callbacks assigned after construction | 1 | 1 |" in text


def stretch(p99: float, lost: int = 0) -> dict[str, Any]:
    return {"latency_ms": {"p99": p99, "max": 2 * p99}, "client_waited_ms": 0.0, "lost": lost}


def test_a_neighbours_ratio_is_the_median_of_stretches_side_by_side() -> None:
    pairs = ((1.0, 3.0), (2.0, 2.2), (1.5, 2.4))  # the ratio of the medians would be 2.4 / 1.5
    rounds = [
        {"quiet": stretch(quiet), "beside": stretch(beside, lost=1), "ratio": round(beside / quiet, 2)}
        for quiet, beside in pairs
    ]
    row = summary("loops", rounds)
    assert (row["quiet_p99_ms"], row["beside_p99_ms"], row["ratio"], row["lost"]) == (1.5, 2.4, 1.6, 3)
    results = {"requests_per_s": 100.0, "rows": [row]}
    shown = list(neighbours({"targets": {"p99 beside hostile": 2.0}, "hostile": results}))
    assert shown[1] == ["loops", "1.50", "2.40", "1.60 (3.00, 1.10, 1.60)", "3", "2"]


def measured_kernels() -> dict[str, Any]:
    row = {
        "operation": "rms_norm", "case": "64 x 4096", "predicted_us": 5.0, "bound": "memory", "gb_per_s": 1234.0, "tflop_per_s": 0.0,
        "share_of_floor": 0.5, "share_reached": 0.5, "met": False, "target": {"share": 0.85, "of": "copy", "us": 0.0},
        "forms": {"pilotlight": {"us": 10.0}, "torch": {"us": 20.0}}, "absent": {"other": "no such operator"},
    }  # fmt: skip
    return record(
        "kernels",
        {"rows": [row, {"operation": "gemm", "case": "8 x 8", "failure": "WRONG: result 0 is 1e+03 roundings off"}]},
    )


def test_a_kernel_is_shown_with_its_prediction_its_rivals_and_its_target() -> None:
    text = rewritten(empty(), {"kernels": measured_kernels()})
    assert (
        "| rms_norm, 64 x 4096 | 10.0 | 5.0 | 1,234 GB/s | 50% | 50% of 85% copy: missed | torch 20.0, other: not here |"
        in text
    )
    assert "| gemm, 8 x 8 | WRONG: result 0 is 1e+03 roundings off |" in text
    assert "3 cores, Abacus, no GPU; 2026-01-02, commit abc, torch 9:" in text


def test_the_engine_on_a_gpu_is_shown_with_and_without_graphs() -> None:
    decode = {
        "batch": 8,
        "step_ms": 4.0,
        "tokens_per_s": 2000.0,
        "share_of_bandwidth": 0.83,
        "served": {"step_ms": 4.2, "idle_share": 0.04, "tokens_per_s": 1900.0},
        "served_without_graphs": {"step_ms": 9.5},
    }
    prefill = {"tokens": 2048, "step_ms": 50.0, "tokens_per_s": 40960.0, "mfu": 0.55}
    made = record("engine-8b", {"shape": "8b", "dtype": "bfloat16", "decode": [decode], "prefill": [prefill]})
    text = rewritten(empty(), {"engine-8b": made})
    assert "| decode, batch 8 | 4.00 | 2,000 | 83% | 4.20 | 9.50 | 4% |" in text
    assert "| prefill, 2,048 tokens | 50.00 | 40,960 | 55% |  |  |  |" in text
    assert re.search(r"\| this engine \| 8 \| [\d,]+ \| 1,900 \| 0\.\d\d \|", text), (
        "the table has measured and predicted figures"
    )


def test_the_plot_has_a_bar_for_every_share_and_leaves_out_what_failed() -> None:
    drawn = plot({"kernels": measured_kernels()})
    assert drawn.count("<rect") == 2 + 2 + 1  # two bars, two legend entries, the background
    assert "gemm" not in drawn
    assert "50%" in drawn


def test_labels_cannot_break_the_plot() -> None:
    assert "a &lt;b&gt; &amp; c" in draw("title", [Group("a <b> & c", {"x": 2.0})])
