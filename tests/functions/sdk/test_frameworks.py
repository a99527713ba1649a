"""Web frameworks inside real isolates: Starlette and FastAPI over ASGI, Flask and Django over WSGI."""

import asyncio
import json
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.manifest import load_manifest
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker

HERE = Path(sysconfig.get_path("purelib"))

STARLETTE = """
import asyncio
import asgi
from contextlib import asynccontextmanager
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from workers import WorkerEntrypoint

seen = []

@asynccontextmanager
async def lifespan(app):
    seen.append("started")
    yield {"from": "lifespan"}

async def events(request):
    async def pieces():
        try:
            for i in range(1000):
                yield f"{i}\\n"
                await asyncio.sleep(0.001 if i < 3 else 0.05)
        finally:
            seen.append("left")
    return StreamingResponse(pieces())

async def echo(request):
    async def pieces():
        async for chunk in request.stream():
            yield chunk
    return StreamingResponse(pieces(), headers={"x-path": request.url.path, "x-query": request.url.query})

async def what(request):
    return JSONResponse([seen, request.state["from"], request.scope["env"].NAME])

async def boom(request):
    raise ValueError("inside starlette")

async def late(request):
    async def pieces():
        yield "first"
        raise ValueError("late in starlette")
    return StreamingResponse(pieces())

app = Starlette(lifespan=lifespan, routes=[Route("/events", events), Route("/echo", echo, methods=["POST"]),
    Route("/what", what), Route("/boom", boom), Route("/late", late)])

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)
"""
FLASK = """
import wsgi
from flask import Flask, Response, jsonify, request
from workers import WorkerEntrypoint

app = Flask(__name__)

@app.post("/form/<name>")
def form(name):
    return jsonify(name=name, field=request.form["field"], file=request.files["file"].read().decode(),
        var=request.environ["workers.env"].NAME)

@app.get("/stream")
def stream():
    return Response((f"{i}\\n" for i in range(5)), mimetype="text/plain")

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await wsgi.fetch(app, request, self.env)
"""
DJANGO = """
import wsgi
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path
from workers import WorkerEntrypoint

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x", USE_TZ=True)

def hello(request, name):
    return JsonResponse({"hello": name, "q": request.GET.get("q")})

urlpatterns = [path("hello/<str:name>/", hello)]
app = get_wsgi_application()

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await wsgi.fetch(app, request, self.env)
"""
DJANGO_ASGI = """
import asgi
import asyncio
import json
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import JsonResponse, StreamingHttpResponse
from django.urls import path
from workers import WorkerEntrypoint

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x", USE_TZ=True)

async def hello(request, name):
    return JsonResponse({"hello": name, "q": request.GET.get("q"), "var": request.scope["env"].NAME})

def add_up(request):
    return JsonResponse({"sum": sum(json.loads(request.body)["numbers"])})

async def stream(request):
    async def pieces():
        for i in range(3):
            yield f"{i}\\n"
            await asyncio.sleep(0)
    return StreamingHttpResponse(pieces())

def boom(request):
    raise ValueError("inside django")

urlpatterns = [path("hello/<str:name>/", hello), path("sum/", add_up), path("stream/", stream), path("boom/", boom)]
app = get_asgi_application()

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)
"""


@pytest.fixture
async def served(make_served: ServedMaker) -> AsyncIterator[Served]:
    async with make_served() as made:
        yield made


def add(served: Served, source: str, name: str = "f") -> None:
    """Add a function that has the packages of the test environment."""
    served.add(source, name, '[vars]\nNAME = "value"\n')
    served.functions.add(load_manifest(served.folder / name), layers=(HERE,))


async def test_starlette_streams_both_ways_with_its_lifespan_and_the_env(served: Served) -> None:
    add(served, STARLETTE)
    assert json.loads(await served.get("/what")) == [["started"], "lifespan", "value"]
    assert json.loads(await served.get("/what")) == [["started"], "lifespan", "value"]  # lifespan started once
    assert (await served.ask("/nowhere")).status == 404

    async def upload() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"u" * 50_000

    answer = await served.ask("/echo?a=b", method="POST", body=upload())
    assert dict(answer.headers)["x-path"] == "/echo"
    assert dict(answer.headers)["x-query"] == "a=b"
    assert answer.stream is not None
    assert sum([len(chunk) async for chunk in answer.stream]) == 1_500_000


async def test_starlettes_generator_ends_when_its_reader_leaves(served: Served) -> None:
    add(served, STARLETTE)
    answer = await served.ask("/events")
    assert answer.stream is not None
    assert (await anext(answer.stream)).startswith(b"0\n")
    await answer.stream.aclose()  # type: ignore[attr-defined]

    async def is_closed() -> bool:
        return bool(json.loads(await served.get("/what"))[0] == ["started", "left"])

    await eventually(is_closed)


async def test_what_starlette_raises_reaches_the_author_with_its_line(served: Served) -> None:
    add(served, STARLETTE)
    assert (await served.ask("/boom")).status == 500  # Starlette's own response; the function's log has the exception
    printed = served.functions.pools["f"].isolates.living[0].process.log.lines
    await eventually(lambda: any("inside starlette" in line for line in printed))
    assert any("in boom" in line for line in printed)
    answer = await served.ask("/late")
    assert answer.stream is not None
    assert await anext(answer.stream) == b"first"
    with pytest.raises(Fault, match="late in starlette"):
        await anext(answer.stream)


async def test_flask_takes_forms_and_files_and_streams(served: Served) -> None:
    pytest.importorskip("flask")
    add(served, FLASK)
    body = (
        b'--b\r\nContent-Disposition: form-data; name="field"\r\n\r\nvalue of it\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\ncontent\r\n--b--\r\n'
    )
    headers = [("content-type", "multipart/form-data; boundary=b")]
    answer = await served.get("/form/ada", method="POST", body=body, headers=headers)
    assert json.loads(answer) == {"name": "ada", "field": "value of it", "file": "content", "var": "value"}
    assert await served.get("/stream") == b"0\n1\n2\n3\n4\n"


async def test_django_answers(served: Served) -> None:
    pytest.importorskip("django")
    add(served, DJANGO)
    assert json.loads(await served.get("/hello/ada/?q=1")) == {"hello": "ada", "q": "1"}


async def test_django_answers_as_an_asgi_application_too(served: Served) -> None:
    pytest.importorskip("django")
    add(served, DJANGO_ASGI)
    assert json.loads(await served.get("/hello/ada/?q=1")) == {"hello": "ada", "q": "1", "var": "value"}
    posted = await served.get("/sum/", method="POST", body=b'{"numbers": [1, 2, 3]}')
    assert json.loads(posted) == {"sum": 6}
    assert await served.get("/stream/") == b"0\n1\n2\n"
    assert (await served.ask("/nowhere/")).status == 404
    assert (await served.ask("/boom/")).status == 500
    answers = await asyncio.gather(*(served.get(f"/hello/{i}/") for i in range(20)))
    assert [json.loads(answer)["hello"] for answer in answers] == [str(i) for i in range(20)]


async def test_a_busy_framework_gets_copies_and_goes_back_to_none(make_served: ServedMaker) -> None:
    async with make_served(limits={"concurrency": 4, "max_isolates": 3, "idle_s": 0.2}) as served:
        add(served, STARLETTE)
        pool = served.functions.pools["f"]
        answers = [await served.ask("/events") for _ in range(9)]
        assert len(pool.isolates.living) == 3
        for answer in answers:
            assert answer.stream is not None
            await answer.stream.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: not pool.isolates.living)
        assert json.loads(await served.get("/what"))[0] == ["started"]  # the isolate was replaced
