"""Bootstrap programs: what a model answers before torch is there is what it answers afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.api.struct import asdict, replace
from pilotlight.engine.bootstrap import recorder
from pilotlight.engine.bootstrap.program import read
from pilotlight.engine.bootstrap.sampler import can_compute
from pilotlight.kernels.cpu import mapped_file
from tests.checkpoints import write_llama
from tests.engine.bootstraps import Leave, bootstrapped, checkpoint, folder, leave, the_c_library_computes
from tests.engine.driver import Heard, drain, one, random_prompt, submit
from tests.engine.families import SEVERAL_TABLES, write_family
from tests.engine.test_decode_programs import DENSE

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no file is mapped in place"),
]

__all__ = ["checkpoint", "folder", "leave", "the_c_library_computes"]


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


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in DENSE if name not in SEVERAL_TABLES])
def test_every_dense_family_answers_by_its_program_as_it_will_by_itself(
    name: str, tmp_path: Path, leave: Leave
) -> None:
    """Contexts grow over many blocks, and over every window."""
    write_family(tmp_path, name, torch.float32)
    engine = leave(tmp_path)
    assert tokens(drain(bootstrapped(tmp_path).engine, requests(6))) == tokens(drain(engine, requests(6)))


def test_a_model_in_bf16_answers_by_its_program_as_it_will_by_itself(checkpoint: Path, leave: Leave) -> None:
    """Its sums are rounded, so a prompt of one token alone is the same to the bit, and what follows it."""
    engine = leave(checkpoint, dtype="bfloat16")
    message = submit("a", [7], max_tokens=40)
    assert one(bootstrapped(checkpoint, dtype="bfloat16").engine, message).token_ids == one(engine, message).token_ids


def test_weights_that_lie_in_the_checkpoint_as_they_are_wanted_are_not_written_again(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone, and joined from parts that lie apart."""
    monkeypatch.setattr("pilotlight.engine.weights.load.IN_PLACE_FROM_BYTES", 0)
    monkeypatch.setattr("pilotlight.engine.weights.load.IN_PLACE_SHARE", 0.01)
    engine = leave(checkpoint)
    model = bootstrapped(checkpoint)
    weights = read(os.open(model.path, os.O_RDONLY))[0].weights
    assert any(len(weight.parts) == 1 for weight in weights)
    assert tokens(drain(model.engine, requests(5))) == tokens(drain(engine, requests(5)))


