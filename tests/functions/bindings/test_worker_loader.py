"""Dynamic workers in real isolates: code that a function provides runs as a separate function."""

import json
import os
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pilotlight.functions.bindings import worker_loader
from pilotlight.functions.bindings.binding import BindingLimits, Services
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.host.faults import Fault
from pilotlight.support.database import Databases
from tests.asgi import eventually
from tests.audit_events import observed_calls
from tests.functions.conftest import Served, ServedMaker

MANIFEST = '[[worker_loaders]]\nbinding = "LOADER"\n'
PARENT = '''
from workers import Response, WorkerEntrypoint
from pyodide.ffi import create_proxy
from urllib.parse import urlsplit, parse_qsl
calls = []
CODE = """
from workers import Response, WorkerEntrypoint, env, fetch
import helper
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(f"{env.WORD} {helper.word} {request.url}")
    async def add(self, a, b=1):
        return {"sum": a + b, "props": self.ctx.props}
    async def ask(self, url):
        return (await fetch(url)).status
class Admin(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(f"admin {self.ctx.props['role']}")
"""
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        parts = urlsplit(request.url)
        query = dict(parse_qsl(parts.query))
        def code():
            calls.append(1)
            more = {"globalOutbound": None} if "offline" in query else {}
            modules = {"main.py": CODE, "helper.py": {"py": "word = 'helps'"}}
            return {"mainModule": query.get("main", "main.py"), "modules": modules, "env": {"WORD": "hello"}, **more}
        worker = self.env.LOADER.get(query.get("id", "one"), create_proxy(code))
        if parts.path == "/fetch":
            return await worker.getEntrypoint().fetch(request)
        if parts.path == "/admin":
            return await worker.getEntrypoint("Admin", {"props": {"role": "root"}}).fetch("http://x/")
        if parts.path == "/ask":
            return Response.json(await worker.getEntrypoint().ask("http://10.0.0.1/"))
        return Response.json([await worker.getEntrypoint().add(2, b=3), len(calls)])
'''


@pytest.fixture
async def served(make_served: ServedMaker, tmp_path: Path) -> AsyncIterator[Served]:
    services = Services(databases=Databases(), limits=BindingLimits(dynamic_workers=2))
    bindings = partial(FunctionBindings.open, tmp_path / "state", services)
    async with make_served(open_bindings=bindings) as made:
        made.add(PARENT, manifest=MANIFEST)
        yield made
    await services.databases.close()


async def test_a_loaded_worker_answers_with_its_own_env_and_modules(served: Served) -> None:
    assert await served.get("/fetch?a=b") == b"hello helps http://host/fetch?a=b"
    assert json.loads(await served.get("/add")) == [{"sum": 5, "props": None}, 1]
    assert await served.get("/admin") == b"admin root"


async def test_the_callback_is_asked_once_for_an_id(served: Served) -> None:
    for _ in range(3):
        assert json.loads(await served.get("/add"))[1] == 1
    assert json.loads(await served.get("/add?id=two"))[1] == 2


async def test_without_an_outbound_it_has_no_network(served: Served) -> None:
    with pytest.raises(Fault, match="loaded without access to the network"):
        await served.get("/ask?offline=1")
    with pytest.raises(Fault, match="not a public address"):
        await served.get("/ask?id=online")


async def test_a_module_cannot_lead_out_of_its_folder(served: Served) -> None:
    with pytest.raises(Fault, match=r"mainModule names '\.\./entry\.py'"):
        await served.get("/fetch?main=../entry.py")


async def test_the_longest_unused_goes_when_there_are_too_many(served: Served) -> None:
    for id in ("a", "b", "a", "c"):
        await served.get(f"/fetch?id={id}")
    assert {name.partition(".")[0] for name in served.functions.pools if "+" in name} == {"f+a", "f+c"}
    assert await served.get("/fetch?id=b")  # loaded again


async def test_loaded_workers_go_with_their_loader(served: Served) -> None:
    await served.get("/fetch")
    served.functions.remove("f")
    await eventually(lambda: not served.functions.pools)


async def test_code_is_written_and_removed_in_threads_and_few_folders_are_left(served: Served, tmp_path: Path) -> None:
    in_threads: set[str] = set()
    on_the_loop: list[str] = []

    def num_folders() -> int:
        return sum("worker_loader" in parent and "main.py" in files for parent, _, files in os.walk(tmp_path))

    def note(event: str, arguments: tuple[object, ...]) -> None:
        is_write = event == "open" and arguments[1] == "w"
        if (is_write or event == "shutil.rmtree") and "worker_loader" in str(arguments[0]):
            if threading.current_thread() is threading.main_thread():
                on_the_loop.append(event)
            else:
                in_threads.add(event)

    with observed_calls(note):
        for number in range(7):
            assert await served.get(f"/fetch?id={number}")
        assert (on_the_loop, num_folders()) == ([], 4), "the loaded workers, and as many removed ones"
        served.functions.remove("f")
        await eventually(lambda: not num_folders())
    assert (on_the_loop, in_threads) == ([], {"open", "shutil.rmtree"})


async def test_a_worker_has_no_modules_of_an_earlier_process_with_this_ones_id(tmp_path: Path) -> None:
    folders: list[Path] = []
    functions = SimpleNamespace(
        add=lambda manifest, *, name: folders.append(manifest.directory), remove=lambda name: None
    )
    loader = worker_loader.WorkerLoader(functions, "f", tmp_path / f"{os.getpid()}.1", 8)
    worker = {"main": "main.py", "modules": {"main.py": ""}}
    await loader.call("load", [], {**worker, "id": "one"})
    following = folders[0].with_name(str(int(folders[0].name) + 1))
    following.mkdir()
    (following / "others.py").write_text("SECRET = 1")
    await loader.call("load", [], {**worker, "id": "two"})
    assert [path.name for path in folders[1].iterdir()] == ["main.py"]
    assert folders[1] == following
    await loader.close()
