"""A rank on another machine: a process started by Ray that executes the first rank's orders.

Does not import Ray.
"""

import os
import socket

from pilotlight.engine.parallel.channel import NUM_CHANNELS, Meeting
from pilotlight.engine.parallel.far.far_orders import ChannelOf, FarStart
from pilotlight.engine.parallel.release import difference


class FarRank:
    """The Ray actor of a rank."""

    def follow(self, start: FarStart) -> str:
        """Execute the first rank's orders until this process ends. Return the reason if the rank cannot start."""
        if problem := difference(start.release):
            return problem
        from pilotlight.engine.parallel import follower
        from pilotlight.engine.parallel.far import network

        threads = max(1, len(os.sched_getaffinity(0)) // start.neighbours)
        channels = []
        try:
            for number in range(NUM_CHANNELS):
                channel = network.connect(start.address, start.port, start.key)
                channel.send(ChannelOf(start.rank, number))
                channels.append(channel)
        except OSError as error:
            return f"the first rank cannot be reached at {start.address}, port {start.port}: {error}"
        own = _own_address(start.address)
        follower.run_rank(start.rank, start.config, threads, channels, Meeting(start.address, start.store_port, own))
        raise AssertionError("a rank ends with its process")


def _own_address(other: str) -> str:
    """Return this machine's address in the network of the machine `other`."""
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # connecting a UDP socket sends nothing
        address: str = probe.getsockname()[0]
        return address
