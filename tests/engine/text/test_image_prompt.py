"""Prompts with images are laid out as by the processors of the checkpoints, without decoding the images."""

import json
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from transformers import Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.image_sizes import FilledImages, ScaledImages, read_image_sizes
from pilotlight.engine.text.image_prompt import ImagePlaceholders, ImagePromptError, SizedImage
from pilotlight.engine.tokenizer.tokenizer import Tokenizer, surrounded

LLAMA4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "image_token_index": 9,
    "vision_config": {"image_size": 28, "patch_size": 14, "pixel_shuffle_ratio": 0.5},
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "media_placeholder_token_id": 9,
    "vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]},
}
TOKENS = {
    "<|image|>": 5,
    "<|image_start|>": 6,
    "<|image_end|>": 7,
    "<|tile_x_separator|>": 3,
    "<|tile_y_separator|>": 4,
}


def placeholders(folder: Path, config: object, **processor: object) -> ImagePlaceholders | None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return ImagePlaceholders.from_checkpoint(folder, TOKENS.get)


def test_llama_4_writes_tiles_in_rows_and_the_whole_image_after_them(tmp_path: Path) -> None:
    found = placeholders(tmp_path, LLAMA4)
    assert found is not None
    token_ids, images = found.expand([1, 5, 2, 5], [SizedImage(56, 56, b"a", b"A"), SizedImage(20, 9, b"b", b"B")])
    assert token_ids == (1, 6, 9, 3, 9, 4, 9, 3, 9, 4, 5, 9, 7, 2, 6, 5, 9, 7)
    assert [(image.position, image.num_tokens, image.digest) for image in images] == [(2, 10, b"a"), (16, 1, b"b")]
    assert [image.data for image in images] == [b"A", b"B"]
    assert found.num_tokens(56, 56) == 12


def test_kimi_writes_a_placeholder_for_each_merged_patch(tmp_path: Path) -> None:
    found = placeholders(tmp_path, KIMI)
    assert found is not None
    token_ids, (image,) = found.expand([1, 9, 2], [SizedImage(57, 28, b"a", b"")])
    assert token_ids == (1, 9, 9, 9, 2)
    assert (image.position, image.num_tokens) == (1, 3)


GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 9,
    "mm_tokens_per_image": 4,
    "vision_config": {"image_size": 24, "patch_size": 6},
}
GEMMA_TOKENS = {"<start_of_image>": 5, "<end_of_image>": 6}


def test_gemma_3_puts_as_many_placeholders_for_every_image_between_a_start_and_an_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    found = ImagePlaceholders.from_checkpoint(tmp_path, GEMMA_TOKENS.get)
    assert found is not None
    token_ids, images = found.expand([1, 5, 2, 5], [SizedImage(56, 56, b"a", b"A"), SizedImage(20, 900, b"b", b"B")])
    assert token_ids == (1, 5, 9, 9, 9, 9, 6, 2, 5, 9, 9, 9, 9, 6)
    assert [(image.position, image.num_tokens, image.is_bidirectional) for image in images] == [
        (2, 4, True),
        (9, 4, True),
    ]
    assert found.num_tokens(56, 56) == 6


