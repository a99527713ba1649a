"""A model called like a function: at a function's path, and through a service binding."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.asgi import call
from tests.fakes import says
from tests.runtime.conftest import SiteMaker

pytestmark = pytest.mark.process

ENTRY = """
import json
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        what = request.url.rpartition("/")[2]
        if what == "fetch":
            return await self.env.TINY.fetch("http://model/", method="POST", body=json.dumps({"prompt": "x"}))
        if what == "stream":
            return await self.env.TINY.run({"prompt": "x", "stream": True})
        if what == "wrong":
            found = []
            for work in (lambda: self.env.TINY.walk(), lambda: self.env.TINY.run("x"), lambda: self.env.NONE.run({"prompt": "x"})):
                try:
                    await work()
                except Exception as error:
                    found.append(str(error))
            return Response.json(found)
        return Response.json((await self.env.TINY.run({"prompt": "x"})).response)
"""
MANIFEST = """
name = "f"
main = "entry.py"
[[services]]
binding = "TINY"
service = "@test/tiny"
[[services]]
binding = "NONE"
service = "@test/none"
"""


async def test_a_model_is_called_as_a_function_is(make_site: SiteMaker, tmp_path: Path) -> None:
    folder = tmp_path / "functions/f"
    folder.mkdir(parents=True)
    (folder / "entry.py").write_text(dedent(ENTRY))
    (folder / "wrangler.toml").write_text(MANIFEST)
    table = {"directory": str(folder.parent), "state_dir": str(tmp_path / "state"), "show_errors": True}
    async with make_site(functions=table) as site:
        site.engine.scripts = [says("hello") for _ in range(4)]
        assert (await call(site.app, "/fn/f/run")).json == "hello"
        fetched = (await call(site.app, "/fn/f/fetch")).json
        assert fetched["response"] == "hello"
        events = (await call(site.app, "/fn/f/stream")).events
        assert "".join(event.get("response") or "" for event in events[:-1]) == "hello"
        direct = await call(site.app, "/fn/@test/tiny", {"prompt": "x"})
        assert (direct.status, direct.json["result"]["response"]) == (200, "hello")
        wrong = (await call(site.app, "/fn/f/wrong")).json
        for sentence, text in zip(("not 'walk'", "takes the inputs", "5007"), wrong, strict=True):
            assert sentence in text
        assert (await call(site.app, "/fn/@test/none", {"prompt": "x"})).status == 404
        assert (await call(site.app, "/fn/@test/tiny")).status == 405
        await site.is_idle()
