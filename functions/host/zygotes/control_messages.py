"""Messages between the runtime and its zygotes.

Each is one msgpack map in a message of a SOCK_SEQPACKET socket, with descriptors.
"""

from typing import Any

import msgspec

from pilotlight.functions.host.confinement.tiers import Confinement

MAX_MESSAGE_BYTES = 128 << 10
MAX_DESCRIPTORS = 4


class Boot(msgspec.Struct, frozen=True):
    """The function that an isolate runs, and its settings."""

    main: str
    sys_path: list[str]
    bindings: list[tuple[str, str, dict[str, Any]]]  # kind, name, options


class CreateZygote(msgspec.Struct, frozen=True, tag="create_zygote"):
    """Runtime -> the site's zygote, with [control, log]: make a function's zygote."""

    id: int
    limits: Confinement
    imports: list[str]  # before the fork of an isolate
    sys_path: list[str]


class ForkIsolate(msgspec.Struct, frozen=True, tag="fork_isolate"):
    """Runtime -> a function's zygote, with [channel, log, trace]: make an isolate."""

    id: int
    boot: Boot


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A child exists; its pidfd comes along."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A child could not be made; id -1: the zygote itself failed."""

    id: int
    why: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    id: int
    status: int  # as from waitpid
    cpu_s: float
    max_rss_kib: int


class Confined(msgspec.Struct, frozen=True, tag="confined"):
    """Report that a function's zygote is confined and has not read the function yet.

    With the descriptor for requesting forks, if it needs one.
    """


class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """A function's zygote has finished its imports."""


Command = CreateZygote | ForkIsolate
Report = Started | Failed | Died | Confined | Imported
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
