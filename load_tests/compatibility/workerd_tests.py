"""The tests of Python Workers that belong to Cloudflare's runtime, run in isolates here.

The workers (github.com/cloudflare/workerd) are unmodified; load_tests/compatibility/workerd_harness.py calls their `test` handlers.

    python -m load_tests.compatibility.workerd_tests PATH [NAME ...]

PATH is a clone of the repository, or its folder src/workerd/server/tests/python. NAME is the folder of a test, or FOLDER/FILE where a folder has
several. Prints a table with the reason for each test that fails or does not apply, and exits with 1 if a test of PASSING fails. Where one half of a
test is JavaScript, `workerd_twins` has that half in Python; the server of `sockets` runs in Node.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from load_tests.compatibility.workerd_config import Worker, workers
from load_tests.local_network import ROOT

TESTS = Path("src/workerd/server/tests/python")
HERE = Path(__file__).parent
DATE = "2026-07-01"
SESSION_S = 400.0
SIDECAR = {"sockets": "socket-server.js"}  # servers that a test connects to, by test
INSIDE = "uses Pyodide's or workerd's own modules"
NOT_APPLICABLE = {
    "hello": "expects that `js` is another object, and that js.fetch fails, while a module is imported into a snapshot of Pyodide's memory",
    "metadata-read-overflow": f"{INSIDE}: the file system of pyodide_js",
    "nodejs-compat": f"{INSIDE}: Node's `process` in `js`",
    "pth-file": "expects Pyodide's path /session/metadata/python_modules in sys.path",
    "pytest": f"{INSIDE}: pyodide.webloop, the path /session/metadata, and a memory cache that only workerd has",
    "python-abort-isolate-on-fatal": f"{INSIDE}: _pyodide_core ends the whole server",
    "python-compat-flag": f"{INSIDE}: _cloudflare_compat_flags",
    "sdk/python-sdk::can_return_custom_fetch_response": "expects the environment as an object of JavaScript (`env._env`)",
    "vendor_dir": "expects Pyodide's path /session/metadata/python_modules in sys.path",
    "vendor_pkg_tests/existing_dedicated_fastapi_vendor": "tests a stored snapshot of Pyodide's memory",
    "vendor_pkg_tests/python-workers-runtime-sdk_vendor": "replaces the SDK by a package of workerd's own bucket",
    "workflow-entrypoint": "is the engine itself, in JavaScript: it calls a workflow's `run` and passes in the object `step`",
}
DIFFERENT = {  # tests that fail because functions here intentionally behave otherwise; docs/compatibility.md lists the differences
    "python-rpc/py": "expects that tuples, bytearrays and functions are refused as arguments, which are accepted here; lists and dicts arrive as "
    "subclasses, bytes as bytes and not as a memoryview",
    "random": "expects that `random` fails while the module is imported; here it works",
    "sdk/python-sdk::can_support_scheduled_cron_trigger": "calls `scheduled` by a service binding, which workerd allows by a flag",
    "sdk/python-sdk::gets_nice_error_on_jsism": "expects that `fetch` refuses options in a dict, which are accepted here",
    "sdk/python-sdk::request_unit_tests": "expects OSError itself when a body is read twice; here it is BodyUsedError, a subclass",
    "top-level-tests": "imports cloudflare:sockets and cloudflare:vectorize, which are refused by name: no JavaScript runs",
}
PASSING = """
    asgi::header_test asgi::test_error_after_response_is_logged asgi::test_background_task_error_is_logged
    asgi::test_app_exception_before_response_is_logged asgi-sse default-class-with-legacy-global-handlers durable-object
    durable-object-websocket/tester env-param jspi python-rpc/js sdk/python-sdk::can_modify_response
    sdk/python-sdk::can_use_duplicate_headers sdk/python-sdk::can_use_fetch_opts sdk/python-sdk::can_use_undefined_options_and_redirect
    sdk/python-sdk::can_use_inherited_response_methods sdk/python-sdk::errors_on_invalid_input_to_redirect
    sdk/python-sdk::can_use_response_json sdk/python-sdk::can_request_form_data sdk/python-sdk::form_data_unit_tests
    sdk/python-sdk::blob_unit_tests sdk/python-sdk::can_request_form_data_blob sdk/python-sdk::replace_body_unit_tests
    sdk/python-sdk::can_use_cf_fetch_opts sdk/python-sdk::can_use_event_decorator sdk/python-sdk::response_unit_tests
    sdk/python-sdk::response_buffer_source_unit_tests sockets::test_basic_send_recv sockets::test_starttls_send_recv
    sockets::test_tls_send_recv sockets::test_multiple_send_recv sockets::test_large_send sockets::test_large_recv
    sockets::test_recv_backpressure sockets::test_partial_recv sockets::test_socket_metadata sockets::test_create_multiple
    sockets::test_double_close_after_eof sockets::test_recv_after_remote_close sockets::test_makefile sockets::test_connection_refused
    sockets::test_settimeout_nonblocking_and_restore sockets::test_shutdown_after_eof sockets::test_asyncio_sock_connect_recv_sendall
    sockets::test_asyncio_sock_recv_into sockets::test_asyncio_open_connection sockets::test_asyncio_open_connection_hostname
    sockets::test_asyncio_concurrent_connections stack-switching-state subdirectory undefined-handler/server vendor_dir_compat_flag
    vendor_pkg_tests/beautifulsoup4_vendor vendor_pkg_tests/fastapi_vendor vendor_pkg_tests/numpy_vendor vendor_pkg_tests/scipy_vendor
    vendor_pkg_tests/shapely_vendor worker-entrypoint
