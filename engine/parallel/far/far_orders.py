"""What is said about ranks on other machines: where there is room for them, and all that one is started with."""

from typing import NamedTuple


class PlaceRanks(NamedTuple):
    """Find room for ranks on other machines than this one."""

    address: str  # of the cluster: HOST:PORT, or auto
    devices: tuple[str, ...]  # cpu or cuda, of each rank
    cpus: int  # that a rank without a GPU takes


class StillWaiting(NamedTuple):
    """The news that there is no room so far, or no cluster."""

    reason: str


class RanksPlaced(NamedTuple):
    address: str  # of this machine, as the others know it
    machines: tuple[str, ...]  # the address of each rank's


class PlacingFailed(NamedTuple):
    """The news that it cannot be done, now or later; or, once ranks have started, that one has ended."""

    reason: str


class FarStart(NamedTuple):
    """All that a rank elsewhere is started with."""

    rank: int
    release: dict[str, str]  # of the first rank
    address: str  # of its machine
    port: int  # of its channels, where who has the key is heard
    key: bytes
    store_port: int
    config: str  # a HostConfig as JSON
    neighbours: int = 1  # ranks of the group on that rank's machine, itself included


class ChannelOf(NamedTuple):
    """The first word on a channel: whose it is, and which of its channels."""

    rank: int
    number: int
