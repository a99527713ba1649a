"""The tests of Cloudflare's own SDK for its bindings, run in functions here.

The functions and tests (github.com/cloudflare/workers-py) are unmodified; load_tests/compatibility/sdk_harness.py runs them.

    python -m load_tests.compatibility.sdk_tests PATH [SUITE ...]

PATH is a clone of the repository. Prints a table by suite, and each test that fails with its reason. Hyperdrive's suites need a PostgreSQL and a
MySQL server and are left out, as in that repository's own runs; suites of binding kinds that are not supported here are counted separately.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from load_tests.compatibility.dev_server import UNCOPIED, DevServer

TESTS = Path("packages/runtime-sdk/tests/bindings-test")
LEFT_OUT = ("hyperdrive_mysql", "hyperdrive_postgresql")
NOT_OFFERED = ("images", "mtls")
DATE = "2026-07-01"


async def main(repository: Path, wanted: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="pilotlight-sdk-") as name:
        folder = await asyncio.to_thread(prepared, repository, Path(name))
        suites = sorted(path.stem[5:] for path in (repository / TESTS / "src").glob("test_*.py"))
        suites = [suite for suite in suites if suite not in LEFT_OUT and (not wanted or suite in wanted)]
        totals = {True: [0, 0], False: [0, 0]}
        failed = []
        print("| suite | passed | of | skipped |\n|---|--:|--:|--:|")
        async with DevServer(folder, []) as server:
            for suite in suites:
                results: dict[str, str] = json.loads(await server.text(f"/run-tests/{suite}"))
                skipped = [test for test, why in results.items() if why.startswith("skipped")]
                bad = {test: why for test, why in results.items() if why and test not in skipped}
                passed, count = len(results) - len(bad) - len(skipped), len(results) - len(skipped)
                print(f"| {suite} | {passed} | {count} | {len(skipped)} |", flush=True)
                is_offered = suite not in NOT_OFFERED
                totals[is_offered][0] += passed
                totals[is_offered][1] += count
                failed += [f"{suite}::{test}: {' '.join(why.split())[:300]}" for test, why in bad.items()]
    for line in failed:
        print(f"  {line}")
    (passed, count), (others, all_others) = totals[True], totals[False]
    print(
        f"\nsupported kinds: {passed} of {count} ({100 * passed / max(1, count):.1f} %); others: {others} of {all_others}"
    )
    return 0 if passed >= 0.95 * count else 1


def prepared(repository: Path, place: Path) -> Path:
    """Copy the tests' function, with our harness instead of its worker.py."""
    folder = place / "bindings-test"
    shutil.copytree(repository / TESTS, folder, ignore=UNCOPIED)
    os.chmod(place, 0o755)
    shutil.copy(Path(__file__).with_name("sdk_harness.py"), folder / "src/worker.py")
    manifest = folder / "wrangler.jsonc"
    manifest.write_text(manifest.read_text().replace("%COMPAT_DATE", DATE))
    return folder


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]), sys.argv[2:])))