""".split()  # noqa: SIM905 - one name a line would fill a page


def main(repository: Path, wanted: list[str]) -> int:
    folder = repository / TESTS if (repository / TESTS).is_dir() else repository
    counts = {"pass": 0, "FAIL": 0, "differs": 0, "n/a": 0}
    lost = []
    print("| test | | reason |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="pilotlight-workerd-") as place:
        os.chmod(place, 0o755)
        for file in sorted(folder.rglob("*.wd-test")):
            name = name_of(file, folder)
            if wanted and name not in wanted:
                continue
            for test, outcome, reason in rows(name, file, Path(place) / name.replace("/", "-")):
                counts[outcome] += 1
                print(f"| {test} | {outcome} | {' '.join(reason.split()).replace('|', '/')[:400]} |", flush=True)
                if outcome == "FAIL":
                    lost += [each for each in PASSING if each == test or each.startswith((f"{test}/", f"{test}::"))]
    print(f"\n{', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    for each in lost:
        print(f"  has passed before: {each}")
    return 1 if lost else 0


def name_of(file: Path, folder: Path) -> str:
    several = len(list(file.parent.glob("*.wd-test"))) > 1
    return f"{file.parent.relative_to(folder)}/{file.stem}" if several else str(file.parent.relative_to(folder))


def rows(name: str, file: Path, place: Path) -> Iterator[tuple[str, str, str]]:
    """Run one file. Yields the name, the outcome and the reason of each test."""
    if name in NOT_APPLICABLE:
        yield name, "n/a", NOT_APPLICABLE[name]
        return
    try:
        with sidecar(name, file.parent) as ports:
            found = workers(file)
            folders = [prepared(worker, name, place / worker.name, ports) for worker in found]
            labels = [name if len(found) == 1 else f"{name}/{worker.name}" for worker in found]
            for label, part, why in outcomes(place, dict(zip(labels, folders, strict=True))):
                test = f"{label}::{part}" if part else label
                yield test, *judged(test, why)
    except Exception as error:
        yield name, *judged(name, f"{type(error).__name__}: {error}")


def outcomes(place: Path, folders: dict[str, Path]) -> list[tuple[str, str, str]]:
    """Serve workers in a session of pytest, with the fixture for authors.
    Returns each test's label, part and failure. Raises AssertionError with the output if the session fails."""
    shutil.copy(HERE / "workerd_session.py", place / "test_workers.py")
    (place / "folders.json").write_text(json.dumps({label: str(folder) for label, folder in folders.items()}))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(place),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    session = subprocess.run(
        [*command, str(place)], cwd=place, env=environment, capture_output=True, text=True, timeout=SESSION_S
    )
    if session.returncode != 0:
        lines = [line for line in session.stdout.splitlines() if line.startswith("E ")]
        raise AssertionError(" ".join(lines[-3:]) or session.stdout[-400:] + session.stderr[-400:])
    found: list[tuple[str, str, str]] = json.loads((place / "outcomes.json").read_text())
    return found


