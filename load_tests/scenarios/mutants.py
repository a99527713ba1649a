"""The share of small faults in the product that its tests notice.

`make mutants` runs python -m load_tests.scenarios.mutants --number 300 --seed 1.

Mutants (load_tests/mutation.py) are drawn by the seed: a package by its risk, then a place in it. The tests that judge a mutant are part of `make
test` and not `long`, run its line, and come from files that name its module, have its name or are in the corresponding folder of tests/. So the share
of noticed mutants is a lower bound for the whole suite. A mutant is noticed at the first failure, or if its tests take too long. Each test file runs
once under coverage, when a mutant first needs it. All work is done in a copy of the tree. `--state FOLDER` keeps the results: the same command
continues after an interruption.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from load_tests.house import ROOT, House, Module
from load_tests.mutation import Mutant, compiles, mutants_of
from load_tests.mutation_runs import run_pytest
from load_tests.records import write_record

# Weights by the cost of a fault: tokens, money and isolation rank above the display of a process's state.
RISK = {
    "edge_router": 4, "runtime": 4, "engine": 4, "wire": 3, "functions": 3, "dialects": 2, "response_store": 2, "kernels": 1, "sites": 1,
    "support": 1, "page": 1,
}  # fmt: skip
# Code that these tests cannot reach: a GPU's kernels, and modules that run in a function's process.
OUT_OF_REACH = ("kernels/triton/", "functions/sdk/", "functions/host/isolates/")
MOST_TESTS = 60  # most tests per mutant
COVER_S = 400.0
SLOWEST_START_S = 60.0  # until the first test, on a busy machine
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
        self._lines = state / "lines"
        self._lines.mkdir(exist_ok=True)
        self.tree = state / "tree"
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir()
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in files.rstrip("\0").split("\0"):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)

    def judge(self, module: Module, mutant: Mutant) -> Outcome:
        """Run the tests of the mutant's line, file by file, until one fails."""
        file = self.tree / module.file
        whole, changed = file.read_text(encoding="utf-8"), file.stat().st_mtime
        run, began, is_noticed = 0, time.monotonic(), False
        for tests_of in tests_for(self.tree, module):
            tests = self._tests_that_meet(module.file, mutant.line, tests_of)[: MOST_TESTS - run]
            if not tests:
                continue
            run += len(tests)
            file.write_text(mutant.applied_to(whole), encoding="utf-8")
            os.utime(file, (changed + mutant.start + 1,) * 2)  # Python must not take another version's bytecode
            try:
                limit_s = SLOWEST_START_S + 10.0 * sum(seconds for seconds, _ in tests)
                is_noticed = run_pytest(self.tree, ["-x", *(test for _, test in tests)], limit_s) not in (0, 5)
            finally:
                file.write_text(whole, encoding="utf-8")
                os.utime(file, (changed, changed))
            if is_noticed or run == MOST_TESTS:
                break
        outcome = "noticed" if is_noticed else "survived" if run else "unmet"
        return {"outcome": outcome, "tests": run, "seconds": round(time.monotonic() - began, 1)}

    def _tests_that_meet(self, file: str, line: int, tests_of: Path) -> list[tuple[float, str]]:
        """Return seconds and names of a file's tests that run a line, the fastest first.

        Of each function only the fastest case is among them.
        """
        kept = self._lines / f"{str(tests_of).replace('/', '.')}.json"
        if not kept.exists():
            code = run_pytest(self.tree, [str(tests_of)], COVER_S, record=kept)
            if not kept.exists():
                print(
                    f"{tests_of} judges no mutant: {'it takes too long' if code is None else f'pytest ended with {code}'}"
                )
                kept.write_text('{"seconds": {}, "lines": {}}')
        found = json.loads(kept.read_text())
        timed = [(seconds, test) for test, seconds in found["seconds"].items()]
        fastest: dict[str, tuple[float, str]] = {}
        for seconds, test in sorted(timed[number] for number in found["lines"].get(file, {}).get(str(line), [])):
            fastest.setdefault(test.partition("[")[0], (seconds, test))
        return [*fastest.values()]


def tests_for(tree: Path, module: Module) -> list[Path]:
    """Return the test files that belong to a module, the closest first: by name, by imports, by folder.

    If there are none, return those of its package.
    """
    folder = tree / "tests" / Path(module.file).parent
    name = f"pilotlight.{module.name}"
    mirror = f"test_{Path(module.file).name}"
    named = {
        path
        for path in (tree / "tests").rglob("test_*.py")
        if path.name == mirror or name in path.read_text(encoding="utf-8")
    }
    found = named.union(folder.glob("test_*.py")) or (tree / "tests" / Path(module.file).parts[0]).glob("test_*.py")
    return sorted(
        (path.relative_to(tree) for path in found),
        key=lambda path: (path.name != mirror, tree / path not in named, tree / path.parent != folder, path),
    )


def summary(found: dict[str, Outcome]) -> dict[str, Any]:
    """Count outcomes, in all and by package.

    A mutant whose line no test runs counts as not noticed.
    """
    packages: dict[str, Counter[str]] = {}
    for key, each in found.items():
        packages.setdefault(key.partition("/")[0], Counter())[each["outcome"]] += 1
    noticed = sum(counts["noticed"] for counts in packages.values())
    return {
        "judged": len(found),
        "noticed": noticed,
        "noticed_share": round(noticed / max(1, len(found)), 3),
        "packages": {name: dict(counts) for name, counts in sorted(packages.items())},
    }


if __name__ == "__main__":
    main()
