"""Encoding of the engine protocol: one ZeroMQ frame contains one message.

A message is a msgpack map with its name under "type". The sockets are in socket_transport.py (host) and socket_client.py (front end).
"""

from typing import TypeVar

import msgspec

from pilotlight.engine.api.protocol import VERSION, Command, Event, Hello, HostReady

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class VersionError(Exception):
    """A peer uses an incompatible version of the protocol; the message names both versions."""


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Decode a command from one frame.

    Raises VersionError for a greeting with an incompatible version, and msgspec.DecodeError for any other invalid frame.
    """
    return _decode(frame, _commands, "front end", "host")


def decode_event(frame: bytes) -> Event:
    """Decode an event from one frame.

    Raises VersionError for a greeting with an incompatible version, and msgspec.DecodeError for any other invalid frame.
    """
    return _decode(frame, _events, "host", "front end")


def _decode(frame: bytes, decoder: "msgspec.msgpack.Decoder[MessageT]", sender: str, receiver: str) -> MessageT:
    try:
        message = decoder.decode(frame)
    except msgspec.DecodeError:
        _check_version(_greeting_of(frame), sender, receiver)
        raise
    if isinstance(message, Hello | HostReady):
        _check_version(message, sender, receiver)
    return message


def _check_version(greeting: "Hello | HostReady | _Greeting | None", sender: str, receiver: str) -> None:
    if greeting is None or greeting.version[0] == VERSION[0]:
        return
    theirs, ours = (".".join(map(str, version)) for version in (greeting.version, VERSION))
    raise VersionError(
        f"the {sender} speaks version {theirs} of the engine protocol and this {receiver} version {ours}: "
        "run the same release of Pilotlight on both"
    )


class _Greeting(msgspec.Struct):
    """The fields that Hello and HostReady have in all versions."""

    version: tuple[int, int]


def _greeting_of(frame: bytes) -> _Greeting | None:
    try:
        return msgspec.msgpack.decode(frame, type=_Greeting)
    except msgspec.DecodeError:
        return None
