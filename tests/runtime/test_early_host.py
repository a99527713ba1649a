"""The engine host that is started before its site: it becomes an ordinary host, or leaves nothing behind."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from engine.client import EngineError
from engine.protocol import ModelSpec
from runtime.engines.early_host import host_environment, start_early
from runtime.engines.launch import launchers_of
from runtime.engines.likely import likely_work
from sites.site import EngineConfig
from tests.checkpoints import write_llama, write_tokenizer
from tests.runtime.test_real_engine import Process, eventually

ENGINE = EngineConfig(device="cpu", threads=1, kv_gib=0.01)


def test_the_first_host_is_the_one_that_was_started_early_and_the_next_is_not(tmp_path: Path) -> None:
    early = start_early()
    assert early is not None
    early.tell({})

    async def launch_two() -> list[int | None]:
        (launcher,) = launchers_of(ENGINE, "early-test", early)
        pids = []
        for _ in range(2):
            host = await launcher.launch()
            await host.client.hello()
            pids.append(host.pid)
            await host.stop(grace_s=5.0)
            assert await host.exited()
        launcher.close()
        return pids

    first, second = asyncio.run(launch_two())
    assert first == early.pid
    assert second != first


def test_one_that_died_is_replaced_without_a_word_to_the_client(tmp_path: Path) -> None:
    early = start_early()
    assert early is not None
    early.tell({})
    early.kill()
    asyncio.run(early.wait())

    async def launch() -> int | None:
        (launcher,) = launchers_of(ENGINE, "early-test", early)
        host = await launcher.launch()
        await host.client.hello()
        await host.stop(grace_s=5.0)
        launcher.close()
        return host.pid

    assert asyncio.run(launch()) != early.pid


def test_one_that_was_told_of_a_model_loads_another_as_well(tmp_path: Path) -> None:
    for name in ("likely", "other"):
        write_llama(tmp_path / name)
    header = b'{"a":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}'
    with (tmp_path / "likely" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(16))
    early = start_early()
    assert early is not None
    early.tell({"model": str(tmp_path / "likely"), "device": "cpu"})

    async def load() -> tuple[int, str]:
        (launcher,) = launchers_of(ENGINE, "early-test", early)
        host = await launcher.launch()
        info = await host.client.load_model(ModelSpec("other", str(tmp_path / "other")))
        with pytest.raises(EngineError) as found:
            await host.client.load_model(ModelSpec("likely", str(tmp_path / "likely")))
        await host.stop(grace_s=30.0)  # on a busy machine too
        assert "SIGKILL" not in await host.exited()  # SIGTERM may meet an interpreter that is ending by itself
        launcher.close()
        return info.vocab_size, str(found.value)

    vocab_size, said = asyncio.run(load())
    assert vocab_size > 0
    assert "is missing from model.safetensors" in said


def test_one_that_is_killed_after_it_was_told_is_replaced(tmp_path: Path) -> None:
    write_llama(tmp_path)
    early = start_early()
    assert early is not None
    early.tell({"model": str(tmp_path), "device": "cpu"})

    async def launch() -> tuple[int | None, int]:
        (launcher,) = launchers_of(ENGINE, "early-test", early)
        first = await launcher.launch()
        early.kill()
        assert "SIGKILL" in await first.exited()
        await first.stop(grace_s=0.0)
        second = await launcher.launch()
        info = await second.client.load_model(ModelSpec("tiny", str(tmp_path)))
        await second.stop(grace_s=5.0)
        launcher.close()
        return second.pid, info.vocab_size

    pid, vocab_size = asyncio.run(launch())
    assert pid != early.pid
    assert vocab_size > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[engine]\nthreads = 3\n[[models]]\nsource = "HERE"\nresidency = "auto"\n', {"threads": 3, "device": "auto", "model": "HERE"}),
        ('[engine]\ndevice = "cpu"\n', {"threads": None, "device": "cpu"}),
        ('[[models]]\nsource = "org/name"\n', {"threads": None, "device": "auto"}),
        ('[engine]\ndevices = ["cpu", "cpu"]\n[[models]]\nsource = "HERE"\n', {"threads": None, "device": "auto"}),
        ('[[models]]\nsource = "org/a"\nresidency = "auto"\n[[models]]\nsource = "HERE"\ndtype = "float32"\n',
         {"threads": None, "device": "auto", "model": "HERE", "dtype": "float32"}),
        ('[[models]]\nsource = "HERE"\nresidency = "auto"\n[[models]]\nsource = "HERE"\nresidency = "disk"\n',
         {"threads": None, "device": "auto"}),
        ('[engine]\nthreads = "many"\n', {"threads": None, "device": "auto"}),
        ("models = 3\n", {}),
        ("[engine\n", {}),
    ],
)  # fmt: skip
def test_a_site_file_says_what_its_first_host_will_likely_do(
    text: str, expected: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "site.toml"
    file.write_text(text.replace("HERE", str(tmp_path)))
    if "model" in expected:
        expected = {"dtype": "auto"} | expected | {"model": str(tmp_path)}
    assert likely_work(file) == expected
    assert likely_work(tmp_path / "none.toml") == {}


def test_a_host_that_is_started_early_computes_with_the_threads_it_was_told(tmp_path: Path) -> None:
    program = (
        "from engine import early\nearly.set_threads({'threads': 1})\nimport torch\nprint(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def test_a_site_that_refuses_to_start_leaves_no_host_behind(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text('name = "x"\nplaec = 1\n')
    site = subprocess.Popen([sys.executable, "-m", "runtime", str(file)], stderr=subprocess.PIPE)
    children: list[psutil.Process] = []
    while site.poll() is None and not children:
        children = psutil.Process(site.pid).children()
    _, said = site.communicate(timeout=30)
    assert site.returncode == 1
    assert b"plaec" in said
    assert children
    eventually(lambda: not any(child.is_running() for child in children))


def test_a_site_serves_with_the_threads_that_its_file_names(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    file = tmp_path / "site.toml"
    file.write_text(
        'name = "early"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nweights_host_gib = 0\n'
        f'[[models]]\nname = "tiny"\nsource = "{tmp_path}/tiny"\n'
    )
    site = Process(file, tmp_path / "log")
    try:
        body = {"model": "tiny", "prompt": "warm", "max_tokens": 2}
        assert httpx.post(site.url + "/v1/completions", json=body, timeout=30).status_code == 200
        engine = site.engine()
        assert "engine.early" in engine.cmdline()
    finally:
        assert site.stop() == 0
    eventually(lambda: not engine.is_running())


def test_an_engine_host_inherits_nothing_that_signs_or_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        "PILOTLIGHT_HOP_SECRET",
        "PILOTLIGHT_DEPLOY_TOKEN",
        "PILOTLIGHT_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
    )
    for name in (*secrets, "PILOTLIGHT_CPU", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "something")
    inherited = host_environment()
    assert not inherited.keys() & set(secrets)
    assert inherited.keys() >= {"PILOTLIGHT_CPU", "TOKENIZERS_PARALLELISM", "PATH"}
