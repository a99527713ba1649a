"""Every message of the engine protocol round-trips through bytes; anything else is refused by name."""

import subprocess
import sys

import msgspec
import pytest

from pilotlight.engine.api.frames import VersionError, decode_command, decode_event, encode
from pilotlight.engine.api.protocol import (
    VERSION,
    Abort,
    Command,
    Event,
    Hello,
    HostPhases,
    HostReady,
    LoadModel,
    LoadProgress,
    ModelFailed,
    ModelInfo,
    ModelLoad,
    ModelReady,
    ModelSpec,
    ModelUnloaded,
    PrewarmModel,
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
    PrewarmModel(ModelSpec("ember", "/m", weights_file="/w")),
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
    for frame in (b"", b"\xc1", encode(EVENTS[0]), msgspec.msgpack.encode({"type": "Submit", "sequence_id": 3})):
        with pytest.raises(msgspec.DecodeError):
            decode_command(frame)


def sent_with(message: Command | Event, **more: object) -> bytes:
    """Return the bytes of a message with some fields changed or added."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)) | more)


def test_fields_that_a_newer_release_has_added_are_left_unread() -> None:
    later = (VERSION[0], VERSION[1] + 1)
    for command in (*COMMANDS, Hello(VERSION)):
        assert decode_command(sent_with(command, added=[1, {"by": "a newer front end"}])) == command
    for event in (*EVENTS, HostReady(VERSION)):
        assert decode_event(sent_with(event, added=[1, {"by": "a newer host"}])) == event
    assert decode_command(sent_with(Hello(VERSION), version=later)) == Hello(later)
    assert decode_event(sent_with(HostReady(VERSION), version=later)) == HostReady(later)


def test_fields_that_an_older_release_does_not_send_have_their_defaults() -> None:
    sampling = {"max_tokens": 3}
    older = {"type": "Submit", "sequence_id": "a", "model": "ember", "prompt_token_ids": [1], "sampling": sampling}
    assert decode_command(msgspec.msgpack.encode(older)) == Submit("a", "ember", (1,), SamplingParams(3))
    older = {
        "type": "StepOutput",
        "step": 1,
        "outputs": [{"sequence_id": "a", "token_ids": [5]}],
        "loads": {"ember": {}},
    }
    assert decode_event(msgspec.msgpack.encode(older)) == StepOutput(
        1, (TokenOutput("a", (5,)),), {"ember": ModelLoad()}
    )


@pytest.mark.parametrize("more", [{}, {"phases": "by name", "lease_s": "long"}], ids=["alike", "with other fields"])
def test_a_greeting_of_another_version_is_refused_by_both_names(more: dict[str, object]) -> None:
    ours = ".".join(map(str, VERSION))
    for other in ((VERSION[0] + 1, 3), (VERSION[0] - 1, 9)):
        theirs = f"{other[0]}.{other[1]}"
        with pytest.raises(VersionError, match=f"the front end speaks version {theirs} .* this host version {ours}"):
            decode_command(sent_with(Hello(VERSION), version=other, **more))
        with pytest.raises(VersionError, match=f"the host speaks version {theirs} .* this front end version {ours}"):
            decode_event(sent_with(HostReady(VERSION), version=other, **more))


@pytest.mark.process
def test_where_msgspec_is_missing_messages_are_the_same_values() -> None:
    script = """
import sys
sys.modules.update(msgspec=None, zmq=None, torch=None)
from pilotlight.engine.api.protocol import HostReady, ModelSpec, SamplingParams, Submit, VERSION
from pilotlight.engine.api.struct import asdict, replace
plain = Submit("a", "ember", (1, 2), SamplingParams(3))
assert replace(plain, priority=1) != plain == replace(plain, priority=0)
assert hash(plain.sampling) == hash(SamplingParams(3, temperature=1.0))
assert ModelSpec("m", "/m").loads_same(ModelSpec("m", "/m", is_awaited=True))
assert asdict(HostReady(VERSION)) == {"version": VERSION, "phases": (), "weights_bytes": None, "fallbacks": ()}
match plain:
    case Submit("a", model):
        assert model == "ember"
    case _:
        raise AssertionError
try:
    plain.priority = 3
except AttributeError:
    pass
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
