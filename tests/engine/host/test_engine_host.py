"""An engine host and its client, in the same process and over a socket in a separate process."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from safetensors.torch import load_file, save_file

from load_tests.in_process_client import InProcessEngineClient
from pilotlight.engine.api.client import EngineClient, EngineError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams, StepOutput, Submit, TokenOutput
from pilotlight.engine.api.socket_client import SocketEngineClient
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.host.engine_host import address_problem, peer_address_problem
from tests.checkpoints import write_llama
from tests.engine.driver import load_engine, one, random_prompt, submit

CONFIG = HostConfig(threads=1, kv_bytes=1 << 20)
PROMPT = random_prompt(40, seed=1)
ROOT = Path(__file__).parents[3]


@contextlib.asynccontextmanager
async def host_process(
    directory: Path, config: HostConfig = CONFIG
) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    address = f"ipc://{directory}/engine"
    arguments = [
        "-m",
        "pilotlight.engine.host.engine_host",
        "--address",
        address,
        "--config",
        msgspec.json.encode(config).decode(),
    ]
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT) as process:  # noqa: ASYNC220 (a fork, then nothing waits)
        try:
            yield process, address
        finally:
            process.kill()


@pytest.fixture
async def in_process() -> AsyncIterator[InProcessEngineClient]:
    client = InProcessEngineClient(CONFIG)
    yield client
    await client.close()


@pytest.fixture
async def client(in_process: InProcessEngineClient) -> EngineClient:
    """Return a client whose host runs in this process.

    A separate process takes seconds to start, so only one test sends these requests to one.
    """
    return in_process


async def load(client: EngineClient, checkpoint: Path, name: str = "tiny") -> None:
    await client.load_model(ModelSpec(name, str(checkpoint), kv_tokens=512))


async def collect(
    client: EngineClient, message: Submit, then: Callable[[], Awaitable[None]] | None = None
) -> list[TokenOutput]:
    """Return every output of a sequence; run `then` after the first one."""
    collected = []
    async with client.generate(message) as outputs:
        async for output in outputs:
            collected.append(output)
            if then and len(collected) == 1:
                await then()
    return collected


def at_once(act: Callable[..., None], *arguments: str) -> Callable[[], Awaitable[None]]:
    async def then() -> None:
        act(*arguments)

    return then


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


async def test_tokens_arrive_in_order_and_as_the_engine_alone_computes_them(
    client: EngineClient, checkpoint: Path
) -> None:
    progress: list[tuple[int, int]] = []
    info = await client.load_model(
        ModelSpec("tiny", str(checkpoint), kv_tokens=512),
        lambda told: progress.append((told.done_bytes, told.total_bytes)),
    )
    assert (info.context_length, info.vocab_size, info.total_blocks) == (256, 431, 32)
    assert progress[-1] == (info.weights_bytes, info.weights_bytes)
    frames: list[StepOutput] = []
    client.on_step(frames.append)
    requests = [submit(f"s{i}", PROMPT, temperature=1.0, seed=i, max_tokens=20) for i in range(6)]
    answers = await asyncio.gather(*(collect(client, request) for request in requests))
    alone = load_engine(checkpoint)
    for request, outputs in zip(requests, answers, strict=True):
        assert [t for output in outputs for t in output.token_ids] == one(alone, request).token_ids
        assert [output.finish_reason for output in outputs] == [None] * 19 + ["length"]
        assert outputs[0].num_cached_tokens is not None
    assert max(len(frame.outputs) for frame in frames) > 1, "one frame must carry every sequence's tokens"
    await until(lambda: client.loads["tiny"].free_blocks == 32)
    assert client.loads["tiny"].output_tokens == 120


async def test_leaving_the_scope_aborts_and_frees_the_blocks(client: EngineClient, checkpoint: Path) -> None:
    await load(client, checkpoint)
    frames: list[StepOutput] = []
    client.on_step(frames.append)
    async with client.generate(submit("a", PROMPT, max_tokens=200)) as outputs:
        async for _ in outputs:
            break
    await until(lambda: any(o.finish_reason == "abort" for frame in frames for o in frame.outputs))
    (last,) = [frame for frame in frames if any(o.finish_reason == "abort" for o in frame.outputs)]
    assert last.loads["tiny"].free_blocks == 32
    assert last.loads["tiny"].running == 0


async def test_a_cancelled_reader_aborts_its_sequence(in_process: EngineClient, checkpoint: Path) -> None:
    await load(in_process, checkpoint)
    started = asyncio.Event()

    async def read() -> None:
        async with in_process.generate(submit("a", PROMPT, max_tokens=200)) as outputs:
            async for _ in outputs:
                started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: in_process.loads["tiny"].free_blocks == 32)
    assert len(await collect(in_process, submit("b", PROMPT, max_tokens=3))) == 3


async def test_refusals_are_errors_with_a_code_and_a_sentence(client: EngineClient, checkpoint: Path) -> None:
    with pytest.raises(EngineError, match="loaded are: none") as missing:
        await collect(client, submit("a", PROMPT))
    assert missing.value.code == "model_not_found"
    await load(client, checkpoint)
    with pytest.raises(EngineError, match="at most 255") as too_long:
        await collect(client, submit("b", [3] * 300))
    assert too_long.value.code == "context_length_exceeded"
    async with client.generate(submit("c", PROMPT, max_tokens=100)):
        with pytest.raises(EngineError, match="already in use"):
            await collect(client, submit("c", PROMPT))


async def test_a_second_sequence_of_an_open_id_leaves_the_first_alone(
    in_process: InProcessEngineClient, checkpoint: Path
) -> None:
    await load(in_process, checkpoint)
    expected = [o.token_ids for o in await collect(in_process, submit("a", PROMPT, max_tokens=60))]
    seen = []
    async with in_process.generate(submit("b", PROMPT, max_tokens=60)) as outputs:
        in_process.send(submit("b", [4, 5, 6], max_tokens=2))  # a faulty client that uses an id twice
        in_process.send(replace(submit("b", [4, 5, 6], max_tokens=2), model="another"))
        seen = [output.token_ids async for output in outputs]
    assert seen == expected


async def test_a_checkpoint_that_fails_to_load_leaves_the_host_serving(
    client: EngineClient, checkpoint: Path, tmp_path: Path
) -> None:
    await load(client, checkpoint)
    damaged = tmp_path / "damaged"
    write_llama(damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(EngineError, match="truncated") as failed:
        await load(client, damaged, "damaged")
    assert failed.value.code == "model_load_failed"
    assert len(await collect(client, submit("a", PROMPT, max_tokens=3))) == 3
    write_llama(damaged)
    await load(client, damaged, "damaged")


async def test_models_are_loaded_and_unloaded_while_others_serve(in_process: EngineClient, checkpoint: Path) -> None:
    await load(in_process, checkpoint)
    async with in_process.generate(submit("a", PROMPT, max_tokens=200)) as outputs:
        first = [await anext(outputs)]
        await load(in_process, checkpoint, "other")
        message = Submit("b", "other", tuple(PROMPT), SamplingParams(5, temperature=0.0))
        assert len(await collect(in_process, message)) == 5
        await in_process.unload_model("other")
        rest = [output async for output in outputs]
    assert len(first + rest) == 200
    assert set(in_process.loads) == {"tiny"}
    with pytest.raises(EngineError, match="'other' is not loaded"):
        await collect(in_process, message)


async def test_unloading_ends_the_models_sequences(in_process: EngineClient, checkpoint: Path) -> None:
    await load(in_process, checkpoint)
    with pytest.raises(EngineError, match="was unloaded"):
        await collect(in_process, submit("a", PROMPT, max_tokens=200), then=lambda: in_process.unload_model("tiny"))
    await load(in_process, checkpoint)
    assert len(await collect(in_process, submit("b", PROMPT, max_tokens=3))) == 3


async def test_a_model_is_loaded_once_however_often_it_is_asked_for(in_process: EngineClient, checkpoint: Path) -> None:
    await asyncio.gather(*(load(in_process, checkpoint) for _ in range(3)))
    await load(in_process, checkpoint)
    with pytest.raises(EngineError, match="unload it first"):
        await in_process.load_model(ModelSpec("tiny", str(checkpoint), kv_tokens=256))


async def test_an_idle_host_is_heard_from(client: EngineClient, checkpoint: Path) -> None:
    await load(client, checkpoint)
    heard = client.last_event_at
    await until(lambda: client.last_event_at > heard)
    assert client.loads["tiny"].running == 0


@pytest.mark.process
async def test_a_host_in_a_process_of_its_own_does_the_same(checkpoint: Path, tmp_path: Path) -> None:
    async with host_process(tmp_path) as (process, address):
        client = SocketEngineClient(address)
        for same in (
            test_refusals_are_errors_with_a_code_and_a_sentence,
            test_tokens_arrive_in_order_and_as_the_engine_alone_computes_them,
            test_leaving_the_scope_aborts_and_frees_the_blocks,
            test_an_idle_host_is_heard_from,
        ):
            await same(client, checkpoint)
            await client.unload_model("tiny")
        await test_a_checkpoint_that_fails_to_load_leaves_the_host_serving(client, checkpoint, tmp_path)
        await client.close()
        assert await asyncio.to_thread(process.wait, 10) == 0


async def test_numbers_gone_bad_end_the_request_but_not_the_model(in_process: EngineClient, tmp_path: Path) -> None:
    """A product of finite weights overflows for one token: its request fails with a reason, and later requests are unaffected."""
    write_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0"
    tensors["model.embed_tokens.weight"][:, 0] = 0.0  # only token 300 has a value in the first dimension
    tensors["model.embed_tokens.weight"][300, 0] = 10.0
    tensors[f"{layer}.self_attn.o_proj.weight"][0] = 0.0
    for part in ("gate", "up"):
        tensors[f"{layer}.mlp.{part}_proj.weight"][0, 0] = 1e20
    save_file(tensors, tmp_path / "model.safetensors")
    await load(in_process, tmp_path)
    prompt = random_prompt(40, seed=2, vocab=299)
    before = [o.token_ids for o in await collect(in_process, submit("a", prompt, max_tokens=1))]
    with pytest.raises(EngineError, match="not finite"):
        await collect(in_process, submit("b", [*prompt[:35], 300, 5]))
    assert [o.token_ids for o in await collect(in_process, submit("c", prompt, max_tokens=1))] == before


async def test_a_step_that_fails_once_ends_no_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pilotlight.engine.core.step import StepInput
    from pilotlight.engine.execution.runner import ModelRunner

    client = InProcessEngineClient(CONFIG)
    await load(client, checkpoint)
    expected = await collect(client, submit("a", PROMPT, max_tokens=4))
    forward, calls = ModelRunner.forward, iter(range(1000))

    def fail_third(self: ModelRunner, step: StepInput) -> object:
        if next(calls) == 3:
            raise RuntimeError("an operation that is unknown")
        return forward(self, step)

    monkeypatch.setattr(ModelRunner, "forward", fail_third)
    again = await collect(client, submit("b", PROMPT, max_tokens=4))
    assert [o.token_ids for o in again] == [o.token_ids for o in expected]
    assert next(calls) > 4, "no step has failed and been repeated"
    assert client.loads["tiny"].free_blocks == 32
    await client.close()


@pytest.mark.parametrize(
    ("error", "failures"),  # requests that fail, twice each, before the host ends
    [("an operation that is unknown", 2), ("CUDA error: an illegal memory access was encountered", 0)],
)
async def test_a_device_whose_every_step_fails_ends_its_host(
    error: str, failures: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pilotlight.engine.core.step import StepInput
    from pilotlight.engine.execution.runner import ModelRunner

    client = InProcessEngineClient(CONFIG)
    await load(client, checkpoint)
    touched = 0

    def fail(self: ModelRunner, step: StepInput) -> object:
        nonlocal touched
        touched += 1
        raise RuntimeError(error)

    def touch(*_: object) -> None:
        if touched > 2 * failures:  # after these failures every operation of the device fails
            raise RuntimeError(error)

    monkeypatch.setattr(Engine, "on_idle", touch)
    monkeypatch.setattr(Engine, "close", touch)
    monkeypatch.setattr(ModelRunner, "forward", fail)
    for _ in range(failures):
        with pytest.raises(EngineError, match="a step of tiny failed") as failed:
            await collect(client, submit("a", PROMPT))
        assert failed.value.code == "request_failed"
        assert client.death is None
    with pytest.raises(EngineError, match="the device counts as broken"):
        await collect(client, submit("a", PROMPT))
    assert error in str(client.death)
    await client.close()


@pytest.mark.process
async def test_a_killed_host_ends_every_stream_with_an_error(tmp_path: Path, checkpoint: Path) -> None:
    async with host_process(tmp_path) as (process, address):
        client = SocketEngineClient(address)
        await load(client, checkpoint)
        reading = [collect(client, submit(name, PROMPT, max_tokens=200), then=at_once(process.kill)) for name in "abc"]
        errors = await asyncio.gather(*reading, return_exceptions=True)
        assert [getattr(error, "code", error) for error in errors] == ["engine_error"] * 3
        with pytest.raises(EngineError, match="went away"):
            await load(client, checkpoint, "other")
        with pytest.raises(EngineError, match="went away"):
            await collect(client, submit("d", PROMPT))
        assert client.loads == {}
        await client.close()


@pytest.mark.process
async def test_messages_that_a_dead_host_never_read_keep_no_caller_waiting(tmp_path: Path, checkpoint: Path) -> None:
    async with host_process(tmp_path) as (process, address):
        client = SocketEngineClient(address)
        await load(client, checkpoint)
        process.send_signal(signal.SIGSTOP)
        # More bytes than fit in the operating system's buffers.
        unread = [client.load_model(ModelSpec(str(i), "x" * (3 << 20))) for i in range(20)]
        waiting = asyncio.gather(*unread, return_exceptions=True)
        await asyncio.sleep(0.5)
        process.kill()
        assert all(isinstance(error, EngineError) and "went away" in str(error) for error in await waiting)
        closing = asyncio.create_task(client.close())
        done, _ = await asyncio.wait({closing}, timeout=60)
        assert done


async def test_a_supervisor_may_declare_the_host_dead(checkpoint: Path) -> None:
    client = InProcessEngineClient(CONFIG)
    await load(client, checkpoint)
    with pytest.raises(EngineError, match="no step for 30 s"):
        await collect(client, submit("a", PROMPT, max_tokens=200), then=at_once(client.fail, "no step for 30 s"))
    await client.close()


async def test_closing_the_client_ends_open_calls_and_the_host(checkpoint: Path) -> None:
    client = InProcessEngineClient(CONFIG)
    await load(client, checkpoint)
    async with client.generate(submit("a", PROMPT, max_tokens=200)) as outputs:
        await anext(outputs)
        await client.close()
        with pytest.raises(EngineError):
            async for _ in outputs:
                pass
    with pytest.raises(EngineError):
        await load(client, checkpoint)


@pytest.mark.process
async def test_sigterm_is_a_death_with_a_reason_and_the_process_ends_cleanly(tmp_path: Path, checkpoint: Path) -> None:
    async with host_process(tmp_path) as (process, address):
        client = SocketEngineClient(address)
        await load(client, checkpoint)
        with pytest.raises(EngineError, match=r"shut down|went away"):
            await collect(client, submit("a", PROMPT, max_tokens=200), then=at_once(process.terminate))
        assert client.death is not None, "the recovery of dead hosts' sequences continues this one, too"
        assert await asyncio.to_thread(process.wait, 10) == 0
        await client.close()


@pytest.mark.process
async def test_a_host_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        f"host = subprocess.Popen([sys.executable, '-m', 'pilotlight.engine.host.engine_host', '--address', 'ipc://{tmp_path}/engine'])\n"
        "print(host.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        host_pid = int(parent.stdout.readline())
        client = SocketEngineClient(f"ipc://{tmp_path}/engine")
        await client.unload_model("nothing")  # returns once the host is running
        parent.kill()
    await until(lambda: not is_alive(host_pid))
    await client.close()


@pytest.mark.process
def test_a_host_whose_parent_died_before_it_looked_ends_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    command = [
        sys.executable,
        "-m",
        "pilotlight.engine.host.engine_host",
        "--address",
        f"ipc://{tmp_path}/engine",
        "--parent",
        str(gone.pid),
    ]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.process
def test_a_host_that_ends_while_a_thread_is_inside_torch_is_not_aborted(tmp_path: Path) -> None:
    """Importing torch takes long on a busy machine, and may still run when a host is asked to end."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    script = (
        "import torch, pilotlight.engine.host.engine_host, pilotlight.engine.host.model_loader\n"
        "def prepare(*_):\n    x = torch.ones(300, 300)\n    while True:\n        x @ x\n"
        "pilotlight.engine.host.model_loader.prepare = prepare\n"
        f"pilotlight.engine.host.engine_host.main(['--address', 'ipc://{tmp_path}/engine', '--parent', '{gone.pid}'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.process
