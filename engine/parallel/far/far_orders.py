"""The messages about ranks on other machines: their placement, and the arguments of their start."""

from typing import NamedTuple


class PlaceRanks(NamedTuple):
    """A request to find places for ranks on other machines than this one."""

    address: str  # of the cluster: HOST:PORT, or auto
    devices: tuple[str, ...]  # cpu or cuda, of each rank
    cpus: int  # for a rank without a GPU


class StillWaiting(NamedTuple):
    """A report that there is no place so far, or no cluster."""

    reason: str


class RanksPlaced(NamedTuple):
    address: str  # of this machine, as seen by the others
    machines: tuple[str, ...]  # the address of each rank's machine


class PlacingFailed(NamedTuple):
    """A report that placement is impossible or, after ranks have started, that one has ended."""

    reason: str


class FarStart(NamedTuple):
    """Everything that a remote rank needs to start."""

    rank: int
    release: dict[str, str]  # of the first rank
    address: str  # of the first rank's machine
    port: int  # of its channels, which accept only holders of the key
    key: bytes
    store_port: int
    config: str  # a HostConfig as JSON
    neighbours: int = 1  # ranks of the group on that rank's machine, including itself


class ChannelOf(NamedTuple):
    """The first message on a channel: the rank and number of the channel."""

    rank: int
    number: int
