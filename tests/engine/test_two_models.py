"""Two models on one arena in a host: one uses idle memory of the other, and returns it for a burst of requests without an error."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from load_tests.in_process_client import InProcessEngineClient
from pilotlight.engine.api.protocol import HostConfig, ModelLoad, ModelSpec, SamplingParams, StepOutput, Submit
from tests.checkpoints import write_llama
from tests.engine.driver import drain, load_engine, random_prompt
from tests.engine.host.test_engine_host import collect, until

pytestmark = pytest.mark.long

CONFIG = HostConfig(threads=1, kv_bytes=1 << 20)  # 136 blocks of 7,680 bytes
BLOCKS = (1 << 20) // 7680


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    for seed, path in enumerate(paths.values()):
        write_llama(path, seed=seed)
    return paths


@pytest.fixture
async def client() -> AsyncIterator[InProcessEngineClient]:
    client = InProcessEngineClient(CONFIG)
    yield client
    await client.close()


def requests(model: str, number: int, prompt_length: int, max_tokens: int) -> list[Submit]:
    sampling = [SamplingParams(max_tokens, temperature=i % 2, seed=i, ignore_eos=True) for i in range(number)]
    prompts = [tuple(random_prompt(prompt_length, seed=100 + i)) for i in range(number)]
    return [Submit(f"{model}{i}", model, prompts[i], sampling[i]) for i in range(number)]


def expected(checkpoint: Path, submits: list[Submit]) -> dict[str, list[int]]:
    """Return the tokens of each request from an engine with enough memory for all."""
    heard = drain(load_engine(checkpoint, kv_tokens=16_000), submits)
    return {name: h.token_ids for name, h in heard.items()}


async def answers(client: InProcessEngineClient, submits: list[Submit]) -> dict[str, list[int]]:
    outputs = await asyncio.gather(*(collect(client, submit) for submit in submits))
    return {s.sequence_id: [t for o in told for t in o.token_ids] for s, told in zip(submits, outputs, strict=True)}


def held(load: ModelLoad) -> int:
    return load.total_blocks - load.free_blocks


async def test_a_burst_on_an_idle_model_takes_its_share_back_without_an_error(
    client: InProcessEngineClient, checkpoints: dict[str, Path]
) -> None:
    frames: list[StepOutput] = []
    client.on_step(frames.append)
    for name, path in checkpoints.items():
        info = await client.load_model(ModelSpec(name, str(path)))
        assert info.total_blocks == BLOCKS
    long = requests("two", 12, prompt_length=90, max_tokens=120)
    burst = requests("one", 10, prompt_length=60, max_tokens=40)
    await answers(
        client, requests("one", 3, prompt_length=50, max_tokens=2)
    )  # leaves cached blocks; then the model is idle
    two = asyncio.create_task(answers(client, long))
    await until(lambda: "two" in client.loads and held(client.loads["two"]) > 0.8 * BLOCKS)
    assert client.loads["one"].running == 0
    before = len(frames)
    one = await answers(client, burst)
    during = [frame.loads for frame in frames[before:]]
    together = [loads for loads in during if loads["one"].running and loads["two"].running]
    assert max(held(loads["one"]) for loads in together) >= 10, "the burst must run several sequences at once"
    assert min(held(loads["two"]) for loads in together) < 0.8 * BLOCKS, "the other model must return memory"
    assert one == expected(checkpoints["one"], burst)
    assert await two == expected(checkpoints["two"], long)
    await until(lambda: all(load.free_blocks == BLOCKS for load in client.loads.values()))


async def test_a_sequence_as_long_as_the_arena_ends_beside_a_busy_model(
    client: InProcessEngineClient, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    write_llama(tmp_path, seed=2, max_position_embeddings=4096)
    info = await client.load_model(ModelSpec("long", str(tmp_path)))
    assert info.context_length == BLOCKS * 16
    await client.load_model(ModelSpec("two", str(checkpoints["two"])))
    whole = requests("long", 1, prompt_length=info.context_length - 6, max_tokens=6)
    others = requests("two", 12, prompt_length=90, max_tokens=60)
    both = await asyncio.gather(answers(client, whole), answers(client, others))
    assert both[1] == expected(checkpoints["two"], others)
    assert both[0] == expected(tmp_path, whole)


async def test_a_reservation_made_later_is_kept_free_and_unloading_returns_it(
    client: InProcessEngineClient, checkpoints: dict[str, Path]
) -> None:
    await client.load_model(ModelSpec("two", str(checkpoints["two"])))
    long = requests("two", 12, prompt_length=90, max_tokens=120)
    two = asyncio.create_task(answers(client, long))
    await until(lambda: "two" in client.loads and held(client.loads["two"]) > 0.8 * BLOCKS)
    info = await client.load_model(ModelSpec("one", str(checkpoints["one"]), kv_tokens=1000))
    assert info.total_blocks == 63
    burst = requests("one", 5, prompt_length=60, max_tokens=10)
    assert await answers(client, burst) == expected(checkpoints["one"], burst)
    assert client.loads["one"].total_blocks == client.loads["one"].free_blocks == 63
    assert client.loads["two"].total_blocks == 8 * (64 << 10) // 7680
    await client.unload_model("one")
    assert await two == expected(checkpoints["two"], long)
    await until(lambda: client.loads["two"].free_blocks == BLOCKS)