async def test_a_new_front_end_takes_over_and_the_old_ones_sequences_end(tmp_path: Path, checkpoint: Path) -> None:
    async with host_process(tmp_path) as (_, address):
        old, new = SocketEngineClient(address), SocketEngineClient(address)
        await load(old, checkpoint)
        async with old.generate(submit("a", PROMPT, max_tokens=200)) as outputs:
            await anext(outputs)
            await load(new, checkpoint)
            await until(lambda: "tiny" in new.loads and new.loads["tiny"].free_blocks == 32)
            assert len(await collect(new, submit("b", PROMPT, max_tokens=3))) == 3
            old.fail("replaced")
        await new.close()
        await old.close()


@pytest.mark.process
async def test_frames_that_are_no_commands_are_ignored(tmp_path: Path, checkpoint: Path) -> None:
    async with host_process(tmp_path) as (process, address):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(address)
            stranger.send(b"\xc1 nonsense")
            stranger.send_multipart([b"", b"\x93\x01\x02\x03"])
        client = SocketEngineClient(address)
        await load(client, checkpoint)
        assert process.poll() is None
        await client.close()


@pytest.mark.process
async def test_a_wrong_configuration_is_one_sentence() -> None:
    arguments = [
        "-m",
        "pilotlight.engine.host.engine_host",
        "--address",
        "ipc:///nowhere",
        "--config",
        '{"threads": "many"}',
    ]
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("pilotlight.engine.host.engine_host: --config is not a valid HostConfig")
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_a_kind_of_cpu_that_is_unknown_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pilotlight.engine.host.engine_host", "--address", "ipc:///nowhere"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PILOTLIGHT_CPU": "avx3"},
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stderr == "pilotlight.engine.host.engine_host: PILOTLIGHT_CPU=avx3 is no kind of CPU: "
        "set it to avx2, avx512, avx512vnni, avx512bf16, amx or torch, or unset it\n"
    )


