"""What an engine has counted since it began, whatever became of its schedulers, how fast it computes, and what its newest step took."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.kv.lease import Capacity
from engine.kv.tiers import TierLoad
from engine.protocol import DraftCounts, ModelLoad
from engine.rates import Rates

if TYPE_CHECKING:
    from engine.in_flight import CollectedStep
    from engine.scheduler import Scheduler


class StepTimes(NamedTuple):
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    device_s: float = 0.0
    publish_s: float = 0.0


class PublishedStep(NamedTuple):
    step: "CollectedStep"
    num_tokens: int  # that it gave
    publish_s: float


class EngineStats:
    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.rates = Rates()
        self.last_step = StepTimes()
        self._ended = SchedulerCounts()  # of schedulers that a failed step has ended

    def count_step(self, published: PublishedStep | None, schedule_s: float, step_s: float) -> None:
        """Count a step. `published`: the one whose results it had, if any."""
        if published is None:
            self.last_step = StepTimes(schedule_s, step_s - schedule_s)
            return
        step, num_tokens, publish_s = published
        device_s = step.result.device_s
        self.last_step = StepTimes(schedule_s, step_s - schedule_s - device_s - publish_s, device_s, publish_s)
        self.rates.count(step.num_prompt_tokens, step.num_decodes, num_tokens, step_s)

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
