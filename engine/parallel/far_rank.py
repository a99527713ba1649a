"""A rank on another machine: there a process of Ray's does what a child of the first rank does on its own; and what is said about its place.

Imports no Ray, which has made the process.
"""

import os
import socket
from typing import NamedTuple

from engine.parallel.release import difference


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


class FarRank:
    """Ray's actor."""

    def follow(self, start: FarStart) -> str:
        """Do what the first rank says, and end with it. Return why it cannot begin."""
        if problem := difference(start.release):
            return problem
        from engine.parallel import follower, network

        threads = max(1, len(os.sched_getaffinity(0)) // start.neighbours)
        channels = []
        try:
            for number in range(follower.NUM_CHANNELS):
                channel = network.connect(start.address, start.port, start.key)
                channel.send(ChannelOf(start.rank, number))
                channels.append(channel)
        except OSError as error:
            return f"the first rank cannot be reached at {start.address}, port {start.port}: {error}"
        own = _own_address(start.address)
        follower.run_rank(
            start.rank, start.config, threads, channels, follower.Meeting(start.address, start.store_port, own)
        )
        raise AssertionError("a rank ends with its process")


def _own_address(other: str) -> str:
    """Return this machine's address on the way to another."""
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # which sends nothing
        address: str = probe.getsockname()[0]
        return address
