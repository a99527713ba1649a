"""The token counts of a sequence for penalties, updated token by token, compared with a full count."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.token_counts import CountEntries, TokenCounts

SAMPLING = st.builds(
    SamplingParams,
    st.just(9),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (9, -1.0))]),
)
TOKENS = st.lists(st.integers(0, 4), max_size=8)


def counted(sampling: SamplingParams, prompt: list[int], outputs: list[int]) -> dict[int, tuple[float, float, float]]:
    """Count from scratch, as far as penalties need it; return for each token its bias, whether it was seen, and how often it was output."""
    sees_prompt = sampling.repetition_penalty != 1.0
    sees_outputs = sees_prompt or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    put_out = Counter(outputs if sees_outputs else [])
    seen = {*(prompt if sees_prompt else []), *put_out}
    biases = dict(sampling.logit_bias)
    return {token: (biases.get(token, 0.0), float(token in seen), float(put_out[token])) for token in {*biases, *seen}}


def as_told(entries: CountEntries) -> dict[int, tuple[float, float, float]]:
    assert len(set(entries.token_ids)) == len(entries.token_ids), "a token has one entry"
    rows = zip(entries.bias, entries.seen, entries.num_outputs, strict=True)
    return dict(zip(entries.token_ids, rows, strict=True))


@settings(deadline=None)
@given(SAMPLING, TOKENS, TOKENS, st.lists(st.tuples(TOKENS, TOKENS), max_size=4))
def test_counts_are_those_of_all_tokens_however_they_came(
    sampling: SamplingParams, prompt: list[int], delivered: list[int], steps: list[tuple[list[int], list[int]]]
) -> None:
    counts = TokenCounts(sampling, len(prompt))
    tokens = [*prompt, *delivered]
    for more, drafts in [([], []), *steps]:
        tokens += more
        counts.catch_up([*tokens, -1], len(tokens))  # -1: a token that is not known yet is not counted
        outputs = tokens[len(prompt) :]
        before = counted(sampling, prompt, outputs)
        assert as_told(counts.entries) == before
        assert as_told(counts.followed_by(drafts)) == counted(sampling, prompt, [*outputs, *drafts])
        assert as_told(counts.entries) == before, "drafts are not counted yet"


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_of_outputs_does_not_see_the_prompt(penalty: str) -> None:
    counts = TokenCounts(SamplingParams(9, **{penalty: 0.5}), 2)
    counts.catch_up([1, 2, 2, 3], 3)
    assert as_told(counts.entries) == {2: (0.0, 1.0, 1.0)}
    counts.catch_up([1, 2, 2, 3], 4)
    assert as_told(counts.entries) == {2: (0.0, 1.0, 1.0), 3: (0.0, 1.0, 1.0)}