@pytest.mark.process
def test_a_host_that_begins_afresh_removes_what_hosts_before_it_built(tmp_path: Path) -> None:
    built = tmp_path / "pilotlight/kernels/a-b.so"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"damaged")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "pilotlight.engine.host.engine_host",
        "--afresh",
        "--address",
        f"ipc://{tmp_path}/engine",
    ]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as host:
        assert host.stderr is not None
        said = host.stderr.readline()
        host.kill()
    assert f"removed {built}" in said
    assert not built.exists()


@pytest.mark.process
def test_a_host_answers_before_torch_is_imported() -> None:
    """The host binds its socket first. Importing torch takes a second or two, and the loader's thread does it."""
    modules = ("host.engine_host", "host.socket_transport", "api.client")
    imports = "".join(f"import pilotlight.engine.{name}\n" for name in modules)
    script = f"{imports}import sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.process
def test_the_engine_imports_neither_compilers_nor_transformers() -> None:
    """Importing torch._dynamo alone takes seconds at every start, and in-process use needs no pyzmq."""
    script = (
        "import sys, pilotlight.engine.loading.loading, pilotlight.engine.api.client, pilotlight.engine.host.engine_host\n"
        "heavy = ('torch._dynamo', 'torch._inductor', 'transformers', 'triton', 'zmq', 'safetensors', 'PIL')\n"
        "found = [name for name in heavy if name in sys.modules]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.long
async def test_a_client_that_is_closed_when_those_who_asked_have_left_leaves_no_exception_unread(
    tmp_path: Path,
) -> None:
    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    client = SocketEngineClient(f"ipc://{tmp_path}/nobody")
    asking = asyncio.create_task(client.hello())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await client.close()
    gc.collect()
    assert not unread


@pytest.mark.parametrize(
    "address",
    ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://192.0.2.1:5555", "tcp://[::]:5555", "tcp://host.example:5555"],
)
def test_a_host_takes_no_commands_from_other_machines(address: str) -> None:
    assert address in (address_problem(address) or "")


@pytest.mark.parametrize("address", ["ipc:///run/x", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_a_host_listens_on_its_own_machine(address: str) -> None:
    assert address_problem(address) is None


def test_a_host_serves_no_blocks_to_other_machines_without_keys() -> None:
    for address, is_refused in (("tcp://0.0.0.0:7000", True), ("tcp://127.0.0.1:7000", False), ("ipc:///p", False)):
        config = HostConfig(peer_address=address)
        problem = peer_address_problem(config)
        assert (problem is not None) is is_refused
        if problem is not None:
            assert problem.startswith(f"peer_address {address} is reachable from other machines")
        assert peer_address_problem(replace(config, peer_keys="/keys")) is None
    assert peer_address_problem(HostConfig()) is None
