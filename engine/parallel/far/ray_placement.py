"""Placement of ranks on other machines with Ray, in a process that reports their end.

The process is separate because an engine host does not import Ray. When it ends for any reason, Ray ends the ranks and releases their resources. This
module knows Ray, and is independent of what ranks do.

python -m pilotlight.engine.parallel.far.ray_placement FD PARENT     started only by engine/parallel/far/far_ranks.py
"""

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pilotlight.engine.parallel.channel import RankChannel
from pilotlight.engine.parallel.far.far_orders import FarStart, PlaceRanks, PlacingFailed, RanksPlaced, StillWaiting
from pilotlight.engine.parallel.follower import FarRank
from pilotlight.support.parent_death import die_with

_NODE = "ray.io/node-id"  # Ray's label for the id of a node
_CRASHED = "its worker process has died"  # in Ray's message if the actor's node lives; its exceptions have no other sign of that
_LOOK_S = 1.0


class RankPlacer:
    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel  # connected to the first rank

    def run(self) -> None:
        """Place ranks, start them, and return when one has ended or the first rank is gone."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        order: PlaceRanks = self._channel.receive()
        self._connect(ray, order.address)
        group = self._placed(ray, order)
        hosts = self._hosts(ray, group)
        self._channel.send(RanksPlaced(ray.util.get_node_ip_address(), tuple([ip for _, ip in hosts])))
        starts: tuple[FarStart, ...] = self._channel.receive()
        threading.Thread(target=self._end_with_first, daemon=True).start()
        neighbours = Counter(node for node, _ in hosts)
        actors, running = [], []
        for i, (start, device, (node, _)) in enumerate(zip(starts, order.devices, hosts, strict=True)):
            options = {"num_gpus": 1} if device == "cuda" else {"num_cpus": order.cpus}
            place = PlacementGroupSchedulingStrategy(group, i)
            actors.append(ray.remote(FarRank).options(scheduling_strategy=place, **options).remote())
            running.append(actors[i].follow.remote(start._replace(neighbours=neighbours[node])))
        (ended, *_), _ = ray.wait(running, num_returns=1)
        i = running.index(ended)
        why = _why(ray, ended)
        self._channel.send(PlacingFailed(f"rank {starts[i].rank} on {hosts[i][1]} {why}", _CRASHED not in why))

    def _end_with_first(self) -> None:
        with suppress(EOFError):
            self._channel.receive()  # blocks until the first rank closes the channel
        os._exit(0)

    def _connect(self, ray: Any, address: str) -> None:
        while True:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
                return
            except ConnectionError as error:
                ray.shutdown()
                reason = f"the Ray cluster {address} does not answer from here ({str(error).splitlines()[0]})"
                self._channel.send(StillWaiting(reason))
                time.sleep(_LOOK_S)

    def _placed(self, ray: Any, order: PlaceRanks) -> Any:
        """Wait for room on other nodes than this one; return a placement group there."""
        bundles = [{"GPU": 1} if device == "cuda" else {"CPU": order.cpus} for device in order.devices]
        elsewhere = {_NODE: f"!{ray.get_runtime_context().get_node_id()}"}
        group = ray.util.placement_group(bundles, "PACK", bundle_label_selector=[elsewhere] * len(bundles))
        wanted = ", ".join(f"{count:g} {kind}" for kind, count in sum(map(Counter, bundles), Counter[str]()).items())
        address = ray.get_runtime_context().gcs_address
        while not group.wait(_LOOK_S):
            self._channel.send(
                StillWaiting(
                    f"the Ray cluster {address} has no {wanted} free on other machines: the ranks wait for one"
                )
            )
        return group

    def _hosts(self, ray: Any, group: Any) -> list[tuple[str, str]]:
        """Return (id, address) of the node of each bundle of a placement group."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return [(nodes[i], addresses.get(nodes[i], "a node that is gone")) for i in range(len(nodes))]


def _why(ray: Any, result: Any) -> str:
    try:
        return f"cannot start: {ray.get(result)}"
    except ray.exceptions.RayActorError as error:
        return f"has ended: {' '.join(str(error).split())}"
    except ray.exceptions.RayError as error:
        return f"cannot start: {str(error).strip().splitlines()[-1]}"


def main(words: Sequence[str]) -> None:
    die_with(int(words[1]))
    channel = RankChannel.inherited(int(words[0]))
    try:
        RankPlacer(channel).run()
    except (EOFError, BrokenPipeError):
        pass  # the first rank is gone
    except ImportError as error:
        channel.send(PlacingFailed(f"{error}: pip install 'pilotlight-inference[cluster]'"))
    except Exception as error:
        logging.getLogger(__name__).exception("ranks cannot be placed")
        channel.send(PlacingFailed(f"Ray cannot place ranks: {error}"))


if __name__ == "__main__":
    main(sys.argv[1:])
