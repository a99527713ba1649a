"""A prompt that crashed hosts is recognized whatever part of its answer was delivered, and forgotten after an hour."""

import pytest

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.runtime.dispatch.charges import REMEMBERED_S, Charges

PROMPT = Submit("a", "tiny", (1, 2, 3), SamplingParams(max_tokens=9))
CONTINUED = replace(PROMPT, sequence_id="b", prompt_token_ids=(1, 2, 3, 7), num_delivered_tokens=1, salt=b"another's")


def test_a_prompt_is_refused_after_two_hosts_for_every_sender() -> None:
    charges = Charges()
    charges.charge(PROMPT)
    charges.require_harmless(CONTINUED)
    assert charges.of(CONTINUED) == 1
    charges.charge(CONTINUED)
    with pytest.raises(EngineError, match=r"2 engine hosts have ended by themselves .*; change the request") as refused:
        charges.require_harmless(PROMPT)
    assert refused.value.code == "request_failed"
    charges.require_harmless(replace(PROMPT, prompt_token_ids=(1, 2, 4)))
    charges.require_harmless(replace(PROMPT, model="large"))


def test_a_prompt_that_was_computed_is_charged_with_nothing() -> None:
    charges = Charges()
    charges.charge(PROMPT)
    charges.clear(CONTINUED)
    assert charges.of(PROMPT) == 0


def test_deaths_are_forgotten_after_an_hour_and_the_oldest_prompts_when_there_are_many() -> None:
    now = 0.0
    charges = Charges(lambda: now)
    charges.charge(PROMPT)
    now = REMEMBERED_S
    assert charges.of(PROMPT) == 0
    for i in range(1024):
        charges.charge(replace(PROMPT, prompt_token_ids=(i, i)))
    now += REMEMBERED_S / 2
    assert charges.of(replace(PROMPT, prompt_token_ids=(0, 0))) == 1
    charges.charge(PROMPT)
    assert charges.of(replace(PROMPT, prompt_token_ids=(0, 0))) == 0
