"""Prompts with images whose blocks come from tiers, other ranks or another host, or whose model sleeps in between."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.loading.kv_memory import KvMemory
from tests.engine.agreement import assert_agrees
from tests.engine.driver import drain_preempting, load_engine, one
from tests.engine.parallel.test_ranks import group_memory, group_of, loaded
from tests.engine.pictures import DIVISIBLE, FAMILIES, WHOLE, VisionCheckpoint, write_vision
from tests.engine.test_hand_over import Pair
from tests.engine.test_images import SMALL, TALL, WIDE, encodes, text, until_all_run, with_images
from tests.engine.test_tier_families import open_anew

pytestmark = pytest.mark.usefixtures("always_worth_it")


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionCheckpoint:
    return write_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.mark.process
def test_an_image_whose_blocks_are_in_a_tier_is_not_encoded_again(written: VisionCheckpoint, tmp_path: Path) -> None:
    prompt = written.prompt([*text(9, 1), -1, *text(25, 3)], WIDE)
    for host, expected in (("host", 1), ("host", 0), ("another host", 0)):
        tiers = open_anew(tmp_path, host=host)
        assert tiers.disk is not None
        assert tiers.disk.wait_until_idle(10)
        engine = load_engine(written.directory, tiers=tiers)
        assert isinstance(engine.tiers, TieredCache)
        heard = one(engine, with_images("a", prompt, max_tokens=3))
        assert_agrees(written.with_images(WIDE), prompt[0], heard)
        assert encodes(engine)[0] == expected
        assert engine.tiers.wait_until_idle(10)
        engine.close()
        tiers.close()


@pytest.mark.process
@pytest.mark.parametrize("written", ["qwen 3 vl"], indirect=True)
def test_an_image_that_is_prepared_otherwise_finds_no_block(written: VisionCheckpoint, tmp_path: Path) -> None:
    directory = shutil.copytree(written.directory, tmp_path / "model")
    processor = directory / "preprocessor_config.json"
    prompt = written.prompt([*text(9, 1), -1, *text(25, 3)], WIDE)
    for changed in ({}, {"image_mean": [0.1, 0.2, 0.3]}):
        processor.write_text(json.dumps(json.loads(processor.read_text()) | changed))
        tiers = open_anew(tmp_path)
        engine = load_engine(directory, tiers=tiers)
        assert isinstance(engine.tiers, TieredCache)
        assert one(engine, with_images("a", prompt, max_tokens=3)).num_cached_tokens == 0
        assert engine.tiers.wait_until_idle(10)
        engine.close()
        tiers.close()


@pytest.mark.process
def test_swapped_sequences_agree(written: VisionCheckpoint, tmp_path: Path) -> None:
    tiers = open_anew(tmp_path)
    engine = load_engine(written.directory, kv_tokens=208, max_num_batched_tokens=40, tiers=tiers)
    assert isinstance(engine.tiers, TieredCache)
    files = {"a": SMALL, "b": WIDE, "c": TALL}
    prompts = {name: written.prompt([*text(9, 5), -1, *text(6, 6)], file) for name, file in files.items()}
    for name, prompt in prompts.items():
        engine.submit(with_images(name, prompt, max_tokens=30))
    until_all_run(engine, len(prompts))
    heard = drain_preempting(engine, [])
    load = engine.load()
    assert load.swaps == load.preemptions > 0
    for name, prompt in prompts.items():
        assert_agrees(written.with_images(files[name]), prompt[0], heard[name])
    assert engine.tiers.load().num_pinned == 0
    engine.close()
    tiers.close()


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one stage", "two stages"])
def ranks(process_tier: None, request: pytest.FixtureRequest) -> Iterator[KvMemory]:
    with group_memory(group_of(2, stages=request.param)) as memory:
        yield memory


@pytest.mark.parametrize("written", DIVISIBLE, indirect=True)
def test_two_ranks_agree(written: VisionCheckpoint, ranks: KvMemory) -> None:
    prompt = written.prompt([*text(9, 1), -1, *text(5, 2), -1, *text(7, 3)], WIDE, SMALL)
    with loaded(written.directory, ranks) as model:
        heard = one(model.engine, with_images("a", prompt, max_tokens=5))
        assert_agrees(written.with_images(WIDE, SMALL), prompt[0], heard)
        again = one(model.engine, with_images("b", prompt, max_tokens=2))
        assert_agrees(written.with_images(WIDE, SMALL), prompt[0], again)


def test_the_host_that_answers_encodes_nothing_that_it_fetches(written: VisionCheckpoint, tmp_path: Path) -> None:
    pair = Pair(written.directory, tmp_path, max_num_batched_tokens=48)
    prompt = written.prompt([*text(9, 1), -1, *text(25, 3)], WIDE)
    heard = pair.answer([with_images("a", prompt, max_tokens=4)])
    assert_agrees(written.with_images(WIDE), prompt[0], heard["a"])
    assert heard["a"].num_fetched_tokens > 0
    assert (encodes(pair.prefill)[0], encodes(pair.decode)[0]) == (1, 0)
    pair.assert_nothing_is_left()
    pair.close()


@pytest.mark.parametrize("written", WHOLE, indirect=True)
def test_an_image_whose_tokens_see_each_other_is_handed_over_whole(written: VisionCheckpoint, tmp_path: Path) -> None:
    pair = Pair(written.directory, tmp_path, max_num_batched_tokens=48)
    prompt = written.prompt([*text(28, 1), -1], WIDE)
    (image,), full_blocks = prompt[1], (len(prompt[0]) - 1) // 16 * 16
    assert image.position < full_blocks < image.position + image.num_tokens, "the last full block ends in the image"
    heard = pair.answer([with_images("a", prompt, max_tokens=4)])
    assert_agrees(written.with_images(WIDE), prompt[0], heard["a"])
    assert heard["a"].num_fetched_tokens == full_blocks
    pair.assert_nothing_is_left()
    pair.close()
