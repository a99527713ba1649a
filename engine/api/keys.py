"""CURVE keys of a front end and an engine host that communicate over a network.

Each side authenticates the other, and frames are encrypted.

python -m pilotlight.engine.api.keys HOST_FILE FRONT_END_FILE
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq


class KeysError(Exception):
    """A file has no usable keys; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one side, in ZeroMQ's Z85 encoding."""

    secret: bytes = field(repr=False)
    public: bytes
    peer: bytes  # the public key of the other side


def read_keys(path: Path) -> Keys:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            written = json.load(file)
        secret, peer = written["secret"].encode(), written["peer"].encode()
        public = zmq.curve_public(secret)
        zmq.curve_public(peer)  # checks the length of the key
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError):
        raise KeysError(f"{path} contains no keys: make them with python -m pilotlight.engine.api.keys") from None
    if mode & 0o077:
        raise KeysError(f"{path} can be read by others, who could then command the host: chmod 600 {path}")
    return Keys(secret, public, peer)


def write_keys(host: Path, front_end: Path) -> None:
    """Generate the keys of both sides, and write each side's file. Raises FileExistsError."""
    pairs = {path: zmq.curve_keypair() for path in (host, front_end)}
    for path, other in ((host, front_end), (front_end, host)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump({"secret": pairs[path][1].decode(), "peer": pairs[other][0].decode()}, file)


def main(words: Sequence[str]) -> None:
    if len(words) != 2:
        sys.exit("usage: python -m pilotlight.engine.api.keys HOST_FILE FRONT_END_FILE")
    try:
        write_keys(Path(words[0]), Path(words[1]))
    except OSError as error:
        sys.exit(f"pilotlight.engine.api.keys: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
