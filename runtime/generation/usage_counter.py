"""The usage of one answer: tokens of its prompts, cached tokens, drafts, and device time."""

from collections.abc import Sequence

from pilotlight.engine.api.protocol import TokenOutput
from pilotlight.runtime.generation.output_processor import OutputProcessor
from pilotlight.runtime.generation.prompts import EncodedPrompt
from pilotlight.wire.chat import Usage
from pilotlight.wire.hop.continuation import Delivery
from pilotlight.wire.hop.usage import ResourceUse


class UsageCounter:
    """The usage of one answer.
    A prompt counts once for all choices. Its cached tokens are those that its first choice found."""

    def __init__(self, prompts: list[EncodedPrompt], processors: Sequence[OutputProcessor], delivery: Delivery) -> None:
        """`processors` has one entry per choice and counts its tokens.

        `delivery` is the part that another site has computed and counted."""
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.cached_tokens = delivery.cached_tokens
        self.delivered_tokens = sum(len(delivered.token_ids) for delivered in delivery.choices)
        self._image_tokens = sum(image.num_tokens for prompt in prompts for image in prompt.images)
        self._processors = processors
        self._choices_per_prompt = len(processors) // len(prompts)
        self._continued = {choice for choice, delivered in enumerate(delivery.choices) if delivered.has_started}
        self._found_cached: dict[int, int] = {}  # cached tokens of each choice's prompt, not counted yet
        self._num_drafted = self._num_accepted = self._device_us = 0

    def add(self, choice: int, output: TokenOutput) -> None:
        if output.num_cached_tokens is not None:
            self._found_cached.setdefault(choice, output.num_cached_tokens)
        self._num_drafted += output.num_drafted
        self._num_accepted += output.num_accepted
        self._device_us += output.device_us

    def count_cached(self, choice: int) -> None:
        """Count a prompt's cached tokens when its first delta is sent.

        So a site that continues a choice with a delivered part knows that they have been counted.
        """
        found = self._found_cached.pop(choice, 0)
        if choice % self._choices_per_prompt == 0 and choice not in self._continued:
            self.cached_tokens += found

    def usage(self) -> Usage:
        """Return the usage for the client."""
        use = self.resource_use()
        drafts = (use.accepted, use.drafted - use.accepted)
        return Usage.of(use.prompt, use.output, use.cached, use.reasoning, *drafts, self._image_tokens)

    def resource_use(self) -> ResourceUse:
        """Return the usage for a router: tokens of the whole answer, and this site's share of the work."""
        output = sum([each.completion_tokens for each in self._processors])
        reasoning = sum([each.reasoning_tokens for each in self._processors])
        tokens = (self.prompt_tokens, self.cached_tokens, output, reasoning)
        return ResourceUse(*tokens, self._num_drafted, self._num_accepted, self._device_us)
