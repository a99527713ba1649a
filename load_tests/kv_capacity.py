"""Tokens of KV cache that fit in the same bytes if layers with a window keep only the window's tokens.

Computed, not measured: python -m load_tests.kv_capacity
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheLayout, keys_and_values

BLOCK_SIZE, MAX_CHUNK = 16, 2048  # the defaults of a site


class PublishedModel(NamedTuple):
    """A model, as its published config.json describes it."""

    name: str
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # one for each layer
    context_length: int  # the longest sequence that the model accepts
    cache_gib: int

    @property
    def layers(self) -> tuple[CachedLayer, ...]:
        return tuple(CachedLayer(keys_and_values(self.num_kv_heads, self.head_dim), window) for window in self.windows)


MODELS = (
    PublishedModel("Gemma-3-27B", 16, 128, tuple(None if i % 6 == 5 else 1024 for i in range(62)), 131_072, 16),
    PublishedModel("gpt-oss-20b", 8, 64, tuple(None if i % 2 else 128 for i in range(24)), 131_072, 16),
    PublishedModel("Mistral-7B-v0.1", 8, 128, (4096,) * 32, 32_768, 16),
    # Layers with chunked attention keep only a window of the chunk's length.
    PublishedModel("Llama-4-Scout", 8, 128, tuple(None if i % 4 == 3 else 8192 for i in range(48)), 1_048_576, 56),
)


class FittingTokens(NamedTuple):
    before: int  # tokens that fit if every layer keeps every token
    after: int  # tokens that fit in sequences of the model's context length
    longest: int | None  # the longest single sequence that fits; None if only the model limits it


def fitting_tokens(
    layers: Sequence[CachedLayer], context_length: int, num_bytes: int, dtype: torch.dtype = torch.bfloat16
) -> FittingTokens:
    layout = CacheLayout(layers, BLOCK_SIZE, dtype, context_length)
    groups = CacheGroups(BLOCK_SIZE, MAX_CHUNK, layout.windows)
    blocks = num_bytes // layout.block_bytes
    whole = CacheLayout([layer._replace(window=None) for layer in layers], BLOCK_SIZE, dtype, context_length)
    return FittingTokens(
        num_bytes // whole.block_bytes * BLOCK_SIZE,
        blocks * context_length // groups.most_blocks(context_length, 1),
        groups.longest_context(blocks, blocks * BLOCK_SIZE) if None in layout.windows else None,
    )


def main() -> None:
    print("| model | KV cache | tokens before | tokens, sequences of | one sequence |")
    print("|---|---|---|---|---|")
    for model in MODELS:
        before, after, longest = fitting_tokens(model.layers, model.context_length, model.cache_gib << 30)
        sequences = f"{after:,} of {model.context_length:,} ({after / before:.1f}x)"
        alone = "no end" if longest is None else f"{longest:,} ({longest / before:.1f}x)"
        print(f"| {model.name} | {model.cache_gib} GiB | {before:,} | {sequences} | {alone} |")


if __name__ == "__main__":
    main()
