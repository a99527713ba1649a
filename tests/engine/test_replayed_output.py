"""Output tokens that are computed again, after a move or a preemption: on a CPU with quantized weights, no bit of the rest changes.

There a difference in the last bit matters: rounding inputs to 8 bits makes it as large as the quantization's own error.
"""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from pilotlight.engine.gguf.directory import directory_of
from pilotlight.kernels.cpu import library
from tests.engine.driver import Heard, drain, load_engine, one, random_prompt, submit
from tests.engine.gguf.files import Kind, write_both

LENGTH = 50

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not library.takes_codes():
        pytest.skip("there is no C library, or it has no vector instructions here")
    folder = tmp_path_factory.mktemp("quantized")
    return directory_of(write_both(folder, LlamaConfig, Kind.Q8_0)[1], folder / "store")


def logprobs_of(heard: Heard) -> list[float]:
    return [each.logprob for each in heard.logprobs]


@pytest.mark.parametrize("cut", [1, 2, 15, 33, 49])
@pytest.mark.parametrize("budget", [2048, 13])
def test_a_moved_sequence_goes_on_with_the_same_bits(quantized: Path, cut: int, budget: int) -> None:
    prompt = random_prompt(40, seed=31)
    whole = one(load_engine(quantized), submit("whole", prompt, max_tokens=LENGTH, num_logprobs=0))
    engine = load_engine(quantized, max_num_batched_tokens=budget)
    rest = one(
        engine,
        submit(
            "rest",
            [*prompt, *whole.token_ids[:cut]],
            num_delivered_tokens=cut,
            max_tokens=LENGTH - cut,
            num_logprobs=0,
        ),
    )
    assert rest.token_ids == whole.token_ids[cut:]
    assert logprobs_of(rest) == logprobs_of(whole)[cut:]


def test_a_preempted_sequence_goes_on_with_the_same_bits(quantized: Path) -> None:
    asked = [submit(f"{i}", random_prompt(40, seed=i), max_tokens=LENGTH, num_logprobs=0) for i in range(6)]
    alone = {each.sequence_id: logprobs_of(one(load_engine(quantized), each)) for each in asked}
    engine = load_engine(quantized, kv_tokens=112)
    heard = drain(engine, asked)
    assert engine.scheduler.counts.preemptions > 0
    assert {name: logprobs_of(each) for name, each in heard.items()} == alone
