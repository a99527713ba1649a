"""Counts of an engine's schedulers since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounts:
    """Counters whose names are those of the fields of ModelLoad."""

    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # prompt tokens that were found, on the device or in a tier
    prefix_host_hits: int = 0  # tokens of prefix_hits that were found in the host tier
    prefix_disk_hits: int = 0  # tokens of prefix_hits that were found in the disk tier
    prefix_store_hits: int = 0  # tokens of prefix_hits that were found in the cluster's store
    prefix_peer_hits: int = 0  # tokens of prefix_hits that were fetched from another host
    preemptions: int = 0
    swaps: int = 0  # preemptions whose blocks were kept in the host tier

    def by_name(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}
