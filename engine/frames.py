"""The byte form of the engine protocol: one ZeroMQ frame holds one msgpack array, the message's tag and the message.

Both directions stand here side by side; which sockets carry them is host.py's and client.py's business.
"""

from typing import TypeVar

import msgspec

from engine.protocol import (
    Abort,
    Command,
    Event,
    Hello,
    HostEnding,
    HostReady,
    LoadModel,
    LoadProgress,
    ModelFailed,
    ModelReady,
    ModelUnloaded,
    Shutdown,
    StepOutput,
    Submit,
    UnloadModel,
)  # fmt: skip

_COMMANDS: dict[str, type[Command]] = {
    "submit": Submit, "abort": Abort, "load_model": LoadModel, "unload_model": UnloadModel, "hello": Hello,
    "shutdown": Shutdown,
}  # fmt: skip
_EVENTS: dict[str, type[Event]] = {
    "step": StepOutput, "host_ready": HostReady, "load_progress": LoadProgress, "model_ready": ModelReady, "model_failed": ModelFailed,
    "model_unloaded": ModelUnloaded, "host_ending": HostEnding,
}  # fmt: skip

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_tags = {kind: tag for tag, kind in (*_COMMANDS.items(), *_EVENTS.items())}
_command_decoders = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in _COMMANDS.items()}
_event_decoders = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in _EVENTS.items()}


def encode(message: Command | Event) -> bytes:
    return _encoder.encode((_tags[type(message)], message))


def decode_command(frame: bytes) -> Command:
    """Decode one frame. Raises msgspec.DecodeError for anything that is not a command."""
    return _decode(frame, _command_decoders)


def decode_event(frame: bytes) -> Event:
    """Decode one frame. Raises msgspec.DecodeError for anything that is not an event."""
    return _decode(frame, _event_decoders)


def _decode(frame: bytes, decoders: "dict[str, msgspec.msgpack.Decoder[MessageT]]") -> MessageT:
    tag, body = _envelope.decode(frame)
    if tag not in decoders:
        raise msgspec.ValidationError(f"unknown message {tag!r}")
    return decoders[tag].decode(body)
