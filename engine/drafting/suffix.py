"""A drafter that proposes the tokens after an earlier occurrence of the sequence's last tokens.

It searches the sequence itself, with its prompt, and its tenant's recent outputs, which are never used for other tenants. After prompt lookup
decoding (Saxena 2023) and SuffixDecoding (Oliaro et al., arXiv:2411.04975): the longer the match, the likelier its continuation.
"""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.drafting.drafter import Draft, known_tokens
from pilotlight.engine.drafting.ngram_index import MOST_MATCHED, SEPARATOR, NgramIndex

MOST_TENANT_TOKENS = 1 << 16  # limit for the outputs of one tenant: at most 1 MiB
MOST_TOKENS = 1 << 19  # limit for the outputs of all tenants: at most 8 MiB
_BEFORE_OUTPUT = 4  # number of the prompt's last tokens kept before an output, so that its first tokens can be found
# (least length of a match, prior acceptance rate), used before any measurement
_PRIORS = ((16, 0.9), (8, 0.85), (4, 0.7), (3, 0.55), (2, 0.35))


class SuffixDrafter:
    name = "suffix"

    def __init__(self, most_tenant_tokens: int = MOST_TENANT_TOKENS, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tenant_tokens = most_tenant_tokens
        self._most_tokens = most_tokens
        self._own: dict[Sequence, NgramIndex] = {}
        self._outputs: OrderedDict[bytes, NgramIndex] = OrderedDict()  # by tenant, the least recently used first

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        num_known, token_ids = known_tokens(sequence), sequence.token_ids
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = NgramIndex()
        if len(own) < num_known:
            own.extend(token_ids[len(own) : num_known])
        tail = [*token_ids[max(0, num_known - MOST_MATCHED) : num_known], *ahead][-MOST_MATCHED:]
        match, found_in = own.find(tail), own
        outputs = self._outputs.get(sequence.tenant)
        if outputs is not None and (match is None or match.length < MOST_MATCHED):
            other = outputs.find(tail)
            if other is not None and (match is None or other.length > match.length):
                match, found_in = other, outputs
        if match is None:
            return None
        found = found_in.following(match, most)
        while found_in is own and len(found) < most:  # the match reaches the end: the text repeats itself
            found += found[: most - len(found)]
        least, prior = next((least, prior) for least, prior in _PRIORS if match.length >= least)
        return Draft(found, f"suffix {least}", prior) if found else None

    def forget(self, sequence: Sequence) -> None:
        """Keep the output of an ended sequence for its tenant's later sequences."""
        if self._own.pop(sequence, None) is None:
            return
        num_prompt = sequence.first_output
        text = sequence.token_ids[max(0, num_prompt - _BEFORE_OUTPUT) : known_tokens(sequence)]
        outputs = self._outputs.pop(sequence.tenant, None) or NgramIndex()
        most = self._most_tenant_tokens
        if len(outputs) + len(text) >= most:
            older, outputs = outputs, NgramIndex()
            outputs.extend(older.tokens[len(older) - most // 2 :])
        outputs.extend([*text[-most // 4 :], SEPARATOR])
        self._outputs[sequence.tenant] = outputs
        while sum(map(len, self._outputs.values())) > self._most_tokens:
            self._outputs.popitem(last=False)
