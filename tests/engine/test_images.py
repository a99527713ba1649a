"""Prompts with images, compared with `transformers` along every path of a token, and how often images are encoded."""

import itertools
import time
from pathlib import Path

import pytest

from pilotlight.engine.api.protocol import PromptImage, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from tests.adapters import ATTENTION, adapted, write_adapter
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import drain, drain_preempting, load_engine, one, random_prompt, runner_of
from tests.engine.pictures import FAMILIES, WHOLE, VisionCheckpoint, picture, write_vision

SMALL, WIDE, TALL = picture(30, 17, seed=1), picture(123, 41, seed=2), picture(13, 87, seed=3, kind="JPEG")


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionCheckpoint:
    return write_vision(tmp_path_factory.mktemp("vision"), request.param)


def with_images(sequence_id: str, prompt: tuple[list[int], tuple[PromptImage, ...]], **sampling: object) -> Submit:
    return replace(full(sequence_id, prompt[0], **sampling), images=prompt[1])


def text(length: int, seed: int) -> list[int]:
    return [token for token in random_prompt(3 * length, seed) if token > 10][:length]


def until_all_run(engine: Engine, count: int) -> None:
    """Step until `count` sequences run: a thread reads their images first."""
    while len(engine.scheduler.running) < count:
        if not engine.step():
            time.sleep(0.001)


def encodes(engine: Engine) -> tuple[int, int]:
    return engine.load().image_encodes, engine.load().image_hits


def test_a_whole_prompt_and_its_continuation_agree(written: VisionCheckpoint) -> None:
    prompt = written.prompt([*text(9, 1), -1, *text(5, 2), -1, *text(7, 3)], WIDE, SMALL)
    engine = load_engine(written.directory)
    heard = one(engine, with_images("a", prompt, max_tokens=9, prompt_logprobs=True))
    assert len(heard.logprobs) == 9
    assert_agrees(written.with_images(WIDE, SMALL), prompt[0], heard)
    assert encodes(engine) == (2, 0)


@pytest.mark.long
def test_text_and_images_agree_in_every_order(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory, max_num_batched_tokens=40)
    files, prompts = {}, {}
    for order in (order for length in (1, 2, 3, 4) for order in itertools.product("ti", repeat=length)):
        name = "".join(order)
        if name.count("i") in (1, 2):
            files[name] = (SMALL, TALL)[: name.count("i")]
            parts = [[-1] if part == "i" else text(5, seed) for seed, part in enumerate(order)]
            prompts[name] = written.prompt(list(itertools.chain(*parts)), *files[name])
    heard = drain(engine, [with_images(name, prompt, max_tokens=3) for name, prompt in prompts.items()])
    assert len(heard) == 20
    for name, prompt in prompts.items():
        assert_agrees(written.with_images(*files[name]), prompt[0], heard[name])


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_a_chunked_prompt_agrees(written: VisionCheckpoint, budget: int) -> None:
    prompt = written.prompt([*text(9, 1), -1, -1, *text(7, 3)], TALL, SMALL)
    engine = load_engine(written.directory, max_num_batched_tokens=budget)
    heard = one(engine, with_images("a", prompt, max_tokens=3, prompt_logprobs=True))
    assert_agrees(written.with_images(TALL, SMALL), prompt[0], heard)


