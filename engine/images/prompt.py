"""The images in a sequence's prompt, and the rotary positions of its tokens."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple

from pilotlight.engine.api.protocol import PromptImage


class SequenceImage(NamedTuple):
    name: bytes  # digest of the image's content and the tenant's salt
    data: bytes  # the file
    start: int  # the image's tokens are prompt[start:end]
    end: int
    places: "array[int]"  # indices in the prompt of the image's placeholders, one per embedding
    is_cut: bool  # the prompt ends within the image: another host computes the rest
    columns: int = 0  # embeddings per row of the image if they are rotated by row and column, else 0
    is_bidirectional: bool = False  # its tokens attend to each other in both directions, so one step computes them

    @classmethod
    def of(
        cls, image: PromptImage, name: bytes, data: bytes, prompt: SequenceOf[int], placeholder: int
    ) -> "SequenceImage":
        start, end = image.position, image.position + image.num_tokens
        places = array("q", [i for i in range(start, min(end, len(prompt))) if prompt[i] == placeholder])
        return cls(name, data, start, end, places, end > len(prompt), image.columns, image.is_bidirectional)

    @property
    def num_saved(self) -> int:
        """Return how many rotary positions the image saves: it takes max(rows, columns), not one per token."""
        length = self.end - self.start
        return length - max(self.columns, length // self.columns) if self.columns else 0

    def between(self, start: int, end: int) -> tuple[int, "array[int]"]:
        """Return the index of the image's first embedding in sequence[start:end], and its placeholders there."""
        first = bisect_left(self.places, start)
        return first, self.places[first : bisect_left(self.places, end)]


def rotary_positions(images: SequenceOf[SequenceImage], start: int, end: int) -> "array[int]":
    """Return the rotary positions of these tokens of a sequence.

    A position is the token's index in the sequence, except with images that are rotated by row and column (M-RoPE, Wang et al., arXiv 2409.12191):
    all tokens of such an image have the position of its first token, and the text after it continues after its last row or column.
    """
    found, at, saved = array("q"), start, 0
    for image in images:
        if image.start >= end:
            break
        if image.columns:
            first, last = max(start, image.start), min(image.end, end)
            if last > first:
                found.extend(range(at - saved, first - saved))
                found.extend([image.start - saved] * (last - first))
                at = last
            saved += image.num_saved if image.end <= end else 0
    found.extend(range(at - saved, end - saved))
    return found


def last_visible(images: SequenceOf[SequenceImage], start: int, end: int) -> "array[int]":
    """Return the last position that each of these tokens of a sequence sees.

    That is its own position, or the end of its image if the image's tokens attend to each other.
    """
    found = array("q", range(start, end))
    for image in images:
        first, last = max(start, image.start), min(image.end, end)
        if image.is_bidirectional and first < last:
            assert image.end <= end, "one step computes all tokens of an image"
            found[first - start : last - start] = array("q", [image.end - 1] * (last - first))
    return found


def uncut_end(images: SequenceOf[SequenceImage], start: int, end: int) -> int:
    """Return the end of a chunk of a sequence, moved from `end` if necessary.

    A chunk does not end within an image whose tokens attend to each other. It ends before the image, or after it if `start` is at the image or
    within it.
    """
    for image in images:
        if image.is_bidirectional and image.start < end < image.end:
            return image.end if image.start <= start else image.start
    return end


def tenants_name(salt: bytes, digest: bytes) -> bytes:
    """Return the name of an image in one tenant's cache.

    The name differs between tenants, so that no tenant can find out, by omitting a file or by measuring latency, whether another tenant sent the
    image.
    """
    return blake2b(len(salt).to_bytes(8, "little") + salt + digest, digest_size=32).digest()


def images_name(images: SequenceOf[SequenceImage], start: int, end: int) -> bytes:
    """Return bytes that identify the images among these tokens, for the hash of their block.

    Returns b"" if the block has no image.
    """
    return b"".join(
        [
            image.name + (start - image.start).to_bytes(8, "little", signed=True)
            for image in images
            if image.start < end and image.end > start
        ]
    )
