"""Statistics of an engine: counts since its start, speeds, and times of its newest step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pilotlight.engine.core.rates import Rates

if TYPE_CHECKING:
    from pilotlight.engine.core.in_flight import CollectedStep


class StepTimes(NamedTuple):
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    device_s: float = 0.0
    publish_s: float = 0.0


class PublishedStep(NamedTuple):
    step: "CollectedStep"
    num_tokens: int  # tokens that the step published
    publish_s: float


class EngineStats:
    def __init__(self) -> None:
        self.num_steps = 0  # steps whose results have arrived
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.rates = Rates()
        self.last_step = StepTimes()
        self.counts = SchedulerCounts()  # sums over all schedulers that the engine has had

    def count_step(self, published: PublishedStep | None, schedule_s: float, step_s: float) -> None:
        """Count a step. `published`: the step whose results were published, if any."""
        if published is None:
            self.last_step = StepTimes(schedule_s, step_s - schedule_s)
            return
        self.num_steps += 1
        step, num_tokens, publish_s = published
        device_s = step.result.device_s
        self.last_step = StepTimes(schedule_s, step_s - schedule_s - device_s - publish_s, device_s, publish_s)
        self.rates.count(step.num_prompt_tokens, step.num_decodes, num_tokens, step_s)


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of schedulers; the fields have the same names as in ModelLoad."""

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
