"""A site whose model has left a bootstrap program: its next start answers by it, and the stream goes on with the model itself."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.checkpoints import write_llama, write_tokenizer
from tests.cpu_kernels import C_LIBRARY, computing_with
from tests.runtime.test_real_engine import Process
from tests.waiting import until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no file is mapped in place")


@pytest.fixture(autouse=True)
def the_c_library_computes() -> Iterator[None]:
    """Bootstrap programs are lists of its calls."""
    with computing_with(C_LIBRARY):
        yield


LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": [5, 6, 7],
    "max_tokens": 240,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 4,
    "logit_bias": None,
}


def write_site(tmp_path: Path) -> Path:
    write_llama(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    file = tmp_path / "opened.toml"
    file.write_text(
        'name = "opened"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nstandby = false\nweights_host_gib = 0\n'
        f'[[models]]\nname = "tiny"\nsource = "{tmp_path}/tiny"\nresidency = "auto"\n'
    )
    return file


def started(file: Path) -> Process:
    return Process(file, file.parent / "log", PILOTLIGHT_BOOTSTRAP=str(file.parent / "bootstrap"))


def programs(file: Path) -> list[Path]:
    return list((file.parent / "bootstrap").glob("*.bootstrap"))


def asked(site: Process, **changes: Any) -> dict[str, Any]:
    answer = httpx.post(site.url + "/v1/completions", json=LONG | changes, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def was_opened(site: Process) -> bool:
    spans = httpx.get(site.url + "/timeline").json()["spans"]
    return any(span["name"] == "bootstrap" for span in spans)


class FirstLife(NamedTuple):
    folder: Path
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def first_life(process_tier: None, tmp_path_factory: pytest.TempPathFactory) -> FirstLife:
    """What a site leaves at its first end, and what it has answered."""
    with computing_with(C_LIBRARY):
        file = write_site(tmp_path_factory.mktemp("first"))
        site = started(file)
        try:
            answer = asked(site)
            assert not was_opened(site)
            until(lambda: len(programs(file)) == 1)
        finally:
            assert site.stop() == 0
    return FirstLife(file.parent, answer)


@pytest.fixture
def site_file(first_life: FirstLife, tmp_path: Path) -> Path:
    """The site's file and what lies beside it, each test's own."""
    shutil.copytree(first_life.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "opened.toml"
    file.write_text(file.read_text().replace(str(first_life.folder), str(tmp_path)))
    return file


def test_the_second_start_answers_as_the_first_did(first_life: FirstLife, site_file: Path) -> None:
    """What it can do by its program, what it cannot, and what the model itself computes later."""
    expected = first_life.answer
    site = started(site_file)
    try:
        with httpx.stream("POST", site.url + "/v1/completions", json=LONG | {"stream": True}, timeout=60) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected["text"]
        assert was_opened(site)
        assert len(asked(site, logprobs=1, max_tokens=5)["logprobs"]["tokens"]) == 5
        assert asked(site) == expected
        status = httpx.get(site.url + "/status").json()
        assert [model["residency"] for model in status["models"]] == ["device"]
    finally:
        assert site.stop() == 0


def test_a_host_that_is_killed_while_its_model_is_only_opened_is_replaced_under_the_stream(
    first_life: FirstLife, site_file: Path
) -> None:
    expected = first_life.answer
    site = started(site_file)
    try:
        with httpx.stream("POST", site.url + "/v1/completions", json=LONG | {"stream": True}, timeout=60) as stream:
            text = ""
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not text:
                    site.engine().send_signal(signal.SIGKILL)
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert text == expected["text"]
    finally:
        assert site.stop() == 0


def test_weights_that_have_become_no_numbers_are_refused_as_ever(site_file: Path) -> None:
    """They are another checkpoint, and the program is of the old one."""
    weights = site_file.parent / "tiny" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4096:] = b"\xff" * 4096
    weights.write_bytes(content)
    site = started(site_file)
    try:
        answer = httpx.post(site.url + "/v1/completions", json=LONG, timeout=60)
        assert answer.status_code == 500
        assert "holds NaN" in answer.text
    finally:
        assert site.stop() == 0


def test_a_site_that_stops_as_soon_as_it_has_answered_stops_cleanly(site_file: Path) -> None:
    """In the middle of the import of torch, whose threads must not abort the process."""
    for pause_s in (0.0, 0.1, 0.3):
        site = started(site_file)
        asked(site, max_tokens=1)
        time.sleep(pause_s)
        assert site.stop() == 0
        assert "Abort" not in site.log.read_text()
        assert "Traceback" not in site.log.read_text()