def judged(test: str, why: str) -> tuple[str, str]:
    """Return a test's outcome and its reason; `why` is why it failed, if it did."""
    if test in NOT_APPLICABLE:
        return "n/a", NOT_APPLICABLE[test]
    if why and test in DIFFERENT:
        return "differs", f"{DIFFERENT[test]}; fails with {why}"
    return ("FAIL", why) if why else ("pass", "")


def prepared(worker: Worker, name: str, place: Path, ports: dict[str, str]) -> Path:
    """Copy a worker's modules, the harness and a manifest to a folder."""
    place.mkdir(parents=True)
    for module, path in worker.modules.items():
        target = place / module
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(HERE / "workerd_harness.py", place / "workerd_harness.py")
    tested = worker.main.removesuffix(".py")
    if not worker.is_python:
        tested = name.replace("-", "_")
        shutil.copy(HERE / "workerd_twins" / f"{tested}.py", place)
    if name.startswith("vendor_pkg_tests/"):
        package = name.partition("/")[2].removesuffix("_vendor")
        text = f'[project]\nname = "tested"\nversion = "0"\ndependencies = ["{package}"]\n'
        (place / "pyproject.toml").write_text(text)
    (place / "wrangler.json").write_text(json.dumps(manifest(worker, tested, ports)))
    return place


def manifest(worker: Worker, tested: str, ports: dict[str, str]) -> dict[str, Any]:
    own = {"binding": "TESTER", "service": worker.name.lower(), "entrypoint": "WorkerdTester"}
    made: dict[str, Any] = {
        "name": worker.name.lower(),
        "main": "workerd_harness.py",
        "compatibility_date": DATE,
        "compatibility_flags": [flag for flag in worker.flags if not flag.startswith("disable_")],
        "vars": {"TESTED_MODULE": tested},
        "services": [own],
        "durable_objects": {"bindings": []},
        "migrations": [{"tag": "v1", "new_sqlite_classes": worker.classes}],
    }
    for each in worker.bindings:
        if "text" in each:
            made["vars"][each["name"]] = each["text"]
        elif "fromEnvironment" in each:
            made["vars"][each["name"]] = ports[each["fromEnvironment"]]
        elif "durableObjectNamespace" in each:
            found = {"name": each["name"], "class_name": each["durableObjectNamespace"]}
            made["durable_objects"]["bindings"].append(found)
        elif "service" in each:
            to = each["service"] if isinstance(each["service"], dict) else {"name": each["service"]}
            named = {"entrypoint": to["entrypoint"]} if "entrypoint" in to else {}
            made["services"].append({"binding": each["name"], "service": to["name"].lower(), **named})
    return made


@contextmanager
def sidecar(name: str, folder: Path) -> Iterator[dict[str, str]]:
    """Run a test's own server in Node. Yields the variables that it prints, and its host."""
    if name not in SIDECAR:
        yield {}
        return
    host = {"SIDECAR_HOSTNAME": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as place:
        script = shutil.copy(folder / SIDECAR[name], Path(place) / "server.mjs")
        process = subprocess.Popen(["node", str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, **host})
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(4)]
            yield {**host, **dict(line.split("=") for line in lines)}
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
