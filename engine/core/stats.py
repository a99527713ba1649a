"""Statistics of an engine: counts since its start, speeds, and times of its newest step."""

from typing import NamedTuple

from pilotlight.engine.core.in_flight import CollectedStep
from pilotlight.engine.core.rates import Rates
from pilotlight.engine.scheduling.scheduler_counts import SchedulerCounts


class StepTimes(NamedTuple):
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    device_s: float = 0.0
    publish_s: float = 0.0


class PublishedStep(NamedTuple):
    step: CollectedStep
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
