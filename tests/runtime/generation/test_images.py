"""Images in requests of every dialect: the inputs of the engine, and the errors."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pilotlight.dialects.body.images import ImagePart
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.guarded_pool import GuardedJob, JobError
from pilotlight.engine.api.protocol import PromptImage, TokenLogprobs, TokenOutput
from pilotlight.runtime.generation.images import AT_ONCE, ImageReader
from pilotlight.sites.site import ImagesConfig
from pilotlight.wire.errors import ApiError
from tests.asgi import call, eventually
from tests.fakes import FakeEngineClient, FakeLauncher, ids, says
from tests.pictures import MARKER, data_url, moving, picture, png_of_size, write_gemma_directory, write_seeing_directory
from tests.runtime.conftest import Site, SiteMaker

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RUN = "/client/v4/accounts/acc1/ai/run/tiny"
PLACEHOLDER = 261
RED, BLUE = picture(), picture(colour="blue")  # two tokens each


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    return write_seeing_directory(tmp_path / "tiny")


def seeing(vocab_size: int = 262) -> FakeLauncher:
    def prepare(client: FakeEngineClient) -> None:
        client.image_token_id, client.vocab_size = PLACEHOLDER, vocab_size

    return FakeLauncher(prepare)


@pytest.fixture
async def site(make_site: SiteMaker) -> AsyncIterator[Site]:
    async with make_site(launcher=seeing()) as made:
        yield made
        await made.is_idle()


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "auto"}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], **fields}


TEXT = {"type": "text", "text": "What is it?"}
BASE64 = data_url(RED).partition(",")[2]
SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}
BODIES = {
    "chat": (CHAT, chat(part(RED), TEXT)),
    "a bare url": (CHAT, chat({"type": "image_url", "image_url": data_url(RED)}, TEXT)),
    "responses": (RESPONSES, {"model": "tiny", "input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": data_url(RED), "detail": "low"}, {"type": "input_text", "text": "What is it?"}]}]}),
    "messages": (MESSAGES, {"model": "tiny", "max_tokens": 20, "messages": [
        {"role": "user", "content": [{"type": "image", "source": SOURCE}, TEXT]}]}),
    "bytes": (RUN, {"prompt": "What is it?", "image": list(RED)}),
    "base64": (RUN, {"prompt": "What is it?", "image": BASE64}),
    "beside messages": (RUN, {"messages": [{"role": "user", "content": "What is it?"}], "image": data_url(RED)}),
    "among messages": (RUN, {"messages": [{"role": "user", "content": [part(RED), TEXT]}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_every_dialect_puts_an_image_where_it_stands(name: str, site: Site) -> None:
    path, body = BODIES[name]
    answer = await call(site.app, path, body)
    assert answer.status == 200, answer.body
    submit = site.engine.submits[0]
    before, after = ids("<|im_start|>user\n"), ids("What is it?<|im_end|>\n<|im_start|>assistant\n")
    assert submit.prompt_token_ids == (*before, PLACEHOLDER, PLACEHOLDER, *after)
    assert submit.images == (PromptImage(len(before), 2, hashlib.sha256(RED).digest(), RED),)


async def test_gemmas_images_are_between_blank_lines_and_their_tokens_see_each_other(
    make_site: SiteMaker, model_directory: Path
) -> None:
    write_gemma_directory(model_directory)
    async with make_site(launcher=seeing(vocab_size=264)) as site:
        answer = await call(site.app, CHAT, chat({"type": "text", "text": "<start_of_image>"}, part(RED), TEXT))
        assert answer.status == 200, answer.body
        submit = site.engine.submits[0]
        before = ids("<|im_start|>user\n<start_of_image>\n\n")
        after = ids("\n\nWhat is it?<|im_end|>\n<|im_start|>assistant\n")
        start, end = PLACEHOLDER + 1, PLACEHOLDER + 2
        assert submit.prompt_token_ids == (*before, start, *[PLACEHOLDER] * 4, end, *after)
        digest = hashlib.sha256(RED).digest()
        assert submit.images == (PromptImage(len(before) + 1, 4, digest, RED, is_bidirectional=True),)
        assert answer.json["usage"]["prompt_tokens_details"]["image_tokens"] == 4
        await site.is_idle()


async def test_images_are_counted_as_tokens_of_the_prompt(site: Site) -> None:
    answer = await call(site.app, CHAT, chat(part(RED), TEXT, part(picture(112, 56))))
    usage = answer.json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 2 + 8}
    assert usage["prompt_tokens"] == len(site.engine.submits[0].prompt_token_ids)
    body = {"model": "tiny", "messages": BODIES["messages"][1]["messages"]}
    counted = await call(site.app, f"{MESSAGES}/count_tokens", body)
    assert counted.json["input_tokens"] == usage["prompt_tokens"] - 8


async def test_results_of_tools_may_have_images(site: Site) -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": SOURCE}]}]
    calls = [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": blocks},
    ]
    assert (await call(site.app, MESSAGES, {"model": "tiny", "max_tokens": 9, "messages": turns})).status == 200
    items = [{"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "t1", "output": [{"type": "input_image", "image_url": data_url(RED)}]}]  # fmt: skip
    assert (await call(site.app, RESPONSES, {"model": "tiny", "input": items})).status == 200
    assert [len(submit.images) for submit in site.engine.submits] == [1, 1]


async def test_a_placeholder_that_a_user_writes_is_text(site: Site) -> None:
    answer = await call(site.app, CHAT, chat({"type": "text", "text": f"{MARKER} and"}, part(RED)))
    assert answer.status == 200, answer.body
    assert site.engine.submits[0].prompt_token_ids.count(PLACEHOLDER) == 2
    alone = {"model": "tiny", "messages": [{"role": "user", "content": MARKER}]}
    assert (await call(site.app, CHAT, alone)).status == 200
    assert PLACEHOLDER not in site.engine.submits[1].prompt_token_ids


async def test_a_host_gets_a_file_once_and_says_when_it_has_dropped_it(site: Site) -> None:
    engine = site.engine
    await call(site.app, CHAT, chat(part(RED), TEXT))
    await call(site.app, CHAT, chat(part(RED), part(BLUE), TEXT, n=2))
    assert [[bool(image.data) for image in submit.images] for submit in engine.submits] == [
        [True],
        [False, True],
        [False, False],
    ]
    engine.scripts = [[EngineError("images_missing", "an image is not here")], says("A red one")]
    answer = await call(site.app, CHAT, chat(part(RED), TEXT))
    assert answer.json["choices"][0]["message"]["content"] == "A red one"
    assert [[image.data for image in submit.images] for submit in engine.submits[-2:]] == [[b""], [RED]]


async def test_choices_that_are_sent_again_with_their_image_still_share_the_first_ones_prompt(site: Site) -> None:
    engine = site.engine
    await call(site.app, CHAT, chat(part(RED), TEXT))
    engine.scripts = [*[[EngineError("images_missing", "an image is not here")]] * 3, *[says("A red one")] * 3]
    answer = await call(site.app, CHAT, chat(part(RED), TEXT, n=3))
    assert [choice["message"]["content"] for choice in answer.json["choices"]] == ["A red one"] * 3
    first, *others = engine.submits[-3:]
    assert first.sequence_id == engine.submits[1].sequence_id
    assert [other.leader for other in others] == [first.sequence_id] * 2


async def test_a_response_is_continued_with_the_images_before_it(site: Site) -> None:
    first = await call(site.app, RESPONSES, BODIES["responses"][1])
    again = {"model": "tiny", "input": "And now?", "previous_response_id": first.json["id"]}
    assert (await call(site.app, RESPONSES, again)).status == 200
    assert [image.digest for image in site.engine.submits[1].images] == [hashlib.sha256(RED).digest()]


async def test_a_truncated_conversation_keeps_the_images_of_its_end(site: Site) -> None:
    site.engine.context_length = 512
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(data)},
                                          {"type": "input_text", "text": "x" * 300}]} for data in (RED, BLUE)]  # fmt: skip
    answer = await call(site.app, RESPONSES, {"model": "tiny", "input": items, "truncation": "auto"})
    assert answer.status == 200, answer.body
    assert [image.data for image in site.engine.submits[0].images] == [BLUE]


async def test_an_image_is_read_once_for_all_questions_about_it(site: Site) -> None:
    async def run(job: GuardedJob) -> tuple[int, int]:
        jobs.append(job)
        return 56, 28

    jobs: list[GuardedJob] = []
    site.app.site.generator.images = ImageReader(ImagesConfig(), max_body_mib=8.0, run=run)
    site.engine.answer = lambda submit: [TokenOutput("", (1,), "stop", prompt_logprobs=(TokenLogprobs(-0.5),) * 9)]
    questions = {name: {"type": "noul", "instructions": name} for name in ("red", "large", "new")}
    body = {"model": "tiny", "state": "A picture.", "questions": questions, "images": [data_url(RED)]}
    answer = await call(site.app, "/v1/systemone", body)
    assert answer.status == 200, answer.body
    assert (len(jobs), {len(submit.images) for submit in site.engine.submits}) == (1, {1})


async def test_models_tell_whether_they_see(site: Site, make_site: SiteMaker) -> None:
    assert (await call(site.app, "/v1/models")).json["data"][0]["input_modalities"] == ["text", "image"]
    async with make_site() as blind:
        assert (await call(blind.app, "/v1/models")).json["data"][0]["input_modalities"] == ["text"]
        refused = await call(blind.app, CHAT, chat(part(RED), TEXT))
        assert refused.status == 400
        assert refused.json["error"]["message"].startswith(
            "Invalid content type. image_url is only supported by certain models."
        )
        assert (await call(blind.app, CHAT, chat(TEXT))).status == 200


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
BAD = {
    "an SVG": (part(SVG), "is not in PNG, JPEG"),
    "half a header": (part(RED[:20]), "cannot be read"),
    "half an image": (part(RED[: len(RED) // 2]), "cannot be read as PNG"),
    "a bomb": (part(png_of_size(60_000, 60_000)), "far too many pixels"),
    "a large one": (part(png_of_size(9_000, 9_000)), "9000 x 9000 pixels"),
    "a stripe": (part(picture(1, 10_000)), "1 x 10000 pixels: one side may be at most 200 times the other"),
    "an animated GIF": (part(moving("GIF")), "is animated"),
    "an animated PNG": (part(moving("PNG")), "is animated"),
    "an animated WebP": (part(moving("WEBP")), "is animated"),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%%"}}, "is no base64"),
    "percents": ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "is no data: URL with base64"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be an https: URL, or a data: URL"),
    "plain http": ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "must be an https: URL"),
    "a URL": ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "this site fetches no images"),
    "no URL": ({"type": "image_url", "image_url": {}}, "must be an https: URL"),
    "audio": ({"type": "input_audio", "input_audio": {}}, "parts of type 'input_audio' are not supported"),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
async def test_bad_images_are_refused_by_name_and_the_next_request_works(site: Site) -> None:
    for name, (bad, words) in BAD.items():
        answer = await call(site.app, CHAT, chat(TEXT, part(RED), bad))
        assert answer.status == 400, name
        assert words in answer.json["error"]["message"], (name, answer.body)
    assert not site.engine.submits
    assert (await call(site.app, CHAT, chat(TEXT, part(RED)))).status == 200


async def test_what_does_not_fit_is_refused_by_name(site: Site, make_site: SiteMaker) -> None:
    huge = await call(site.app, CHAT, chat(part(picture(1400, 1400)), TEXT))
    assert (huge.status, huge.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "it has 2500 of images alone" in huge.json["error"]["message"]
    many = await call(site.app, CHAT, chat(*[part(RED)] * 17))
    assert many.status == 400
    assert "17 images are more than the 16" in many.json["error"]["message"]
    system = {
        "model": "tiny",
        "messages": [{"role": "system", "content": [part(RED)]}, {"role": "user", "content": "Hi"}],
    }
    assert (
        "a message of the role 'system' has no images" in (await call(site.app, CHAT, system)).json["error"]["message"]
    )
    async with make_site(launcher=seeing(), images={"max_mib": 0.0001}) as narrow:
        answer = await call(narrow.app, CHAT, chat(part(picture(500, 500)), TEXT))
        assert "is larger than the 0.0001 MiB that are taken" in answer.json["error"]["message"]


async def test_a_broken_image_that_the_engine_finds_is_the_clients(site: Site) -> None:
    site.engine.script = [EngineError("invalid_request", "image 1 cannot be decoded: it ends too early")]
    answer = await call(site.app, CHAT, chat(part(RED), TEXT, stream=True))
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")


async def test_an_image_that_ends_its_decoder_is_refused_and_ends_nothing_else() -> None:
    small, large = ([ImagePart(data_url(data, "image/png"))] for data in (RED, picture(3000, 2000)))
    reader = ImageReader(ImagesConfig(), max_body_mib=8.0)
    assert await reader.read(small, "messages")  # the child process loads its libraries before memory becomes scarce
    scarce = ImageReader(ImagesConfig(), max_body_mib=8.0, child_bytes=8 << 20)  # less than a large picture needs
    with pytest.raises(ApiError, match="image 1 of 1 cannot be read: it needs more than 8 MiB of memory") as refused:
        await scarce.read(large, "messages")
    assert refused.value.word == "invalid_request"
    assert await reader.read(small, "messages")


async def test_fetched_images_are_bounded_in_time_and_all_together() -> None:
    async def fetch(url: str, most_bytes: int) -> bytes:
        asked.append(most_bytes)
        if url.endswith("slow"):
            await asyncio.Event().wait()
        return RED

    asked: list[int] = []
    reader = ImageReader(ImagesConfig(max_mib=1.0), max_body_mib=0.5, fetch=fetch)
    images = await reader.read([ImagePart("https://a/1"), ImagePart("https://a/2")], "messages")
    assert [image.data for image in images] == [RED, RED]
    assert asked == [1 << 19, (1 << 19) - len(RED)]
    reader = ImageReader(ImagesConfig(max_mib=1.0), max_body_mib=0.5, fetch=fetch, fetch_s=0.01)
    with pytest.raises(ApiError, match=r"image 2 of 2 did not arrive within 0\.01 s"):
        await reader.read([ImagePart("https://a/1"), ImagePart("https://a/slow")], "messages")


async def test_time_of_other_work_does_not_count_for_fetches() -> None:
    async def run(job: GuardedJob) -> tuple[int, int]:
        ends_at = time.monotonic() + 0.2
        await eventually(lambda: time.monotonic() > ends_at)
        return 56, 28

    async def fetch(url: str, most_bytes: int) -> bytes:
        await asyncio.sleep(0)
        return RED

    reader = ImageReader(ImagesConfig(), max_body_mib=0.5, fetch=fetch, run=run, fetch_s=0.15)
    assert len(await reader.read([ImagePart("https://a/1"), ImagePart("https://a/2")], "messages")) == 2


async def test_requests_that_are_cancelled_leave_no_more_children_busy() -> None:
    async def run(job: GuardedJob) -> Any:
        running.append(asyncio.get_running_loop().create_future())
        return await running[-1]

    running: list[asyncio.Future[Any]] = []
    reader = ImageReader(ImagesConfig(), max_body_mib=8.0, run=run)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read([ImagePart(data_url(RED))], "messages"), 0.05)
    assert len(running) == AT_ONCE
    reading = asyncio.create_task(reader.read([ImagePart(data_url(RED))], "messages"))
    running[0].set_exception(JobError("ImageError", "is broken"))
    await eventually(lambda: len(running) > AT_ONCE)
    running[-1].set_result([56, 28])
    assert len(await reading) == 1
    running[1].set_result([56, 28])


async def test_a_photo_of_a_telephone_is_taken_with_the_second_picture_in_it() -> None:
    file = BytesIO()
    first, second = (Image.new("RGB", (56, 28), colour) for colour in ("red", "blue"))
    first.save(file, "MPO", save_all=True, append_images=[second])
    reader = ImageReader(ImagesConfig(), max_body_mib=8.0)
    (image,) = await reader.read([ImagePart(data_url(file.getvalue(), "image/jpeg"))], "messages")
    assert (image.width, image.height) == (56, 28)