@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_in_one_batch_agree_each_for_itself(written: VisionCheckpoint, depth: int) -> None:
    engine = load_engine(written.directory, max_num_batched_tokens=48, block_size=5, depth=depth)
    files = {"a": (WIDE,), "b": (), "c": (SMALL, TALL), "d": (SMALL,)}
    prompts = {name: written.prompt([*text(4, 5), *[-1] * len(of), *text(6, 6)], *of) for name, of in files.items()}
    heard = drain(engine, [with_images(name, prompt, max_tokens=5) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        model = written.with_images(*files[name]) if files[name] else written.model
        assert_agrees(model, prompt[0], heard[name])


def test_the_same_image_is_a_prefix_hit_and_is_not_encoded_again(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory, block_size=4)
    prompt = written.prompt([*text(6, 1), -1, *text(9, 3)], WIDE)
    one(engine, with_images("a", prompt, max_tokens=2))
    again = one(engine, with_images("b", prompt, max_tokens=4))
    assert again.num_cached_tokens == (len(prompt[0]) - 1) // 4 * 4
    assert_agrees(written.with_images(WIDE), prompt[0], again)
    assert encodes(engine) == (1, 0), "its tokens were cached, so its embeddings were not needed"
    elsewhere = written.prompt([*text(3, 8), -1], WIDE)
    assert_agrees(written.with_images(WIDE), elsewhere[0], one(engine, with_images("c", elsewhere, max_tokens=2)))
    assert encodes(engine) == (1, 1), "at another position the embeddings are reused"


@pytest.mark.parametrize("written", WHOLE, indirect=True)
def test_a_prefix_hit_may_end_within_an_image_whose_tokens_see_each_other(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory, block_size=4)
    prompt = written.prompt([*text(5, 1), -1], WIDE)
    one(engine, with_images("a", prompt, max_tokens=2))
    again = one(engine, with_images("b", prompt, max_tokens=4))
    (image,) = prompt[1]
    assert image.position < (again.num_cached_tokens or 0) < image.position + image.num_tokens - 1
    assert_agrees(written.with_images(WIDE), prompt[0], again)


@pytest.mark.parametrize("written", WHOLE, indirect=True)
def test_an_image_whose_tokens_see_each_other_must_be_whole(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory)
    token_ids, images = written.prompt([*text(5, 1), -1], WIDE)
    heard = one(engine, with_images("a", (token_ids[:-2], images), max_tokens=2))
    assert heard.error is not None
    assert "all of them must be in the prompt" in heard.error


def test_two_images_of_one_size_never_share_a_prefix(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory, block_size=4)
    other = picture(123, 41, seed=7)
    first, second = (written.prompt([*text(6, 1), -1, *text(9, 3)], file) for file in (WIDE, other))
    assert first[0] == second[0]
    one(engine, with_images("a", first, max_tokens=2))
    heard = one(engine, with_images("b", second, max_tokens=4))
    assert heard.num_cached_tokens == 4, "only the text before the image may be cached"
    assert_agrees(written.with_images(other), second[0], heard)
    assert encodes(engine) == (2, 0)


def test_preempted_sequences_agree(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory, kv_tokens=208, max_num_batched_tokens=40)
    files = {"a": SMALL, "b": WIDE, "c": TALL}
    prompts = {name: written.prompt([*text(9, 5), -1, *text(6, 6)], file) for name, file in files.items()}
    for name, prompt in prompts.items():
        engine.submit(with_images(name, prompt, max_tokens=30))
    until_all_run(engine, len(prompts))
    heard = drain_preempting(engine, [])
    assert engine.scheduler.counts.preemptions > 0
    for name, prompt in prompts.items():
        assert_agrees(written.with_images(files[name]), prompt[0], heard[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith(("qwen", "glm"))])
def test_an_image_behind_thousands_of_tokens_agrees(tmp_path: Path, name: str) -> None:
    long = write_vision(tmp_path, name)
    described = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        described.replace('"max_position_embeddings": 256', '"max_position_embeddings": 4608')
    )
    prompt = long.prompt([*text(1300, 1), *text(1400, 2), *text(1400, 3), -1, *text(7, 3)], SMALL)
    assert len(prompt[0]) > 4096
    heard = one(load_engine(tmp_path, kv_tokens=4608), with_images("a", prompt, max_tokens=3))
    assert_agrees(long.with_images(SMALL), prompt[0], heard)


def test_parallel_samples_of_an_image_encode_it_once(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory)
    prompt = written.prompt([*text(9, 1), -1, *text(7, 3)], WIDE)
    leader, sample = (with_images(name, prompt, max_tokens=3) for name in "ab")
    heard = drain(engine, [leader, replace(sample, leader="a")])
    assert encodes(engine)[0] == 1
    assert heard["b"].num_cached_tokens
    for one_heard in heard.values():
        assert_agrees(written.with_images(WIDE), prompt[0], one_heard)


@pytest.mark.parametrize("written", ["qwen 3 vl", "qwen 3 vl, three heads over one, tied"], indirect=True)
def test_an_adapter_agrees_on_an_image_that_the_base_has_encoded(written: VisionCheckpoint, tmp_path: Path) -> None:
    merged = written._replace(model=write_adapter(tmp_path / "a", written.model, targets=ATTENTION))
    engine = load_engine(written.directory)
    prompt = written.prompt([*text(9, 1), -1, *text(7, 3)], WIDE)
    for model, directory in ((written, None), (merged, tmp_path / "a")):
        heard = one(engine, adapted(with_images("a", prompt, max_tokens=5), directory))
        assert heard.num_cached_tokens == 0
        assert_agrees(model.with_images(WIDE), prompt[0], heard)
    assert encodes(engine) == (1, 1)


def test_a_continuation_agrees_and_needs_no_file_that_the_host_has(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory)
    token_ids, images = written.prompt([*text(9, 1), -1, *text(7, 3)], WIDE)
    started = one(engine, with_images("a", (token_ids, images), max_tokens=3))
    named = tuple(replace(image, data=b"") for image in images)
    resumed = with_images("b", (token_ids + started.token_ids, named), max_tokens=3)
    heard = one(engine, replace(resumed, num_delivered_tokens=3))
    assert_agrees(written.with_images(WIDE), token_ids + started.token_ids, heard)
    other = one(load_engine(written.directory), resumed)
    assert other.error is not None
    assert "send it again with its data" in other.error


def test_tenants_share_neither_embeddings_nor_files(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory)
    prompt = written.prompt([*text(9, 1), -1, *text(7, 3)], WIDE)
    sent = with_images("a", prompt, max_tokens=1)
    one(engine, replace(sent, salt=b"one"))
    named = replace(sent, sequence_id="b", images=tuple(replace(image, data=b"") for image in sent.images))
    assert one(engine, replace(named, salt=b"two")).error is not None
    assert one(engine, replace(sent, sequence_id="c", salt=b"two")).error is None
    assert encodes(engine) == (2, 0)


def test_embeddings_have_a_bound_and_those_in_use_stay(
    written: VisionCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(written.directory)
    assert engine.requirements.images is not None
    engine.requirements.images.most_bytes = 1
    files = {"a": SMALL, "b": WIDE, "c": SMALL, "d": TALL}
    prompts = {
        name: written.prompt([*text(5 + i, 5), -1, -1], file, TALL) for i, (name, file) in enumerate(files.items())
    }
    heard = drain(engine, [with_images(name, prompt, max_tokens=2) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_agrees(written.with_images(files[name], TALL), prompt[0], heard[name])
    assert len(engine.requirements.images._encoded) <= 2
    assert encodes(engine)[0] >= 4, "evicted embeddings are computed again"


BROKEN = {
    "no image at all": (b"GIF89a?", "cannot be read"),
    "half a file": (WIDE[: len(WIDE) // 2], "cannot be read"),
    "a file of another kind": (b"%PDF-1.7", "cannot be read"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_image_ends_its_sequence_alone(written: VisionCheckpoint, what: str) -> None:
    engine = load_engine(written.directory)
    data, message = BROKEN[what]
    token_ids, (image,) = written.prompt([*text(9, 1), -1, *text(7, 3)], WIDE)
    bad = with_images("bad", (token_ids, (replace(image, data=data, digest=b"x" * 32),)), max_tokens=3)
    good = with_images("good", (token_ids, (image,)), max_tokens=3)
    heard = drain(engine, [bad, good])
    assert heard["bad"].error is not None
    assert heard["bad"].error.startswith("image 1 of the prompt: cannot be read as PNG")
    assert message in heard["bad"].error
    assert_agrees(written.with_images(WIDE), token_ids, heard["good"])


def test_an_encoder_that_fails_ends_its_sequence_alone(
    written: VisionCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(written.directory)
    encode, calls = runner_of(engine).encode_image, iter([True])

    def failing(digest: bytes, piece: object) -> None:
        if next(calls, False):
            raise MemoryError("no room")
        encode(digest, piece)

    monkeypatch.setattr(engine.runner, "encode_image", failing)
    bad, good = (written.prompt([*text(9, 1), -1, *text(7, 3)], file) for file in (SMALL, WIDE))
    heard = drain(engine, [with_images("bad", bad, max_tokens=3), with_images("good", good, max_tokens=3)])
    assert heard["bad"].error == "image 1 of the prompt could not be encoded: MemoryError: no room"
    assert_agrees(written.with_images(WIDE), good[0], heard["good"])


def test_a_prompt_that_does_not_fit_its_image_is_refused(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory)
    token_ids, (image,) = written.prompt([*text(9, 1), -1, *text(7, 3)], SMALL)
    token_ids[image.position + image.num_tokens - 1] = 11  # one placeholder less than the image has embeddings
    heard = drain(engine, [with_images("a", (token_ids, (image,)), max_tokens=1)])
    assert heard["a"].error is not None
    assert "placeholders for its" in heard["a"].error


def test_a_waiting_image_that_is_aborted_leaves_nothing(written: VisionCheckpoint) -> None:
    engine = load_engine(written.directory)
    prompt = written.prompt([*text(9, 1), -1, *text(7, 3)], WIDE)
    engine.submit(with_images("a", prompt, max_tokens=3))
    engine.step()
    engine.sequences.abort("a")
    assert_agrees(written.with_images(WIDE), prompt[0], one(engine, with_images("b", prompt, max_tokens=3)))
    assert engine.requirements.images is not None
    assert not engine.requirements.images._waiting
    assert not engine.requirements.images._held


def test_a_model_without_a_tower_refuses_images_by_name(tmp_path: Path) -> None:
    from tests.checkpoints import write_llama

    write_llama(tmp_path)
    heard = one(load_engine(tmp_path), with_images("a", ([1, 2, 3], (PromptImage(0, 1, b"", b"x"),))))
    assert heard.error == "tiny takes no images; send text alone"
