"""Embeddings of tiny checkpoints through a site: the official client gets the vectors that `transformers` computes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer

from tests.checkpoints import write_llama, write_tokenizer
from tests.embedders import EMBEDDERS, reference, write_embedder
from tests.runtime.test_real_engine import Process

pytestmark = pytest.mark.smoke

NAMES = {"qwen": "qwen3, last token", "bert": "bert, mean, of any length"}
TEXTS = ["the pilot light", "burns small and blue until somebody wants warm water", "a hot meal " * 7]  # data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    write_llama(folder / "chat")
    write_tokenizer(folder / "chat")
    written = {}
    for name, kind in NAMES.items():
        written[name] = write_embedder(folder / name, EMBEDDERS[kind])
        write_tokenizer(folder / name)
    return written


@pytest.fixture(scope="module")
def site(folder: Path, models: dict[str, Any]) -> Iterator[Process]:
    file = folder / "ams1.toml"
    file.write_text(
        'name = "ams1"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nmax_num_batched_tokens = 16\n'
        "[limits]\ncontinue_within_s = 60.0\n"  # engine hosts start slowly on a busy machine
        + "".join(f'[[models]]\nname = "{name}"\nsource = "{folder}/{name}"\n' for name in ("chat", *NAMES))
    )
    process = Process(file, folder / "log")
    yield process
    if process.popen.poll() is None:
        process.stop()


@pytest.mark.parametrize("name", NAMES)
def test_the_openai_client_gets_what_transformers_computes(
    site: Process, folder: Path, models: dict[str, Any], name: str
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / name / "tokenizer.json"))
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="k", max_retries=0)
    answer = client.embeddings.create(model=name, input=TEXTS)  # as base64, the client's default
    as_numbers = client.embeddings.create(model=name, input=TEXTS, encoding_format="float")
    token_ids = [tokenizer.encode(text).ids for text in TEXTS]
    as_ids = client.embeddings.create(model=name, input=token_ids)
    client.close()
    assert answer.usage.prompt_tokens == sum(map(len, token_ids))
    for i, ids in enumerate(token_ids):
        expected = reference(models[name], EMBEDDERS[NAMES[name]], ids)
        for made in (answer, as_numbers, as_ids):
            assert (torch.tensor(made.data[i].embedding) - expected).abs().max() <= 1e-4


def data(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def is_at_work(site: Process) -> bool:
    status = httpx.get(site.url + "/status").json()
    return any(model["running"] + model["waiting"] > 0 for model in status["models"])


def test_a_killed_engine_costs_embeddings_only_time(site: Process) -> None:
    asked = {"model": "qwen", "input": [f"{text} {i}" for i in range(240) for text in TEXTS]}
    with httpx.Client(base_url=site.url, timeout=60) as client:
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(client.post, "/v1/embeddings", json=asked)
            while not is_at_work(site):
                assert not asking.done(), "all embeddings were computed before the host could be killed"
            site.engine().kill()
            disturbed = data(asking.result(60))
        # Last, because cached blocks are not computed again.
        undisturbed = data(client.post("/v1/embeddings", json=asked))
        for before, after in zip(undisturbed, disturbed, strict=True):
            assert torch.allclose(torch.tensor(before["embedding"]), torch.tensor(after["embedding"]), atol=1e-5)
