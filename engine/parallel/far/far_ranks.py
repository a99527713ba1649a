"""The first rank's side of ranks on other machines: places, starts and watches them.

A separate process talks to Ray (ray_placement.py). This module is independent of the orders of ranks.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.parallel.channel import NUM_CHANNELS, RankChannel
from pilotlight.engine.parallel.far.far_orders import (
    ChannelOf,
    FarStart,
    PlaceRanks,
    PlacingFailed,
    RanksPlaced,
    StillWaiting,
)
from pilotlight.engine.parallel.far.network import RankListener, new_group_key
from pilotlight.engine.parallel.release import own_release

_LOOK_S = 0.5
_END_GRACE_S = 2.0


class FarRanks:
    def __init__(self, config: HostConfig, on_wait: Callable[[str], None]) -> None:
        """Find places for the ranks in the cluster; wait without a limit until it has room for all.

        `on_wait`: called every second with the reason for the wait. Raises CheckpointError if placement is impossible.
        """
        self._config = config
        self.ranks = config.far_ranks
        self._placing, other = RankChannel.pair()
        with other:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pilotlight.engine.parallel.far.ray_placement",
                    str(other.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            devices = tuple([config.group[rank].removeprefix("ray:") for rank in self.ranks])
            self._placing.send(PlaceRanks(config.ray_address, devices, config.threads or 1))
            while isinstance(said := self._hear(), StillWaiting):
                on_wait(said.reason)
            if not isinstance(said, RanksPlaced):
                raise CheckpointError(said.reason)
        except BaseException:
            self.close()
            raise
        self.address = said.address
        self.machines = dict(zip(self.ranks, said.machines, strict=True))

    def start(self, store_port: int) -> dict[int, tuple[RankChannel, ...]]:
        """Start the ranks; return the channels of each rank when all are connected. Raises CheckpointError."""
        key, described = new_group_key(), msgspec.json.encode(self._config).decode()
        found: dict[ChannelOf, RankChannel] = {}
        with RankListener(self.address, key) as listener:
            self._placing.send(
                tuple(
                    [
                        FarStart(rank, own_release(), self.address, listener.port, key, store_port, described)
                        for rank in self.ranks
                    ]
                )
            )
            while len(found) < NUM_CHANNELS * len(self.ranks):
                if self._placing.has_message():
                    raise CheckpointError(self.until_lost().reason)
                if (channel := listener.accept(_LOOK_S)) is not None:
                    found[channel.receive()] = channel
        return {rank: tuple([found[ChannelOf(rank, number)] for number in range(NUM_CHANNELS)]) for rank in self.ranks}

    def until_lost(self) -> PlacingFailed:
        """Wait until a rank has ended; return the report of it."""
        said = self._hear()
        assert isinstance(said, PlacingFailed)
        return said

    def close(self) -> None:
        """End the ranks."""
        self._placing.close()  # ends the process, after which Ray ends its ranks
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_GRACE_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _hear(self) -> "StillWaiting | RanksPlaced | PlacingFailed":
        try:
            said: StillWaiting | RanksPlaced | PlacingFailed = self._placing.receive()
            return said
        except EOFError:
            return PlacingFailed(f"the process that places ranks with Ray ended with status {self._process.wait()}")
