"""Rotary positions of prompts with images, compared with `transformers`."""

import random
from array import array
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2_5_VLModel, Qwen3VLModel

from pilotlight.engine.images.prompt import SequenceImage, rotary_positions

MARKER = 9
SETTINGS = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4))


class Reference:
    """The position functions of a model class of `transformers`, without its weights."""

    def __init__(self, model: type) -> None:
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
