"""The counts of one sequence's prompt and output tokens, and its biases: the input of its penalties.

Updated as the sequence grows, one entry per distinct token, in flat arrays that become tensors without a loop over tokens. This module is independent
of tensors and of the arithmetic of penalties. In a continuation, delivered tokens count as output although they arrive in the prompt.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from copy import copy
from typing import NamedTuple

from pilotlight.engine.api.protocol import SamplingParams


class CountEntries(NamedTuple):
    """One value in each array for every token that is counted or has a bias."""

    token_ids: "array[int]"
    bias: "array[float]"
    seen: "array[float]"
    num_outputs: "array[float]"  # exact up to 2**24


class TokenCounts:
    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """`num_prompt_tokens`: number of prompt tokens, without delivered output."""
        self.entries = CountEntries(array("q"), array("f"), array("f"), array("f"))
        self._place_of: dict[int, int] = {}
        self._counts_prompt = sampling.repetition_penalty != 1.0
        self._counts_output = self._counts_prompt or bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        for token_id, bias in sampling.logit_bias:
            self.entries.bias[self._place(token_id)] = bias

    def catch_up(self, token_ids: SequenceOf[int], num_known: int) -> None:
        """Count the tokens from where the last call stopped to index `num_known`."""
        if self._num_counted == 0 and self._counts_prompt:
            for token_id in dict.fromkeys(token_ids[: self._num_prompt_tokens]):
                self.entries.seen[self._place(token_id)] = 1.0
        for token_id in token_ids[max(self._num_counted, self._num_prompt_tokens) : num_known]:
            self._count(token_id)
        self._num_counted = num_known

    def followed_by(self, drafts: SequenceOf[int]) -> CountEntries:
        """Return the entries as they would be if `drafts` followed."""
        if not drafts or not self._counts_output:
            return self.entries
        ahead = copy(self)
        token_ids, bias, seen, num_outputs = self.entries
        ahead.entries = CountEntries(token_ids[:], bias[:], seen[:], num_outputs[:])
        ahead._place_of = dict(self._place_of)
        for token_id in drafts:
            ahead._count(token_id)
        return ahead.entries

    def _count(self, token_id: int) -> None:
        if self._counts_output:
            place = self._place(token_id)
            self.entries.seen[place] = 1.0
            self.entries.num_outputs[place] += 1.0

    def _place(self, token_id: int) -> int:
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = len(self.entries.token_ids)
            self.entries.token_ids.append(token_id)
            for numbers in self.entries[1:]:
                numbers.append(0.0)
        return place
