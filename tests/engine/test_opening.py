"""Opening programs: what a model answers before torch is there is what it answers afterwards, and no program is believed with which something is
wrong."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.loading import load_model, make_kv_memory
from engine.opening import kept, making
from engine.opening.making import Writing
from engine.opening.opener import OpenedModel, Opener
from engine.opening.program import read
from engine.protocol import HostConfig, ModelSpec, Submit
from kernels.cpu import functions, mapped_file
from tests.checkpoints import write_llama
from tests.cpu_kernels import C_LIBRARY, computing_with
from tests.engine.driver import Heard, drain, one, random_prompt, submit
from tests.engine.families import MODELS, write_family
from tests.engine.test_decode_programs import DENSE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no file is mapped in place")

CONFIG = HostConfig(threads=1, kv_bytes=16 << 20)
Leave = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _the_c_library_computes() -> Iterator[None]:
    with computing_with(C_LIBRARY):
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(kept.SWITCH, str(tmp_path / "openings"))
    return tmp_path / "openings"


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """The engine of a model that has left its program, if it can."""
    writers: list[Writing] = []

    def begin(make: Any) -> Writing:
        writers.append(Writing(make, first_after_s=0.0))
        return writers[-1]

    monkeypatch.setattr("engine.loading.Writing", begin)

    def leave(directory: Path, config: HostConfig = CONFIG, **spec: Any) -> Engine:
        wanted = ModelSpec("tiny", str(directory), **spec)
        loaded = load_model(wanted, config, make_kv_memory(config), leaves_opening=True)
        assert writers[-1].wait(30)
        return loaded.engine

    return leave


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    write_llama(directory)
    return directory


def opened(directory: Path, config: HostConfig = CONFIG, **spec: Any) -> OpenedModel:
    wanted = ModelSpec("tiny", str(directory), **spec)
    opener = Opener.find(directory, wanted.dtype, threads=1)
    assert opener is not None
    model = opener.open(wanted, config)
    assert model is not None
    return model


def requests(count: int, max_tokens: int = 30) -> list[Submit]:
    """Greedy, drawn, and drawn from what min-p leaves; prompts of one row and of several programs' rows."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 1.3, "min_p": 0.1, "seed": (1 << 63) + 5}]
    return [
        submit(str(i), random_prompt(1 + 13 * i, seed=i), max_tokens=max_tokens - 3 * i, **({"seed": i} | kinds[i % 3]))
        for i in range(count)
    ]


def tokens(heard: dict[str, Heard]) -> dict[str, list[int]]:
    assert all(one.error is None for one in heard.values())
    return {name: one.token_ids for name, one in heard.items()}


@pytest.mark.parametrize("name", DENSE)
def test_every_dense_family_answers_by_its_program_as_it_will_by_itself(
    name: str, tmp_path: Path, leave: Leave
) -> None:
    """Contexts grow over many blocks, and over every window."""
    write_family(tmp_path, name, torch.float32)
    engine = leave(tmp_path)
    assert tokens(drain(opened(tmp_path).engine, requests(6))) == tokens(drain(engine, requests(6)))


