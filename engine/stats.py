"""What an engine has counted since it began, whatever became of its schedulers, and how fast it computes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.kv.lease import Capacity
from engine.kv.tiers import TierLoad
from engine.protocol import DraftCounts, ModelLoad
from engine.rates import Rates

if TYPE_CHECKING:
    from engine.scheduler import Scheduler


class EngineStats:
    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.rates = Rates()
        self._ended = SchedulerCounts()  # of schedulers that a failed step has ended

    def end(self, scheduler: "Scheduler") -> None:
        """Keep the counts of a scheduler that another one replaces."""
        self._ended += scheduler.counts

    def load(
        self,
        scheduler: "Scheduler",
        capacity: Capacity,
        tiers: TierLoad,
        block_tokens: float,
        drafts: DraftCounts,
        adapter_loads: int,
        images: tuple[int, int],
    ) -> ModelLoad:
        """`block_tokens`: of a token, a block has so many in all groups; `images`: that were encoded, and that were found so."""
        counts = self._ended + scheduler.counts
        return ModelLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting_tokens,
            free_blocks=capacity.free_blocks,
            total_blocks=capacity.total_blocks,
            **counts.by_name(),
            tier_losses=tiers.num_lost,
            pinned_blocks=tiers.num_pinned,
            store=tiers.store,
            store_tokens_per_s=tiers.store_blocks_per_s * block_tokens,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_tokens_per_s=self.rates.decode_tokens_per_s,
            handed_over_tokens_per_s=tiers.handed_over_blocks_per_s * block_tokens,
            drafts=drafts,
            adapter_loads=adapter_loads,
            image_encodes=images[0],
            image_hits=images[1],
        )


@dataclass(slots=True)
class SchedulerCounts:
    """The counts of one scheduler, under the names that ModelLoad gives it."""

    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # and found, on the device or in a tier
    prefix_host_hits: int = 0  # of these, in the host tier
    prefix_disk_hits: int = 0  # and in the disk tier
    prefix_store_hits: int = 0  # and in the cluster's store
    prefix_peer_hits: int = 0  # and fetched from another host
    preemptions: int = 0
    swaps: int = 0  # preemptions whose blocks were kept in the host tier

    def __add__(self, other: "SchedulerCounts") -> "SchedulerCounts":
        return SchedulerCounts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def by_name(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}
