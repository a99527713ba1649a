"""A site in a separate process that serves every function of examples/functions and the embedded model."""

import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from load_tests.local_network import free_ports
from pilotlight.functions.manifest import FILES

FUNCTIONS = Path(__file__).parents[2] / "examples/functions"
SITE = """
name = "examples"
place = {{ city = "here", latitude = 0.0, longitude = 0.0 }}
listen = {{ port = {port} }}
engine = {{ standby = false, weights_host_gib = 0.0 }}

[[models]]
name = "ember"
source = "embedded:ember"
aliases = ["@pilotlight/ember"]

[functions]
state_dir = "{state}"
show_errors = true
"""
SERVE = '\n[[functions.serve]]\nname = "{name}"\npath = "{path}"\n'


@pytest.fixture(scope="session")
def site(process_tier: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield an HTTP client of the site. Its paths begin with the name of a function: `site.get("hello/")`."""
    folder = tmp_path_factory.mktemp("examples")
    (port,) = free_ports(1)
    text = SITE.format(port=port, state=folder / "state")
    for path in sorted(FUNCTIONS.iterdir()):
        if any((path / name).is_file() for name in FILES):
            text += SERVE.format(name=path.name, path=path)
            if (path / "pyproject.toml").is_file():  # without a network: its packages are installed here
                text += f'layer = "{sysconfig.get_path("purelib")}"\n'
    (folder / "site.toml").write_text(text)
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "pilotlight.runtime", str(folder / "site.toml")], stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                ends_at = time.monotonic() + 60
                while not _is_ready(client):
                    log.seek(0)
                    assert process.poll() is None, log.read()
                    assert time.monotonic() < ends_at, "the site did not become ready"
                    time.sleep(0.05)
                client.base_url = httpx.URL(f"http://127.0.0.1:{port}/fn/")
                yield client
        finally:
            process.terminate()
            process.wait(60)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