@pytest.mark.parametrize(
    "rendered",
    [
        "user\n<start_of_image>What is it?",
        "user\n\n<start_of_image>\n<start_of_image>\n\nWhat",
        "<start_of_image>",
        "it is<start_of_image><start_of_image> is it",
    ],
)
def test_gemma_3_writes_prompts_as_its_processor_does(tmp_path: Path, rendered: str) -> None:
    characters = sorted(set("user\nWhat is it?"))
    words = [*characters, "\n\n", "\n\n\n", "\n\n\n\n"]
    backend = Backend(
        models.BPE({word: i for i, word in enumerate(words)}, [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")])
    )
    named = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    backend.add_special_tokens([AddedToken(text, special=True) for text in named.values()])
    ours = Tokenizer(backend, decoder=None, special_tokens={})
    placeholder = ours.added_token_id("<image_soft_token>")
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | {"image_token_index": placeholder}))
    found = ImagePlaceholders.from_checkpoint(tmp_path, ours.added_token_id)
    assert found is not None
    assert found.around is not None
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=named)
    resized = Gemma3ImageProcessor(size={"height": 24, "width": 24})
    processor = Gemma3Processor(resized, theirs, image_seq_length=4)
    count = rendered.count("<start_of_image>")
    expected = processor(text=rendered, images=[[Image.new("RGB", (9, 7))] * count])
    token_ids, _ = found.expand(
        ours.encode_rendered(surrounded(rendered, *found.around)), [SizedImage(9, 7, b"", b"")] * count
    )
    assert list(token_ids) == list(expected["input_ids"][0])


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        ({}, {"do_pan_and_scan": True}, "do_pan_and_scan = true; images are not cut"),
        ({}, {"size": {"height": 48, "width": 24}}, "the vision tower takes images of 24 x 24"),
        ({"mm_tokens_per_image": 5}, {}, "the tokens must be a square"),
        ({"mm_tokens_per_image": 9}, {}, "whose side divides the patches in a row"),
        ({"vision_config": {"image_size": 4, "patch_size": 6}}, {}, "0 patches in a row"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, {}, "model_type = 'clip_vision_model'"),
    ],
)
def test_a_tower_or_a_processor_of_another_kind_than_gemma_3s_is_named(
    tmp_path: Path, config: dict[str, object], processor: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match=message):
        read_image_sizes(tmp_path)


GEMMA_4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "image_token_id": 9,
    "boi_token_id": 5,
    "eoi_token_id": 6,
    "text_config": {"use_bidirectional_attention": "vision"},
    "vision_config": {"patch_size": 4, "pooling_kernel_size": 2},
}


def test_gemma_4_puts_a_placeholder_for_each_square_between_a_start_and_an_end(tmp_path: Path) -> None:
    found = placeholders(tmp_path, GEMMA_4, max_soft_tokens=6)
    assert found is not None
    token_ids, (image,) = found.expand([1, 9, 2], [SizedImage(90, 60, b"a", b"")])
    assert token_ids == (1, 5, *[9] * 6, 6, 2)
    assert (image.position, image.num_tokens, image.is_bidirectional, found.around) == (2, 6, True, None)
    causal = placeholders(tmp_path, GEMMA_4 | {"text_config": {}}, max_soft_tokens=6)
    assert causal is not None
    assert not causal.expand([9], [SizedImage(90, 60, b"a", b"")])[1][0].is_bidirectional


@pytest.mark.parametrize("most_tokens", [70, 280, 1120])
def test_sizes_of_gemma_4_are_those_of_its_processor(most_tokens: int) -> None:
    sizes = FilledImages(16, 3, most_tokens, placeholder=9, enclosing=(5, 6), is_bidirectional=True)
    sides = [1, 2, 7, 47, 48, 49, 333, 896, 1024, 5000]
    for width, height in [(width, height) for width in sides for height in sides]:
        expected = get_aspect_ratio_preserving_size(height, width, 16, most_tokens * 9, 3)
        grid = sizes.grid(width, height)
        assert (grid.height, grid.width) == (grid.rows * 16, grid.columns * 16) == expected, (width, height)
        assert sizes.num_tokens(width, height) == expected[0] * expected[1] // 48**2 <= most_tokens


@pytest.mark.parametrize(
    ("tower", "processor", "message"),
    [
        ({}, {"max_soft_tokens": 1121}, "max_soft_tokens = 1121; an image may have 1120 at most"),
        ({}, {"patch_size": 14}, "patch_size = 14; the vision tower's is 4"),
        ({}, {"pooling_kernel_size": 3}, "pooling_kernel_size = 3; the vision tower's is 2"),
        ({}, {"do_normalize": True}, "colours are not normalised here"),
        ({"num_key_value_heads": 4}, {}, "num_key_value_heads = 4"),
        ({"head_dim": 6}, {}, "head_dim 6; it must be a multiple of 4"),
        ({"rope_parameters": {"rope_type": "default"}}, {}, "rope_type = 'default'"),
        ({"model_type": "gemma4_unified_vision"}, {}, "model_type = 'gemma4_unified_vision'"),
    ],
)
def test_a_tower_or_a_processor_of_another_kind_than_gemma_4s_is_named(
    tmp_path: Path, tower: dict[str, object], processor: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(GEMMA_4 | {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2, **tower}})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match=message):
        read_image_sizes(tmp_path)