def test_a_model_in_bf16_answers_by_its_program_as_it_will_by_itself(checkpoint: Path, leave: Leave) -> None:
    """Its sums are rounded, so a prompt of one token alone is the same to the bit, and what follows it."""
    engine = leave(checkpoint, dtype="bfloat16")
    message = submit("a", [7], max_tokens=40)
    assert one(opened(checkpoint, dtype="bfloat16").engine, message).token_ids == one(engine, message).token_ids


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DENSE])
def test_a_model_of_which_torch_computes_a_part_leaves_no_program(
    name: str, tmp_path: Path, folder: Path, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    write_family(tmp_path, name, torch.float32)
    with caplog.at_level(logging.INFO):
        leave(tmp_path)
    assert "tiny has no opening program" in caplog.text
    assert Opener.find(tmp_path, "auto", threads=1) is None


def test_weights_that_lie_in_the_checkpoint_as_they_are_wanted_are_not_written_again(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone, and joined from parts that lie apart."""
    monkeypatch.setattr("engine.weights.supply.IN_PLACE_FROM_BYTES", 0)
    monkeypatch.setattr("engine.weights.supply.IN_PLACE_SHARE", 0.01)
    engine = leave(checkpoint)
    model = opened(checkpoint)
    weights = read(os.open(model.path, os.O_RDONLY))[0].weights
    assert any(len(weight.parts) == 1 for weight in weights)
    assert tokens(drain(model.engine, requests(5))) == tokens(drain(engine, requests(5)))


def test_parts_of_files_are_joined_in_the_programs_memory(
    tmp_path: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.weights.supply.IN_PLACE_FROM_BYTES", 0)
    monkeypatch.setattr("engine.weights.storage._LEAST_PART", 0)
    page = mapped_file._PAGE
    write_llama(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=1024)
    _put_on_pages(tmp_path / "model.safetensors", page)
    engine = leave(tmp_path)
    model = opened(tmp_path)
    weights = read(os.open(model.path, os.O_RDONLY))[0].weights
    assert any(len(weight.parts) > 1 for weight in weights)
    assert tokens(drain(model.engine, requests(5))) == tokens(drain(engine, requests(5)))


def _put_on_pages(file: Path, page: int) -> None:
    """Every tensor begins with a page, as matrices of large models do where sizes are multiples of it."""
    import json

    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    described = json.loads(raw[8 : 8 + length])
    described.pop("__metadata__", None)
    content, data = bytearray(), raw[8 + length :]
    header: dict[str, Any] = {}
    for i, (name, entry) in enumerate(described.items()):
        begin, end = entry["data_offsets"]
        start = len(content)
        content += data[begin:end]
        header[name] = entry | {"data_offsets": [start, len(content)]}
        if len(content) % page:
            header[f"__pad{i}__"] = {
                "dtype": "U8",
                "shape": [page - len(content) % page],
                "data_offsets": [len(content), len(content) + page - len(content) % page],
            }
            content += bytes(page - len(content) % page)
    text = json.dumps({name: entry for name, entry in header.items() if not name.startswith("__pad")}).encode()
    text = text.ljust(-(-(len(text) + 8) // page) * page - 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)


def test_a_prefix_that_was_computed_is_found_and_what_finds_no_block_waits(checkpoint: Path, leave: Leave) -> None:
    engine = leave(checkpoint)
    model = opened(checkpoint)
    prompt = random_prompt(60, seed=1)
    expected = one(engine, submit("a", prompt)).token_ids
    assert one(model.engine, submit("a", prompt)).token_ids == expected
    again = one(model.engine, submit("b", prompt))
    assert again.token_ids == expected
    assert again.num_cached_tokens == 48
    many = [submit(str(i), random_prompt(180, seed=i), max_tokens=40) for i in range(9)]
    assert tokens(drain(model.engine, many)) == tokens(drain(engine, many))
    assert model.engine.load().preemptions > 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 17])
def test_the_model_goes_on_with_what_its_program_has_begun(steps: int, checkpoint: Path, leave: Leave) -> None:
    """In the middle of prompts and of answers; the reader hears every token once."""
    engine = leave(checkpoint)
    messages = requests(8)
    expected = tokens(drain(engine, messages))
    model = opened(checkpoint)
    heard: dict[str, Heard] = {}
    for message in messages:
        model.submit(message)
    assert model.engine.load().waiting == len(messages)
    for _ in range(steps):
        model.engine.step()
        for output in model.engine.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
    for output in model.give_way_to(engine):
        heard.setdefault(output.sequence_id, Heard()).hear(output)
    assert not model.engine.has_work
    assert tokens(drain(engine, [], heard=heard)) == expected


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5},
        {"num_logprobs": 2},
        {"prompt_logprobs": True},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": ((5, 9.0),)},
    ],
)
def test_what_the_program_cannot_do_waits_for_the_model(
    sampling: dict[str, Any], checkpoint: Path, leave: Leave
) -> None:
    engine = leave(checkpoint)
    message = submit("a", random_prompt(20, seed=3), **sampling)
    expected = one(engine, message)
    model = opened(checkpoint)
    model.submit(message)
    assert not model.engine.has_work
    assert model.give_way_to(engine) == []
    assert drain(engine, [])["a"].token_ids == expected.token_ids


def test_a_sequence_as_long_as_the_program_can_hold_waits_for_the_model(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "MOST_TOKENS", 96)
    engine = leave(checkpoint)
    short, long = (
        submit("short", random_prompt(30, 1), max_tokens=150),
        submit("long", random_prompt(70, 2), max_tokens=50),
    )
    expected = tokens(drain(engine, [short, long]))
    model = opened(checkpoint)
    model.submit(short)
    model.submit(long)
    heard: dict[str, Heard] = {"short": Heard()}
    while model.engine.has_work:
        model.hold_longest()
        model.engine.step()
        for output in model.engine.take_outputs():
            heard[output.sequence_id].hear(output)
    assert len(heard["short"].token_ids) == 96 - 16 + 1 - 30
    model.give_way_to(engine)
    assert tokens(drain(engine, [], heard=heard)) == expected


def test_whoever_leaves_while_he_waits_for_the_model_is_forgotten(checkpoint: Path, leave: Leave) -> None:
    engine = leave(checkpoint)
    model = opened(checkpoint)
    model.submit(submit("a", [5, 6], num_logprobs=1))
    assert model.drop("a")
    assert not model.drop("a")
    model.give_way_to(engine)
    assert drain(engine, []) == {}


def test_logits_that_are_no_numbers_end_their_sequence_alone(checkpoint: Path, leave: Leave) -> None:
    leave(checkpoint)
    model = opened(checkpoint)
    runner = model.engine.runner
    model.engine.submit(submit("a", random_prompt(20, seed=1)))
    model.engine.step()
    memory: Any = runner._memory  # type: ignore[attr-defined]
    block = model.engine.scheduler.running[0].block_table[0]
    size = runner._program.block_bytes  # type: ignore[attr-defined]
    memory.kv.memory[block * size : (block + 1) * size] = b"\xff" * size
    heard = drain(model.engine, [submit("b", random_prompt(9, seed=2))])
    assert heard["a"].error is not None
    assert "not finite" in heard["a"].error
    assert heard["b"].error is None
    assert memory.kv.memory[block * size : (block + 1) * size] == bytes(size)


@pytest.mark.parametrize("change", ["weights", "config.json", "dtype", "kv_bytes", "block_size", "kv_tokens", "path"])
def test_a_program_is_not_used_for_anything_else(change: str, checkpoint: Path, tmp_path: Path, leave: Leave) -> None:
    leave(checkpoint)
    spec, config = ModelSpec("tiny", str(checkpoint)), CONFIG
    assert opened(checkpoint) is not None
    if change == "weights":
        os.utime(checkpoint / "model.safetensors", (1, 1))
        assert Opener.find(checkpoint, "auto", 1) is None
    elif change == "config.json":
        (checkpoint / change).write_text((checkpoint / change).read_text() + " ")
        assert Opener.find(checkpoint, "auto", 1) is None
    elif change == "dtype":
        assert Opener.find(checkpoint, "bfloat16", 1) is None
    else:
        opener = Opener.find(checkpoint, "auto", 1)
        assert opener is not None
        if change == "kv_tokens":
            spec = replace(spec, kv_tokens=512)
        elif change == "path":
            spec = replace(spec, path=str(tmp_path))
        elif change == "kv_bytes":
            config = replace(config, kv_bytes=1 << 20)
        else:
            config = replace(config, block_size=32)
        assert opener.open(spec, config) is None


def test_a_host_of_other_sizes_leaves_a_program_of_its_own(checkpoint: Path, leave: Leave) -> None:
    leave(checkpoint)
    other = HostConfig(threads=1, kv_bytes=8 << 20)
    leave(checkpoint, other)
    assert opened(checkpoint, other) is not None


def _cut(content: bytearray) -> bytearray:
    return content[:-200_000]


def _cut_short(content: bytearray) -> bytearray:
    return content[:40]


def _flipped(content: bytearray) -> bytearray:
    content[300] ^= 1
    return content


def _of_another_version(content: bytearray) -> bytearray:
    content[7] += 1
    return content


@pytest.mark.parametrize("spoil", [_cut, _cut_short, _flipped, _of_another_version, lambda content: bytearray()])
def test_a_damaged_program_is_refused_and_made_again(
    spoil: Callable[[bytearray], bytearray], checkpoint: Path, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    leave(checkpoint)
    path = opened(checkpoint).path
    path.write_bytes(spoil(bytearray(path.read_bytes())))
    with caplog.at_level(logging.WARNING):
        assert Opener.find(checkpoint, "auto", 1) is None
    assert "is not used" in caplog.text
    leave(checkpoint)
    assert opened(checkpoint) is not None


def test_a_program_in_a_folder_that_others_can_write_to_is_not_believed(
    checkpoint: Path, folder: Path, leave: Leave
) -> None:
    leave(checkpoint)
    folder.chmod(0o777)
    assert Opener.find(checkpoint, "auto", 1) is None


def test_none_are_left_or_used_where_the_user_wants_none(
    checkpoint: Path, folder: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(checkpoint)
    monkeypatch.setenv(kept.SWITCH, "0")
    assert Opener.find(checkpoint, "auto", 1) is None
    monkeypatch.setenv(kept.SWITCH, str(folder / "elsewhere"))
    monkeypatch.setattr(kept, "MOST_OWN_BYTES", 1000)
    leave(checkpoint)
    assert list((folder / "elsewhere").iterdir()) == []


def test_programs_take_a_bounded_place_and_those_used_longest_ago_go_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    paths = [folder / f"{i}.opening" for i in range(3)]
    for age, path in enumerate(paths):
        kept.write(path, [bytes(1000)])
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(kept, "MOST_BYTES", 2500)
    left_by_a_killed_writer = folder / ".x.opening.1234"
    left_by_a_killed_writer.write_bytes(b"half")
    os.utime(left_by_a_killed_writer, (1000, 1000))
    kept.note_use(paths[1])
    kept.write(paths[2], [bytes(1000)])
    assert sorted(folder.iterdir()) == [paths[1], paths[2]]


def test_a_full_disk_leaves_no_half_program(
    checkpoint: Path, folder: Path, leave: Leave, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Iterator[bytes]:
        yield b"begun"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "_content", full)
    with caplog.at_level(logging.INFO):
        leave(checkpoint)
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []


def test_opening_a_model_imports_no_torch(checkpoint: Path, leave: Leave) -> None:
    leave(checkpoint)
    code = """
import sys
from pathlib import Path
from engine.opening.opener import Opener
from engine.protocol import HostConfig, ModelSpec, SamplingParams, Submit
directory = Path(sys.argv[1])
model = Opener.find(directory, "auto", 1).open(ModelSpec("tiny", str(directory)), HostConfig(threads=1, kv_bytes=16 << 20))
model.submit(Submit("a", "tiny", (1, 2, 3), SamplingParams(max_tokens=200, temperature=0.8, ignore_eos=True)))
while model.engine.has_work:
    model.engine.step()
assert len(model.engine.take_outputs()) == 200
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_a_step_that_no_runner_can_make_smaller_is_not_left(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(making, "follows_batch", lambda step, rows, blocks: not step.function.startswith("decode"))
    with caplog.at_level(logging.INFO):
        leave(checkpoint)
    assert "it is not known how decode_attention_f32 follows a batch" in caplog.text


def test_a_library_without_a_function_is_refused(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave(checkpoint)

    def find(opened: functions.Opened, name: str) -> functions.Function:
        raise AttributeError(f"undefined symbol: {name}")

    monkeypatch.setattr(functions, "find", find)
    assert Opener.find(checkpoint, "auto", 1) is None
    assert "undefined symbol" in caplog.text


def test_a_writer_ends_with_its_process(checkpoint: Path, folder: Path) -> None:
    """It sleeps, and holds nobody up."""
    code = """
import sys
from engine.opening.making import Writing
Writing(lambda: sys.exit("it was made after the end"), first_after_s=60.0)
"""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=30)
    assert time.monotonic() - began < 30
