"""Which device's copy of a model computes a sequence: the one where its prompt is computed soonest and its neighbours slow it down least.

Every open sequence counts with the tokens that are probably still to be computed for it: the part of its prompt that is not cached, until its
first token is here, and what is left of an answer as long as the model's last ones. Divided by measured rates they are seconds, which add up over
the models of a host. A conversation stays where its prefix lies for as long as computing it anew elsewhere would take longer. Knows no waking and no
failures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.protocol import Submit
from runtime.engines.copies import Copy
from runtime.engines.prefixes import chain_of
from runtime.engines.slot import Slot

# Where nobody has measured: of a copy that has not computed anything yet, nor has a sibling. As long as they are equal everywhere, only tokens count.
PREFILL_TOKENS_PER_S = 2000.0
DECODE_TOKENS_PER_S = 50.0
# By which a sequence lengthens its neighbours' steps, as the router assumes as well; how crowded a host already is, its measured rate says.
NEIGHBOUR_SHARE = 0.02
OUTPUT_TOKENS = 64.0  # of a model's first answers
OUTPUT_WEIGHT = 0.1  # of the newest answer in the moving average of their lengths


class Seat:
    """A sequence's place on a copy, as long as it is open there."""

    def __init__(self, copy: Copy, submit: Submit, prefill_tokens: int, decode_tokens: int) -> None:
        self.copy = copy
        self.submit = submit
        self.output: list[int] = []
        self._prefill_tokens = prefill_tokens
        self._decode_tokens = decode_tokens

    def take(self) -> None:
        work = self.copy.work
        work.sequences += 1
        work.prefill_tokens += self._prefill_tokens
        work.decode_tokens += self._decode_tokens

    def note(self, token_ids: Sequence[int]) -> None:
        """The engine has produced them."""
        if not token_ids:
            return
        self.output += token_ids
        done = min(len(token_ids), self._decode_tokens)
        self.copy.work.prefill_tokens -= self._prefill_tokens
        self.copy.work.decode_tokens -= done
        self._prefill_tokens, self._decode_tokens = 0, self._decode_tokens - done

    def leave(self) -> None:
        work = self.copy.work
        work.sequences -= 1
        work.prefill_tokens -= self._prefill_tokens
        work.decode_tokens -= self._decode_tokens


class Dispatch:
    def __init__(self, slots: Sequence[Slot], num_devices: int) -> None:
        self._slots = {slot.config.name: slot for slot in slots}
        self._has_choice = num_devices > 1
        self._output_tokens = {slot.config.name: OUTPUT_TOKENS for slot in slots}
        self._seats: dict[str, Seat] = {}  # by sequence

    def choose(self, submit: Submit, copies: Sequence[Copy]) -> Copy:
        """Among those that live. Choices of one request follow the first, which computes their prompt."""
        if len(copies) == 1:
            return copies[0]
        if (leader := self._seats.get(submit.leader or "")) is not None and leader.copy in copies:
            return leader.copy
        chain = chain_of(submit.salt, submit.prompt_token_ids)

        def cost_s(copy: Copy) -> float:
            uncached = max(1, len(submit.prompt_token_ids) - copy.prefixes.held_tokens(chain))
            return self.backlog_s(copy) + uncached / self._rates(copy)[0]

        return min(copies, key=lambda copy: (cost_s(copy), copy.host.index))

    @contextmanager
    def seated(self, submit: Submit, copy: Copy) -> Iterator[Seat]:
        """The sequence is on this copy as long as the scope is open."""
        name, prompt = submit.model, submit.prompt_token_ids
        held = 0
        if self._has_choice:
            chain = chain_of(submit.salt, prompt)
            held = copy.prefixes.held_tokens(chain)
            copy.prefixes.remember(chain, self._capacity(copy))
        decode = 0 if submit.pooling else min(submit.sampling.max_tokens, round(self._output_tokens[name]))
        seat = self._seats[submit.sequence_id] = Seat(copy, submit, max(1, len(prompt) - held), decode)
        seat.take()
        try:
            yield seat
        finally:
            seat.leave()
            del self._seats[submit.sequence_id]
            self._learn(seat)

    def backlog_s(self, copy: Copy) -> float:
        """What a newcomer would lose to everything that is open on the copy's host, of all its models."""
        index = copy.host.index
        return sum(self._work_s(slot.copies[index]) for slot in self._slots.values())

    def _work_s(self, copy: Copy) -> float:
        work = copy.work
        if not work.sequences:
            return 0.0
        prefill_rate, decode_rate = self._rates(copy)
        return work.prefill_tokens / prefill_rate + NEIGHBOUR_SHARE * work.decode_tokens / decode_rate

    def _rates(self, copy: Copy) -> tuple[float, float]:
        """Tokens per second: of a prompt, and of each answer. As measured here, else on a sibling."""
        loads = [copy.load, *(other.load for other in copy.slot.copies if other is not copy)]
        prefill = next((load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s), PREFILL_TOKENS_PER_S)
        decode = next((load.decode_tokens_per_s for load in loads if load.decode_tokens_per_s), DECODE_TOKENS_PER_S)
        return prefill, decode

    def _learn(self, seat: Seat) -> None:
        if seat.output:
            name = seat.submit.model
            self._output_tokens[name] += OUTPUT_WEIGHT * (len(seat.output) - self._output_tokens[name])
        if self._has_choice and seat.output and seat.copy.is_awake:  # the conversation's next turn begins with this one
            chain = chain_of(seat.submit.salt, (*seat.submit.prompt_token_ids, *seat.output))
            seat.copy.prefixes.remember(chain, self._capacity(seat.copy))

    def _capacity(self, copy: Copy) -> int:
        info = copy.slot.info
        return info.total_blocks * info.block_size if info is not None else 0