GLM = {"architectures": ["Glm4vForConditionalGeneration"], "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
QWEN = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 9,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}


def test_qwen_writes_a_placeholder_for_each_square_and_says_how_many_are_in_a_row(tmp_path: Path) -> None:
    found = placeholders(tmp_path, QWEN)
    assert found is not None
    token_ids, (image,) = found.expand([1, 9, 2], [SizedImage(90, 60, b"a", b"")])
    assert token_ids == (1, *[9] * 6, 2)
    assert (image.position, image.num_tokens, image.columns) == (1, 6, 3)


# Width and height of an image, and those to which the processors of Qwen 2-VL and GLM-4.1V scale it (transformers 5.23, 4 to 90 embeddings).
SCALED = [
    ((80, 6), (224, 28), (364, 28)), ((129, 19), (140, 28), (196, 28)), ((1, 154), (28, 700), (28, 3276)), ((6, 8), (56, 84), (56, 84)),
    ((44, 3053), (28, 2212), (28, 2212)), ((46, 846), (56, 840), (56, 840)), ((3, 172), (28, 448), (28, 1596)),
    ((1091, 166), (672, 84), (672, 84)), ((392, 67), (392, 56), (392, 56)), ((117, 450), (112, 448), (112, 448)),
    ((200, 1), (812, 28), (3752, 28)),
]  # fmt: skip


@pytest.mark.parametrize(("size", "by_qwen", "by_glm"), SCALED)
def test_sizes_are_those_of_the_models_own_processors(
    tmp_path: Path, size: tuple[int, int], by_qwen: tuple[int, int], by_glm: tuple[int, int]
) -> None:
    for config, moments, expected in ((QWEN, 1, by_qwen), (GLM, 2, by_glm)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        limits = {"shortest_edge": moments * 4 * 784, "longest_edge": moments * 90 * 784}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": limits}))
        sizes = read_image_sizes(tmp_path)
        assert isinstance(sizes, ScaledImages)
        grid = sizes.grid(*size)
        assert (grid.width, grid.height) == expected
        assert (grid.columns, grid.rows) == (expected[0] // 14, expected[1] // 14)


LLAMA = {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": {"image_size": 336}}


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        (
            QWEN,
            {"size": {"shortest_edge": 1 << 30, "longest_edge": 1 << 31}},
            "shortest_edge = 1073741824; an image may",
        ),
        (
            GLM,
            {"size": {"shortest_edge": 1 << 30, "longest_edge": 1 << 31}},
            "shortest_edge = 1073741824; an image may",
        ),
        (QWEN, {"min_pixels": 1 << 30, "max_pixels": 1 << 31}, "min_pixels or .* = 1073741824; an image may"),
        (LLAMA, {"max_patches": 10**6}, "max_patches = 1000000; it may be 256 at most"),
    ],
)
def test_a_processor_that_would_enlarge_images_beyond_all_limits_is_refused(
    tmp_path: Path, config: dict[str, object], processor: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match=message):
        read_image_sizes(tmp_path)


def test_an_image_that_is_too_narrow_for_qwen_is_refused(tmp_path: Path) -> None:
    found = placeholders(tmp_path, QWEN)
    assert found is not None
    with pytest.raises(ImagePromptError, match=r"2001 x 10 pixels; .* at most 200 times"):
        found.num_tokens(2001, 10)
    assert found.num_tokens(2000, 10)


def test_images_and_placeholders_that_do_not_match_are_refused(tmp_path: Path) -> None:
    found = placeholders(tmp_path, KIMI)
    assert found is not None
    with pytest.raises(ImagePromptError, match="0 image placeholders and 1 images"):
        found.expand([1, 2], [SizedImage(3, 3, b"", b"")])


def test_a_model_without_a_vision_tower_takes_no_images(tmp_path: Path) -> None:
    assert placeholders(tmp_path, {"architectures": ["LlamaForCausalLM"]}) is None
    assert placeholders(tmp_path, {**LLAMA4, "vision_config": None}) is None


def test_a_tokenizer_without_the_tokens_of_images_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA4))
    with pytest.raises(CheckpointError, match=r"no token <\|image\|>"):
        ImagePlaceholders.from_checkpoint(tmp_path, lambda text: None)
