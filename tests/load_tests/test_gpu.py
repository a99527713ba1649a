"""The commands for a GPU machine: they run on a CPU with --rehearse, and need no package that such a machine lacks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from load_tests import ceilings, gpu
from load_tests.scenarios import engine

pytestmark = pytest.mark.process

LACKING = {
    "msgspec", "zmq", "starlette", "hypercorn", "orjson", "pydantic", "rich", "typer", "aiohttp",
    "huggingface_hub", "transformers",
}  # fmt: skip


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest runs within a test load no installed plugins, which saves a second."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_nothing_is_needed_that_a_bare_machine_lacks() -> None:
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(LACKING)}))\n"  # makes each import of them fail
        f"import {', '.join(['load_tests.gpu', *gpu.BENCHES])}"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=gpu.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("no_plugins")
def test_the_check_counts_tests_by_file_and_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.check("cpu", ["tests/kernels/elementwise/test_norm.py"], [], 600.0) == 0
    (record,) = tmp_path.glob("*-check.json")
    (counts,) = json.loads(record.read_text())["results"]["files"].values()
    assert counts["passed"] > 0
    assert counts["failed"] == 0
    assert f"{counts['passed']} passed, 0 failed" in capfd.readouterr().out


@pytest.mark.usefixtures("no_plugins")
def test_a_check_leaves_out_what_is_marked_for_a_cpu_alone(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\ndef test_one(): pass\n@pytest.mark.cpu_only\ndef test_other(): assert False\n"
    )
    status, counts = gpu.run_suite(str(tmp_path), "cpu", [], 60)
    assert status == 0
    assert [row["passed"] + row["failed"] for row in counts.values()] == [1]


@pytest.mark.usefixtures("no_plugins")
def test_a_test_that_breaks_the_device_is_named_and_those_after_it_get_another_process(tmp_path: Path) -> None:
    """CUDA reports a failed assertion after the call, and then for the rest of the process.

    A fake of torch imitates this here.
    """
    (tmp_path / "conftest.py").write_text(
        "import pytest, sys, types\nfrom tests.conftest import pytest_runtest_teardown\nfailed = []\n"
        "def synchronize():\n    if failed: raise RuntimeError('device-side assert triggered')\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=synchronize))\n"
        "@pytest.fixture\ndef device(): return failed\n"
    )
    tests = [
        f"def test_{i}(device):\n    assert not device\n    {'device.append(1)' if i == 3 else ''}\n" for i in range(8)
    ]
    (tmp_path / "test_all.py").write_text("".join(tests))
    xdist = ["-p", "xdist", "-n", "1", "--dist", "worksteal"]
    _, counts = gpu.run_suite(str(tmp_path), "cuda", xdist, 60)
    assert sum(row["failed"] for row in counts.values()) == 1
    assert sum(row["passed"] for row in counts.values()) >= 7
    assert ["test_3" in name for row in counts.values() for name in row["failures"]] == [True]


def test_a_check_that_hangs_ends(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert gpu.check("cpu", ["tests/kernels/elementwise/test_norm.py"], [], 0.1) == gpu.TOO_LATE
    assert "did not end" in capfd.readouterr().out


def test_failures_are_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="one" time="0.5"/><testcase classname="a" name="two"><failure/></testcase>'
        '<testcase classname="a" name="three"><skipped/></testcase><testcase classname="b" name="four"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    counts = gpu.by_file(report)
    assert counts["a"] == {"passed": 1, "failed": 1, "skipped": 1, "seconds": 0.5, "failures": ["two"]}
    assert counts["b"]["failures"] == ["four"]


def test_a_test_file_is_left_out_by_name_for_what_it_imports_anywhere(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "helper.py").write_text("import missing.part\n")
    (tmp_path / "tests" / "test_far.py").write_text("from tests.helper import something\n")
    (tmp_path / "tests" / "test_near.py").write_text("import torch\n")
    assert gpu.unimportable(["tests"], tmp_path) == {"tests/test_far.py": ["missing"]}


def test_a_test_that_waits_needs_the_plugin_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text("import torch\nasync def test_it(): ...\n")
    assert gpu.imports(tmp_path / "test_waits.py", tmp_path, set()) == {"torch", "pytest_asyncio"}


def test_what_takes_too_long_may_write_what_it_has_before_it_ends(tmp_path: Path) -> None:
    script = f"trap 'echo so far > {tmp_path / 'said'}; exit' INT; sleep 60 & wait"
    assert gpu.run_within(["sh", "-c", script], 6.0) == gpu.TOO_LATE
    assert (tmp_path / "said").read_text() == "so far\n"


def test_a_bench_that_fails_or_hangs_takes_no_other_along() -> None:
    ran: list[str] = []

    def run(command: list[str], limit_s: float) -> int:
        ran.append(command[2])
        return {"fails": 1, "dies": -11, "slow": gpu.TOO_LATE}.get(command[2], 0)

    assert gpu.bench(True, dict.fromkeys(("fails", "slow", "fine", "dies"), 1.0), run) == gpu.TOO_LATE
    assert ran == ["fails", "slow", "fine", "dies"]
    assert gpu.bench(True, {"fine": 1.0}, run) == 0
    assert gpu.bench(True, {"dies": 1.0}, run) == 11


@pytest.mark.long
def test_the_engines_rehearsal_measures_decode_and_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark runs in this process, with small ceilings to save time."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setitem(ceilings.BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(ceilings.MATMULS, "cpu", [(64, 64, 64)])
    assert engine.main(["--rehearse"]) == 0
    (record,) = tmp_path.glob("*-engine-tiny.json")
    results = json.loads(record.read_text())["results"]
    assert [row["batch"] for row in results["decode"]] == [1, 4]
    assert [row["tokens"] for row in results["prefill"]] == [64, 256]
    assert all(row["step_ms"] > 0 for row in (*results["decode"], *results["prefill"]))
    assert all(row["served"]["tokens_per_s"] > 0 for row in results["decode"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rehearsals_of_tuning_of_the_engine_and_of_a_models_life_leave_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.bench(True, {f"load_tests.scenarios.{name}": 300.0 for name in ("tune", "engine", "gpu_serving")}) == 0
    assert [*tmp_path.glob("*-engine-tiny.json")]
    (tuned,), (life,) = tmp_path.glob("*-tuned-tiny.json"), tmp_path.glob("*-gpu-serving-50m.json")
    assert [row["tokens"] for row in json.loads(tuned.read_text())["results"]["rows"]][:1] == [1]
    rows = json.loads(life.read_text())["results"]["rows"]
    assert len(rows) == 7
    assert not [row for row in rows.values() if "failure" in row]
    prefix = rows["a prefix out of host memory"]
    assert prefix["computed"]["cached_prompt_tokens"] < prefix["restored"]["cached_prompt_tokens"]
