"""Which tokens one sequence has seen and put out, and their biases: what its penalties need of each step.

Kept up to date as the sequence grows, one entry per distinct token, in flat arrays that become tensors without a loop
over tokens. Knows counts; refuses to know tensors and arithmetic. A continuation counts as if it had never been cut:
the tokens already delivered are outputs, though they arrive in its prompt.
"""

from array import array
from collections.abc import Sequence as SequenceOf

from engine.protocol import SamplingParams


class TokenCounts:
    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """`num_prompt_tokens`: those that are not output, delivered or not."""
        self.token_ids = array("q")
        self.bias = array("f")
        self.seen = array("f")
        self.num_outputs = array("f")  # exact up to 2**24
        self._place_of: dict[int, int] = {}
        self._counts_prompt = sampling.repetition_penalty != 1.0
        self._counts_output = self._counts_prompt or bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        for token_id, bias in sampling.logit_bias:
            self.bias[self._place(token_id)] = bias

    @classmethod
    def wanted_by(cls, sampling: SamplingParams, num_prompt_tokens: int) -> "TokenCounts | None":
        """Return the counts of a sequence; None for one whose logits are taken as they are: it pays nothing."""
        return cls(sampling, num_prompt_tokens) if sampling.adjusts_logits else None

    @property
    def follows_output(self) -> bool:
        """Whether it changes with every output token."""
        return self._counts_output

    def __len__(self) -> int:
        return len(self.token_ids)

    def catch_up(self, token_ids: SequenceOf[int], num_known: int) -> None:
        """Count what has been added since the last call; in decoding, one token. The rest is known to the device alone."""
        if self._num_counted == 0 and self._counts_prompt:
            for token_id in dict.fromkeys(token_ids[: self._num_prompt_tokens]):
                self.seen[self._place(token_id)] = 1.0
        if self._counts_output:
            for token_id in token_ids[max(self._num_counted, self._num_prompt_tokens) : num_known]:
                place = self._place(token_id)
                self.seen[place] = 1.0
                self.num_outputs[place] += 1.0
        self._num_counted = num_known

    def _place(self, token_id: int) -> int:
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = len(self.token_ids)
            self.token_ids.append(token_id)
            for numbers in (self.bias, self.seen, self.num_outputs):
                numbers.append(0.0)
        return place
