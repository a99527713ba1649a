"""OpenAI's form of embeddings: one vector per input, in order, as numbers or base64.

base64 encodes little-endian fp32.
"""

import base64
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: tuple[float, ...] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    data: tuple[Embedding, ...]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


def as_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def from_base64(text: str) -> tuple[float, ...]:
    raw = base64.b64decode(text, validate=True)
    return struct.unpack(f"<{len(raw) // 4}f", raw)
