"""A prompt that cannot be computed yet takes no share of a step: other prompts get all of its tokens."""

import threading
from typing import Any

import pytest

from pilotlight.engine.api.protocol import AdapterSource, Constraint, PromptImage, Submit
from pilotlight.engine.api.struct import replace
from tests.engine.driver import submit
from tests.engine.fake_runner import expected_tokens, fake_engine
from tests.engine.test_image_residency import FakeEncoder, OnePiece

BUDGET = 64
LONG, OTHERS = list(range(2, 62)), list(range(100, 150))


class SlowEncoder(FakeEncoder):
    def __init__(self) -> None:
        self.may_read = threading.Event()

    def prepare(self, data: bytes) -> OnePiece:
        self.may_read.wait(30)
        return OnePiece()


IMAGE = PromptImage(10, 1, bytes(32), b"the file")
NEEDS: dict[str, dict[str, Any]] = {
    "an image that is read": {"images": (IMAGE,)},
    "a grammar that is never compiled": {"constraint": Constraint("regex", "a+")},
    "an adapter of a model without slots": {"adapter": AdapterSource("a", "/nowhere", "digest")},
}


def needing(name: str, need: str, **changes: Any) -> Submit:
    prompt = [*LONG[:10], FakeEncoder.placeholder, *LONG[11:]]
    return replace(submit(name, prompt, salt=name.encode(), max_tokens=2), **NEEDS[need] | changes)


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_step_is_all_of_those_that_can_be_computed(need: str, depth: int) -> None:
    encoder = SlowEncoder()
    engine, runner = fake_engine(max_num_batched_tokens=BUDGET, images=encoder, depth=depth)
    for i in range(3):
        engine.submit(needing(f"needing {i}", need))
    engine.submit(submit("other", OTHERS, salt=b"other", max_tokens=2))
    engine.step()
    assert runner.batch_tokens == [len(OTHERS)]
    encoder.may_read.set()
    heard: dict[str, list[int]] = {}
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            heard.setdefault(output.sequence_id, []).extend(output.token_ids)
    assert heard["other"] == expected_tokens(OTHERS, 2)
    assert engine.scheduler.pool.num_held == 0
    if "image" in need:
        assert all(len(heard[f"needing {i}"]) == 2 for i in range(3)), "they continued when their image was there"
    engine.close()


def test_a_running_prompt_whose_next_chunk_has_an_image_leaves_its_share_to_the_others() -> None:
    encoder = SlowEncoder()
    engine, runner = fake_engine(max_num_batched_tokens=16, images=encoder)
    late = replace(IMAGE, position=30)
    prompt = [*LONG[:30], FakeEncoder.placeholder, *LONG[31:]]
    engine.submit(replace(submit("a", prompt, salt=b"a", max_tokens=2), images=(late,)))
    engine.step()
    engine.submit(submit("other", OTHERS, salt=b"other", max_tokens=2))
    for _ in range(3):
        engine.step()
    assert runner.batch_tokens[0] == 16, "tokens before the image are computed"
    assert sum(runner.batch_tokens[1:]) == len(OTHERS[: 3 * 16]), "then other sequences get the whole step"
    assert [sequence.sequence_id for sequence in engine.scheduler.running] == ["other"]
    encoder.may_read.set()
    while engine.has_work:
        engine.step()
    assert engine.scheduler.pool.num_held == 0
    engine.close()
