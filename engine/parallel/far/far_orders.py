"""The messages about ranks on other machines: their placement, and the arguments of their start."""

from typing import NamedTuple


class PlaceRanks(NamedTuple):
    """A request to find places for ranks on other machines than this one."""

    address: str  # address of the Ray cluster: HOST:PORT, or auto
    devices: tuple[str, ...]  # cpu or cuda, for each rank
    cpus: int  # number of CPUs for a rank without a GPU


class StillWaiting(NamedTuple):
    """A report that the cluster has no room for the ranks so far, or is not reachable."""

    reason: str


class RanksPlaced(NamedTuple):
    address: str  # address of this machine, as seen by the other ranks' machines
    machines: tuple[str, ...]  # the address of each rank's machine


class PlacingFailed(NamedTuple):
    """A report that placement is impossible or, after the start of ranks, that a rank has ended."""

    reason: str
    was_killed: bool = False  # a started rank ended because its machine is lost, not by itself


class FarStart(NamedTuple):
    """Everything that a remote rank needs to start."""

    rank: int
    release: dict[str, str]  # versions of the first rank
    address: str  # address of the first rank's machine
    port: int  # port of the first rank's channels, which accept only holders of the key
    key: bytes
    store_port: int
    config: str  # a HostConfig as JSON
    neighbours: int = 1  # number of the group's ranks on that rank's machine, including itself


class ChannelOf(NamedTuple):
    """The first message on a channel: the channel's rank, and its index among the channels of that rank."""

    rank: int
    number: int
