"""Rotary positions of prompts with images, compared with `transformers`."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLModel, Qwen3VLModel

from pilotlight.engine.images.prompt import SequenceImage, last_visible, rotary_positions, uncut_end

MARKER = 9
SETTINGS = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4))


class Reference:
    """The position functions of a model class of `transformers`, without its weights."""

    def __init__(self, model: Any) -> None:
        self.config = SETTINGS
        self.get_vision_position_ids = model.get_vision_position_ids.__get__(self)
        self.get_rope_index = model.get_rope_index.__get__(self)

    def positions(self, token_ids: list[int], grids: list[tuple[int, int]]) -> torch.Tensor:
        """Return position, row and column of each token, [3, tokens]. `grids` has the rows and columns of embeddings of each image."""
        prompt = torch.tensor([token_ids])
        patches = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]) if grids else None
        found, _ = self.get_rope_index(prompt, (prompt == MARKER).int(), image_grid_thw=patches)
        positions: torch.Tensor = found[:, 0]
        return positions


def drawn(generator: random.Random) -> tuple[list[int], list[tuple[int, int]], tuple[SequenceImage, ...]]:
    """Draw a prompt of texts and images in random order, with at least one token between two images."""
    token_ids, grids, images = [1] * generator.randrange(4), [], []
    for i in range(generator.randrange(4)):
        rows, columns = generator.randrange(1, 6), generator.randrange(1, 6)
        start, end = len(token_ids), len(token_ids) + rows * columns
        images.append(SequenceImage(b"%d" % i, b"", start, end, array("q", range(start, end)), False, columns))
        grids.append((rows, columns))
        token_ids += [MARKER] * (rows * columns) + [1] * generator.randrange(1, 7)
    return token_ids or [1], grids, tuple(images)


@pytest.mark.parametrize("model", [Qwen2_5_VLModel, Qwen3VLModel])
def test_positions_are_those_of_the_reference_whatever_the_chunks(model: type) -> None:
    generator, reference = random.Random(3), Reference(model)
    for _ in range(60):
        token_ids, grids, images = drawn(generator)
        expected = reference.positions(token_ids, grids)
        cuts = sorted(generator.sample(range(len(token_ids) + 1), min(3, len(token_ids))))
        found: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
            found.extend(rotary_positions(images, start, end))
        assert found == expected[0].tolist()
        for image in images:
            for number, place in enumerate(image.places):
                row, column = divmod(number, image.columns)
                assert expected[1:, place].tolist() == [found[place] + row, found[place] + column]


def test_tokens_after_a_prompt_follow_its_last_position() -> None:
    image = SequenceImage(b"", b"", 2, 8, array("q", range(2, 8)), False, columns=3)
    assert rotary_positions((image,), 10, 12).tolist() == [7, 8]


def test_images_that_are_not_rotated_by_their_places_keep_every_position() -> None:
    image = SequenceImage(b"", b"", 2, 8, array("q", range(2, 8)), False)
    assert rotary_positions((image,), 1, 10).tolist() == list(range(1, 10))


WHOLE = [
    SequenceImage(b"", b"", start, end, array("q", range(start, end)), False, is_bidirectional=True)
    for start, end in ((3, 7), (9, 12))
]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 2, 2), (0, 3, 3), (0, 4, 3), (0, 7, 7), (0, 10, 9), (0, 12, 12), (0, 99, 99),
        (3, 4, 7), (5, 6, 7), (3, 11, 9), (8, 10, 9), (9, 10, 12), (11, 12, 12),
    ],
)  # fmt: skip
def test_a_chunk_ends_within_no_image_whose_tokens_see_each_other(start: int, end: int, expected: int) -> None:
    assert uncut_end(WHOLE, start, end) == expected
    divisible = [image._replace(is_bidirectional=False) for image in WHOLE]
    assert uncut_end(divisible, start, end) == end


def test_tokens_of_an_image_see_its_end_and_others_themselves() -> None:
    assert list(last_visible(WHOLE, 0, 13)) == [0, 1, 2, 6, 6, 6, 6, 7, 8, 11, 11, 11, 12]
    assert list(last_visible(WHOLE, 5, 9)) == [6, 6, 7, 8]
    assert list(last_visible([image._replace(is_bidirectional=False) for image in WHOLE], 2, 6)) == [2, 3, 4, 5]
    with pytest.raises(AssertionError, match="one step computes all tokens"):
        last_visible(WHOLE, 0, 5)