def test_parts_of_files_are_joined_in_the_programs_memory(
    tmp_path: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotlight.engine.weights.load.IN_PLACE_FROM_BYTES", 0)
    monkeypatch.setattr("pilotlight.engine.weights.storage._LEAST_PART", 0)
    page = mapped_file._PAGE
    write_llama(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=1024)
    _put_on_pages(tmp_path / "model.safetensors", page)
    engine = leave(tmp_path)
    model = bootstrapped(tmp_path)
    weights = read(os.open(model.path, os.O_RDONLY))[0].weights
    assert any(len(weight.parts) > 1 for weight in weights)
    assert tokens(drain(model.engine, requests(5))) == tokens(drain(engine, requests(5)))


def _put_on_pages(file: Path, page: int) -> None:
    """Begin every matrix with a page, as those of large models do where sizes are multiples of it: what has another size comes last."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    described = json.loads(raw[8 : 8 + length])
    described.pop("__metadata__", None)
    content, data = bytearray(), raw[8 + length :]
    for entry in sorted(
        described.values(), key=lambda entry: (entry["data_offsets"][1] - entry["data_offsets"][0]) % page > 0
    ):
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [len(content), len(content) + end - begin]
        content += data[begin:end]
    text = json.dumps(described).encode()
    text = text.ljust(-(-(len(text) + 8) // page) * page - 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)


def test_a_prefix_that_was_computed_is_found_and_what_finds_no_block_waits(checkpoint: Path, leave: Leave) -> None:
    engine = leave(checkpoint)
    model = bootstrapped(checkpoint)
    prompt = random_prompt(60, seed=1)
    expected = one(engine, submit("a", prompt)).token_ids
    assert one(model.engine, submit("a", prompt)).token_ids == expected
    again = one(model.engine, submit("b", prompt))
    assert again.token_ids == expected
    assert again.num_cached_tokens == 48
    many = [submit(str(i), random_prompt(180, seed=i), max_tokens=40) for i in range(9)]
    assert tokens(drain(model.engine, many)) == tokens(drain(engine, many))
    assert model.engine.load().preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 17])
def test_the_model_goes_on_with_what_its_program_has_begun(steps: int, checkpoint: Path, leave: Leave) -> None:
    """In the middle of prompts and of answers; the reader hears every token once."""
    engine = leave(checkpoint)
    messages = requests(8)
    expected = tokens(drain(engine, messages))
    model = bootstrapped(checkpoint)
    heard: dict[str, Heard] = {}
    for message in messages:
        model.engine.submit(message)
    assert model.engine.load().waiting == len(messages)
    for _ in range(steps):
        model.engine.step()
        for output in model.engine.sequences.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
    for output in model.engine.hand_over_to(engine):
        heard.setdefault(output.sequence_id, Heard()).hear(output)
    assert not model.engine.has_work
    assert tokens(drain(engine, [], heard=heard)) == expected


@pytest.mark.long
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
    model = bootstrapped(checkpoint)
    model.engine.submit(message)
    assert not model.engine.step()
    assert model.engine.hand_over_to(engine) == []
    assert drain(engine, [])["a"].token_ids == expected.token_ids


# What the program can do, or need not know; whatever a request or its sampling has besides waits for the model, be it added tomorrow.
KNOWN = {"max_tokens", "temperature", "min_p", "seed", "stop_token_ids", "ignore_eos"} | {
    "sequence_id", "model", "prompt_token_ids", "sampling", "salt", "num_delivered_tokens", "leader", "priority"
}  # fmt: skip


@pytest.mark.parametrize("field", [*SamplingParams.__match_args__, *Submit.__match_args__])
def test_a_request_is_answered_by_the_program_only_if_nothing_else_differs_from_a_plain_one(field: str) -> None:
    plain, other = submit("a", [5, 6, 7], temperature=0.7), object()
    if field == "sampling":
        changed = plain
    elif field in SamplingParams.__match_args__:
        changed = replace(plain, sampling=replace(plain.sampling, **{field: other}))
    else:
        changed = replace(plain, **{field: other})
    assert can_compute(changed) == (field in KNOWN)


def test_a_field_that_the_program_has_never_heard_of_is_left_to_the_model() -> None:
    class WithBeams(SamplingParams, frozen=True):
        num_beams: int = 1

    class WithGrammar(Submit, frozen=True):
        grammar: str | None = None

    plain = submit("a", [5, 6, 7])
    assert can_compute(plain)
    assert not can_compute(replace(plain, sampling=WithBeams(**asdict(plain.sampling), num_beams=4)))
    whole = {name: getattr(plain, name) for name in Submit.__match_args__}
    assert not can_compute(WithGrammar(**whole, grammar="json"))


def test_a_sequence_as_long_as_the_program_can_hold_waits_for_the_model(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_TOKENS", 96)
    engine = leave(checkpoint)
    short, long = (
        submit("short", random_prompt(30, 1), max_tokens=150),
        submit("long", random_prompt(70, 2), max_tokens=50),
    )
    expected = tokens(drain(engine, [short, long]))
    model = bootstrapped(checkpoint)
    model.engine.submit(short)
    model.engine.submit(long)
    heard: dict[str, Heard] = {"short": Heard()}
    while model.engine.step():
        for output in model.engine.sequences.take_outputs():
            heard[output.sequence_id].hear(output)
    assert len(heard["short"].token_ids) == 96 - 16 + 1 - 30
    model.engine.hand_over_to(engine)
    assert tokens(drain(engine, [], heard=heard)) == expected


def test_whoever_leaves_while_he_waits_for_the_model_is_forgotten(checkpoint: Path, leave: Leave) -> None:
    engine = leave(checkpoint)
    model = bootstrapped(checkpoint)
    model.engine.submit(submit("a", [5, 6], num_logprobs=1))
    model.engine.sequences.abort("a")
    model.engine.sequences.abort("a")
    assert [output.finish_reason for output in model.engine.sequences.take_outputs()] == ["abort"]
    model.engine.hand_over_to(engine)
    assert drain(engine, []) == {}


def test_logits_that_are_no_numbers_end_their_sequence_alone(checkpoint: Path, leave: Leave) -> None:
    leave(checkpoint)
    model = bootstrapped(checkpoint)
    runner = model.engine.runner
    model.engine.submit(submit("a", random_prompt(20, seed=1)))
    model.engine.step()
    memory: Any = runner._memory  # type: ignore[attr-defined]
    block = model.engine.scheduler.running[0].tables[0].blocks[0]
    size = runner._program.block_bytes  # type: ignore[attr-defined]
    memory.kv.memory[block * size : (block + 1) * size] = b"\xff" * size
    heard = drain(model.engine, [submit("b", random_prompt(9, seed=2))])
    assert heard["a"].error is not None
    assert "not finite" in heard["a"].error
    assert heard["b"].error is None
    assert memory.kv.memory[block * size : (block + 1) * size] == bytes(size)


@pytest.mark.process
def test_a_bootstrap_imports_no_torch(checkpoint: Path, leave: Leave) -> None:
    leave(checkpoint)
    code = """
import sys
from pathlib import Path
from pilotlight.engine.bootstrap.bootstrap_loader import find_model
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams, Submit
directory = Path(sys.argv[1])
model = find_model(ModelSpec("tiny", str(directory)), HostConfig(threads=1, kv_bytes=16 << 20))
model.engine.submit(Submit("a", "tiny", (1, 2, 3), SamplingParams(max_tokens=200, temperature=0.8, ignore_eos=True)))
while model.engine.has_work:
    model.engine.step()
assert len(model.engine.sequences.take_outputs()) == 200
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True, cwd=Path(__file__).parents[2], timeout=60)
