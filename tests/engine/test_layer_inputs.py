"""Inputs of layers besides hidden states: tokens of images have the table's row of the padding token."""

import torch

from pilotlight.engine.description.shapes import LayerInputShape
from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.execution.context import Context, ImageRows
from pilotlight.engine.layers.embedding import TokenEmbedding
from pilotlight.engine.layers.layer_inputs import LayerInputs
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.kernels.matrices.plain import PlainWeight

HIDDEN, LAYERS, SIZE, VOCAB, PADDING = 10, 3, 4, 9, 6


def test_tokens_of_images_have_the_row_of_the_padding_token() -> None:
    table, projection, weight = torch.randn(VOCAB, LAYERS * SIZE), torch.randn(LAYERS * SIZE, HIDDEN), torch.rand(SIZE)
    inputs = LayerInputs(
        TokenEmbedding(PlainWeight(table), torch.float32, SIZE**0.5),
        Linear(PlainWeight(projection)),
        RMSNorm(weight, 1e-6),
        LayerInputShape(VOCAB, SIZE, PADDING),
    )
    x, token_ids = torch.randn(5, HIDDEN), torch.tensor([1, 8, 8, 0, 2])
    batch = Batch(token_ids, torch.arange(5), (), 0)
    projected = (x @ projection.T / HIDDEN**0.5).unflatten(1, (LAYERS, SIZE))
    normed = projected * (projected.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def expected(ids: list[int]) -> torch.Tensor:
        return (normed.flatten(1) + table[ids] * SIZE**0.5) / 2**0.5

    torch.testing.assert_close(inputs(x, Context(batch)), expected([1, 8, 8, 0, 2]))
    images = ImageRows(torch.tensor([1, 2]), None)
    torch.testing.assert_close(inputs(x, Context(batch, images=images)), expected([1, PADDING, PADDING, 0, 2]))
