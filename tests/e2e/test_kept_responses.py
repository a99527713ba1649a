"""A site without a router stores its responses by default, and still has them after SIGKILL and a restart."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from load_tests.local_network import free_ports
from tests.e2e.one_site import PLACE

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]
SITE = """
name = "ams1"
listen = {{ port = {port} }}
engine = {{ threads = 1, kv_gib = 0.0625, standby = false }}
{place}
[[models]]
name = "ember"
source = "embedded:ember"
"""


@contextmanager
def site(folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    (port,) = free_ports(1)
    file = folder / "site.toml"
    file.write_text(SITE.format(port=port, place=PLACE))
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    with subprocess.Popen(
        [sys.executable, "-m", "pilotlight.runtime", str(file)], cwd=ROOT, env=environment
    ) as process:
        try:
            yield process, f"http://127.0.0.1:{port}/v1/responses"
        finally:
            process.kill()


def told(url: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
    """Send a request to a site, again until it listens; return the JSON of its response."""
    data = None if body is None else json.dumps({"model": "ember", **body}).encode()
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            asked = urllib.request.Request(url, data, {"content-type": "application/json"})
            with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_site_that_is_killed_has_its_responses_when_it_is_back(tmp_path: Path) -> None:
    with site(tmp_path) as (process, url):
        first = told(url, {"input": "What is the airport code of Lisbon?"})
        assert "LIS" in first["output"][0]["content"][0]["text"]
        process.kill()
    assert (tmp_path / "state" / "pilotlight" / "ams1" / "responses.sqlite").exists()
    with site(tmp_path) as (_, url):
        assert told(f"{url}/{first['id']}") == first
        second = told(url, {"input": "And of Oslo?", "previous_response_id": first["id"]})
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
