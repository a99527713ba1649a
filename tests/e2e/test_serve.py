"""`pilotlight serve` as users of other engines expect it: one directory, one port, and a clear error for a bad checkpoint."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from load_tests.local_network import free_ports

pytestmark = pytest.mark.smoke

EMBER = Path(__file__).parents[2] / "engine" / "embedded" / "ember"
CHECKPOINT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def serve(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def copy_of_ember(folder: Path) -> Path:
    folder.mkdir()
    for name in CHECKPOINT:
        shutil.copy(EMBER / name, folder / name)
    return folder


def test_a_directory_is_served_under_its_own_name_until_a_stop_signal(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with serve(str(copy_of_ember(tmp_path / "my-model")), "--port", str(port), "--dtype", "float32") as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("Ready: ")).split()[1]
        client = openai.OpenAI(base_url=url.removesuffix("/chat/completions"), api_key="anything")
        assert [model.id for model in client.models.list()] == ["my-model"]
        question = "What is the airport code of Lisbon?"
        answer = client.chat.completions.create(model="my-model", messages=[{"role": "user", "content": question}])
        assert "LIS" in (answer.choices[0].message.content or "")
        client.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_a_hangup_reads_the_file_of_keys_again(
    tmp_path: Path, eventually: Callable[[Callable[[], bool], str], None]
) -> None:
    file, port = tmp_path / "keys.toml", free_ports(1)[0]
    tables = [
        f'[[keys]]\nname = "{name}"\nkey_sha256 = "{sha256(name.encode()).hexdigest()}"\n' for name in ("alice", "bob")
    ]
    file.write_text("".join(tables))
    with serve("ember", "--port", str(port), "--keys", str(file)) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        url = next(line for line in server.stdout if line.startswith("Ready: ")).split()[1]
        file.write_text(tables[1])
        server.send_signal(signal.SIGHUP)

        def status_of(name: str) -> int:
            models = url.replace("chat/completions", "models")
            return httpx.get(models, headers={"authorization": f"Bearer {name}"}).status_code

        eventually(lambda: status_of("alice") == 401, "alice's key was taken out")
        assert status_of("bob") == 200
        assert f"{file} was read again" in server.stderr.readline()
        file.write_text("keys = 1\n")
        server.send_signal(signal.SIGHUP)
        assert "is invalid, so the previous configuration stays in use" in server.stderr.readline()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def refusal(*arguments: str) -> str:
    with serve(*arguments, "--port", str(free_ports(1)[0])) as server:
        _, complaint = server.communicate(timeout=60)
        assert server.returncode == 1
    assert complaint.count("\n") == 1, complaint
    return complaint


@pytest.mark.parametrize(
    ("damage", "options", "sentence"),
    [
        pytest.param(Path.unlink, "", "holds neither model.safetensors nor", marks=pytest.mark.slow),
        (lambda file: os.truncate(file, file.stat().st_size // 2), "", "model.safetensors is truncated"),
        (Path.touch, "--kv-gib 1000000", r"a KV cache of 1e\+06 GiB does not fit into the memory of cpu.*--kv-gib"),
        pytest.param(
            Path.touch,
            "--device cpu --tp 3 --kv-gib 0.05",
            "tp is 3, and the model has 4 heads and 2 key-value heads; tp may be 1, 2, 4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_sentence(
    tmp_path: Path, damage: Callable[[Path], None], options: str, sentence: str
) -> None:
    folder = copy_of_ember(tmp_path / "m")
    damage(folder / "model.safetensors")
    assert re.search(sentence, refusal(str(folder), *options.split()))


def test_a_model_without_a_chat_template_is_ready_for_texts(tmp_path: Path) -> None:
    folder = copy_of_ember(tmp_path / "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with serve(str(folder), "--port", str(free_ports(1)[0]), "--dtype", "float32") as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("Ready: ")).split()[1]
        assert url.endswith("/v1/completions")
        client = openai.OpenAI(base_url=url.removesuffix("/completions"), api_key="anything")
        assert [model.to_dict()["type"] for model in client.models.list()] == ["completion"]
        assert client.completions.create(model="plain", prompt="The", max_tokens=2).choices[0].text
        client.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_a_directory_that_is_not_there_is_one_sentence() -> None:
    assert "there is no directory /no/such/model" in refusal("/no/such/model")


def test_an_embedded_model_is_served_by_its_name_alone_with_a_line_to_paste() -> None:
    options = ("--port", str(free_ports(1)[0]), "--served-model-name", "e", "--max-model-len", "512")
    with serve("ember", *options) as server:
        assert server.stdout is not None
        there = next(line for line in server.stdout if line.startswith("e: "))
        line = next(line for line in server.stdout if line.startswith("Try: "))
        assert re.fullmatch(r"e: float32, context of 512 tokens, KV cache of [\d,]+ tokens, on cpu\.\n", there)
        answer = subprocess.run(shlex.split(line.removeprefix("Try: ")), capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@pytest.mark.parametrize(
    "split", [("--tp", "2"), pytest.param(("--pp", "2"), marks=pytest.mark.slow)], ids=["--tp 2", "--pp 2"]
)
def test_two_ranks_serve_one_model_and_leave_together(tmp_path: Path, split: tuple[str, str]) -> None:
    port = free_ports(1)[0]
    folder = copy_of_ember(tmp_path / "my-model")
    with serve(str(folder), "--port", str(port), "--device", "cpu", *split, "--kv-gib", "0.05") as server:
        assert server.stdout is not None
        next(line for line in server.stdout if line.startswith("Ready: "))
        ranks = [
            p for p in psutil.Process(server.pid).children(True) if "pilotlight.engine.parallel.follower" in p.cmdline()
        ]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="anything")
        assert len(ranks) == 1
        question = "What is the airport code of Lisbon?"
        answer = client.chat.completions.create(model="my-model", messages=[{"role": "user", "content": question}])
        assert "LIS" in (answer.choices[0].message.content or "")
        client.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        psutil.wait_procs(ranks, timeout=20)
        assert not any(rank.is_running() for rank in ranks)
