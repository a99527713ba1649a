"""Every message of the engine protocol survives its byte form; anything else is refused by name."""

import subprocess
import sys

import msgspec
import pytest

from engine.frames import decode_command, decode_event, encode
from engine.protocol import (
    Abort,
    Command,
    Event,
    HostPhases,
    LoadModel,
    LoadProgress,
    ModelFailed,
    ModelInfo,
    ModelLoad,
    ModelReady,
    ModelSpec,
    ModelUnloaded,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
    TokenLogprobs,
    TokenOutput,
    UnloadModel,
)  # fmt: skip

COMMANDS: list[Command] = [
    Submit("s1", "ember", (1, 2, 3), SamplingParams(max_tokens=5, top_k=3, stop_token_ids=(7,)), salt=b"\x00\xff"),
    Submit("s2", "ember", (1, 2), SamplingParams(5, repetition_penalty=1.1, logit_bias=((3, -1.5),)), num_delivered_tokens=1),
    Submit("s3", "minnow", (1, 2), SamplingParams(1), pooling="mean"),
    Abort("s1"), LoadModel(ModelSpec("ember", "/m", kv_tokens=64)), UnloadModel("ember"), Shutdown(),
]  # fmt: skip
EVENTS: list[Event] = [
    StepOutput(
        3,
        (
            TokenOutput("s1", (5, 6), None, 16, logprobs=(TokenLogprobs(-0.5, ((5, -0.5), (9, -1.5))), TokenLogprobs(-1.0))),
            TokenOutput("s3", (), "stop", embedding=(0.6, -0.8)),
            TokenOutput("s2", (), "error", error_code="engine_error", error_message="The step failed."),
        ),
        {"ember": ModelLoad(running=2, free_blocks=7)},
        host_time_ms=0.25,
        phases=HostPhases(0.1, 0.05, 0.1),
    ),
    LoadProgress("ember", 1, 2), ModelReady(ModelInfo("ember", 4096, 2048, (2,), "float32", 16, 100, 10**7, 0.5)),
    ModelReady(ModelInfo("minnow", 512, 2048, (), "float32", 16, 100, 10**7, 0.5, "cls", 384)),
    ModelFailed("ember", "model_load_failed", "There is no such directory."), ModelUnloaded("ember"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_round_trips(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_round_trips(event: Event) -> None:
    assert decode_event(encode(event)) == event


def test_what_is_no_command_is_refused() -> None:
    for frame in (b"", b"\xc1", encode(EVENTS[0]), msgspec.msgpack.encode(("submit", {"sequence_id": 3}))):
        with pytest.raises(msgspec.DecodeError):
            decode_command(frame)


def test_the_protocol_needs_nothing_but_the_standard_library() -> None:
    script = "import sys; sys.modules.update(msgspec=None, zmq=None, torch=None); import engine.protocol"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
