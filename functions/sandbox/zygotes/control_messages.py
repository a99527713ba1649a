"""Messages between the runtime and its zygotes: msgpack maps over a SOCK_SEQPACKET socket.

Descriptors are passed along with a message.
"""

from typing import Any

import msgspec

from pilotlight.functions.sandbox.confinement.confinement import Confinement

MAX_MESSAGE_BYTES = 128 << 10
MAX_DESCRIPTORS = 4


class Boot(msgspec.Struct, frozen=True):
    """The start parameters of an isolate: the function's main file, import path and bindings."""

    main: str
    sys_path: list[str]  # the folders of the function's own modules; its zygote has the layers of packages
    bindings: list[tuple[str, str, dict[str, Any]]]  # (kind, name, options) of each


class CreateZygote(msgspec.Struct, frozen=True, tag="create_zygote"):
    """Runtime to the site's zygote, with descriptors [control, log]: fork a function's zygote."""

    id: int
    limits: Confinement
    imports: list[str]  # modules to import before isolates are forked


class ForkIsolate(msgspec.Struct, frozen=True, tag="fork_isolate"):
    """Runtime to a function's zygote, with descriptors [channel, log, trace, broker]: fork an isolate."""

    id: int
    boot: Boot


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A child process exists; its pidfd is passed along."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A child could not be created. With id -1 the zygote itself failed."""

    id: int
    why: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    id: int
    status: int  # wait status, as from waitpid
    cpu_s: float
    max_rss_kib: int


class Confined(msgspec.Struct, frozen=True, tag="confined"):
    """A function's zygote is confined and has not run the function's code yet.
    The listener for its fork requests is passed along, from tier 2 on."""


class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """A function's zygote has finished its imports."""


Command = CreateZygote | ForkIsolate
Report = Started | Failed | Died | Confined | Imported
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
