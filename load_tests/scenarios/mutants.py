"""The share of small faults in the product that its tests notice.

`make mutants` runs python -m load_tests.scenarios.mutants --number 300 --seed 1.

Mutants (load_tests/mutation.py) are drawn by the seed: a package by its risk, then a place in it. The tests that judge a mutant are part of `make
test`, run its line, and come from files that name its module or are in the corresponding folder of tests/. So the share of noticed mutants is a lower
bound for the whole suite. A mutant is noticed at the first failure, or if its tests take too long. All work is done in a copy of the tree. `--state
FOLDER` keeps the results: the same command continues after an interruption.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from load_tests.house import ROOT, House, Module
from load_tests.mutation import Mutant, compiles, mutants_of
from load_tests.records import write_record

# Weights by the cost of a fault: tokens, money and isolation rank above the display of a process's state.
RISK = {
    "edge_router": 4, "runtime": 4, "engine": 4, "wire": 3, "functions": 3, "dialects": 2, "response_store": 2, "kernels": 1, "sites": 1,
    "support": 1, "page": 1,
}  # fmt: skip
# Code that these tests cannot reach: a GPU's kernels, and modules that run in a function's process.
OUT_OF_REACH = ("kernels/triton/", "functions/sdk/", "functions/host/isolates/")
MOST_TESTS = 60  # most tests per mutant; tests of different functions come first
COVER_S = 600.0
Outcome = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--state", type=Path, default=Path(".mutants"), help="the folder that keeps the results")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes, with a record of the judged mutants")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    stops_at = time.monotonic() + (options.minutes or 1e6) * 60
    bench = Bench(options.state.resolve())
    found: dict[str, Outcome] = json.loads(bench.results.read_text()) if bench.results.exists() else {}
    for module, mutant in draw(House(bench.tree), options.number, options.seed):
        key = f"{module.file}:{mutant.line}:{mutant.start} {mutant.kind}"
        if key not in found and time.monotonic() < stops_at:
            found[key] = bench.judge(module, mutant)
            bench.results.write_text(json.dumps(found, indent=1))
            print(f"{found[key]['outcome']:<10} {key} -> {mutant.text[:60]!r}", flush=True)
    results = summary(found) | {"drawn": options.number, "seed": options.seed, "mutants": found}
    print(json.dumps(summary(found), indent=1), f"\nRecord: {write_record('mutants', results, ('pytest', 'coverage'))}")


def draw(house: House, number: int, seed: str) -> Iterator[tuple[Module, Mutant]]:
    """Draw distinct mutants: a package by its risk, a module by its size, then a place in it."""
    rng = random.Random(seed)
    modules: dict[str, list[Module]] = {package: [] for package in RISK}
    for module in house.modules.values():
        package = module.file.partition("/")[0]
        if package in modules and not module.file.startswith(OUT_OF_REACH):
            modules[package].append(module)
    drawn: set[tuple[str, Mutant]] = set()
    while len(drawn) < number:
        (package,) = rng.choices(list(RISK), list(RISK.values()))
        sizes = [(house.root / module.file).stat().st_size for module in modules[package]]
        (module,) = rng.choices(modules[package], sizes)
        source = (house.root / module.file).read_text(encoding="utf-8")
        if not (mutants := mutants_of(source)):
            continue
        mutant = rng.choice(mutants)
        if (module.file, mutant) not in drawn and compiles(mutant.applied_to(source)):
            drawn.add((module.file, mutant))
            yield module, mutant


class Bench:
    """A copy of the tree in which one file at a time is changed."""

    def __init__(self, state: Path) -> None:
        self.results = state / "found.json"
        self._state = state
        self.tree = state / "tree"
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir()
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in files.rstrip("\0").split("\0"):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)

    def judge(self, module: Module, mutant: Mutant) -> Outcome:
        lines = self._tests_that_meet(module)
        if lines is None:
            return {"outcome": "unjudged", "tests": 0}  # finding the tests of the line took too long
        tests = lines.get(str(mutant.line), [])
        if not tests:
            return {"outcome": "unmet", "tests": 0}
        chosen = _different_functions(tests)
        file = self.tree / module.file
        whole = file.read_text(encoding="utf-8")
        file.write_text(mutant.applied_to(whole), encoding="utf-8")
        began = time.monotonic()
        try:
            code = self._pytest(["-x", *chosen], timeout_s=60.0 + 2.0 * len(chosen))
        finally:
            file.write_text(whole, encoding="utf-8")
        outcome = {0: "survived", 1: "noticed", 2: "noticed", None: "noticed"}.get(code, "unmet")
        return {"outcome": outcome, "tests": len(chosen), "seconds": round(time.monotonic() - began, 1)}

    def _tests_that_meet(self, module: Module) -> dict[str, list[str]] | None:
        kept = self._state / f"{module.name}.lines.json"
        if not kept.exists():
            written = self._state / "lines.json"
            written.unlink(missing_ok=True)
            own = {"MUTANT_FILE": str(self.tree / module.file), "MUTANT_COVERAGE": str(written)}
            files = [str(path) for path in tests_for(self.tree, module)]
            if files and self._pytest(["-p", "load_tests.mutation_contexts", *files], timeout_s=COVER_S, **own) is None:
                return None
            kept.write_text(written.read_text() if written.exists() else "{}")
        found: dict[str, list[str]] = json.loads(kept.read_text())
        return found

    def _pytest(self, words: list[str], timeout_s: float, **environment: str) -> int | None:
        """Return pytest's exit code; None if it took too long."""
        tier = ["-m", "not slow and not network", "--sample", "8", "--seed", "mutants"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tier, *words]
        own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | environment
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=self.tree, env=own, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def tests_for(tree: Path, module: Module) -> list[Path]:
    """Return the test files that name a module or mirror its folder; if none, those of its package."""
    folder = tree / "tests" / Path(module.file).parent
    name = f"pilotlight.{module.name}"
    named = [path for path in (tree / "tests").rglob("test_*.py") if name in path.read_text(encoding="utf-8")]
    found = [*named, *folder.glob("test_*.py")] or (tree / "tests" / Path(module.file).parts[0]).glob("test_*.py")
    return sorted({path.relative_to(tree) for path in found})


def _different_functions(tests: list[str]) -> list[str]:
    first = {test.partition("[")[0]: test for test in reversed(tests)}
    return sorted([*first.values()][:MOST_TESTS])


def summary(found: dict[str, Outcome]) -> dict[str, Any]:
    """Count outcomes, in all and by package.

    A mutant whose line no test runs counts as not noticed; an unjudged one does not count.
    """
    packages: dict[str, Counter[str]] = {}
    for key, each in found.items():
        packages.setdefault(key.partition("/")[0], Counter())[each["outcome"]] += 1
    noticed = sum(counts["noticed"] for counts in packages.values())
    judged = sum(each["outcome"] != "unjudged" for each in found.values())
    return {
        "judged": judged,
        "noticed": noticed,
        "noticed_share": round(noticed / max(1, judged), 3),
        "packages": {name: dict(counts) for name, counts in sorted(packages.items())},
    }


if __name__ == "__main__":
    main()
