"""Modules that a site must not import at its start, because each import delays its first answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

LATER = {
    "jinja2",
    "pilotlight.engine.text.template_environment",
    "tokenizers",
    "aiohttp",
    "huggingface_hub",
    "numpy",
    "torch",
    "rich",
    "pydantic",
    "pydantic_core",
    "hypercorn",
    "h11",
    "h2",
    "wsproto",
    "difflib",
    "sqlite3",
    "multiprocessing",
    "pilotlight.sites.validation_errors",
    "pilotlight.sites.network",
    "pilotlight.dialects.body.validation_errors",
    "typer",
    "pilotlight.functions",
    "pilotlight.runtime.cli",
    "pilotlight.runtime.fetching.store",
    "pilotlight.runtime.management.catalogue",
    "pilotlight.engine.gguf.directory",
    "edge_router",
}

ANSWER = """
import asyncio, pathlib, sys, tempfile
import pilotlight.runtime.serve
from pilotlight.runtime.app import build_app
from pilotlight.sites.config import parse
from pilotlight.sites.site import SiteConfig
from tests.asgi import call, eventually, running
from tests.fakes import FakeLauncher, write_model_directory

async def main():
    with tempfile.TemporaryDirectory() as place:
        directory = write_model_directory(pathlib.Path(place, "tiny"))
        model = {"name": "tiny", "source": str(directory), "residency": "disk"}
        site = {
            "name": "ams1", "place": {"city": "Amsterdam", "latitude": 52.31, "longitude": 4.76}, "listen": {"port": 0},
            "engine": {"standby": False, "weights_host_gib": 0.0}, "models": [model],
        }
        app = build_app(parse(SiteConfig, site, "test"), launchers=[FakeLauncher()])
        async with running(app):
            for prompt in ("Once", [72, 105]):
                answer = await call(app, "/v1/completions", {"model": "tiny", "prompt": prompt})
                assert answer.status == 200, answer.body
            for path in ("/livez", "/readyz", "/metrics", "/v1/models"):
                assert (await call(app, path)).status == 200, path

asyncio.run(main())
"""


def imported_by(script: str) -> set[str]:
    program = f"{script}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def told(found: set[str], when: str) -> str:
    return (
        f"{when} has imported {', '.join(sorted(found))}; import it where it is used, or after the first answer "
        "(`python -X importtime -c 'import pilotlight.runtime.serve'` shows which module imports it)"
    )


def test_a_site_that_starts_imports_nothing_that_can_wait() -> None:
    found = LATER & imported_by("import pilotlight.runtime.__main__, pilotlight.runtime.serve")
    assert not found, told(found, "a starting site")


@pytest.mark.parametrize(
    ("modules", "later"),
    [
        (
            "pilotlight.runtime.cli.commands, pilotlight.runtime.cli.up",
            {"asyncio", "rich", "pilotlight.engine.gguf.directory"},
        ),
        ("pilotlight.edge_router.serve", {"cryptography", "numpy", "pilotlight.dialects.openapi"}),
    ],
)
def test_up_starts_its_servers_and_a_router_serves_before_they_import_what_can_wait(
    modules: str, later: set[str]
) -> None:
    found = later & imported_by(f"import {modules}")
    assert not found, told(found, "a starting network")


def test_a_site_answers_texts_and_scrapes_without_jinja() -> None:
    later = {"jinja2", "pydantic", "hypercorn", "torch"}
    found = later & imported_by(ANSWER)
    assert not found, told(found, "a site that has answered a text and a scrape")
