"""A sequence's images, as its prompt has them."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple

from pilotlight.engine.api.protocol import PromptImage


class SequenceImage(NamedTuple):
    name: bytes  # digest of its content, with the tenant's salt
    data: bytes  # the file
    start: int  # of its run in the prompt
    end: int
    places: "array[int]"  # positions of its placeholders, the first embedding's first
    is_cut: bool  # the prompt ends within it: another host computes the rest

    @classmethod
    def of(
        cls, image: PromptImage, name: bytes, data: bytes, prompt: SequenceOf[int], placeholder: int
    ) -> "SequenceImage":
        start, end = image.position, image.position + image.num_tokens
        places = array("q", [i for i in range(start, min(end, len(prompt))) if prompt[i] == placeholder])
        return cls(name, data, start, end, places, end > len(prompt))

    def between(self, start: int, end: int) -> tuple[int, "array[int]"]:
        """Return its first embedding among these tokens of the sequence, and the positions of all there."""
        first = bisect_left(self.places, start)
        return first, self.places[first : bisect_left(self.places, end)]


def tenants_name(salt: bytes, digest: bytes) -> bytes:
    """Return the name of an image's content for one tenant.

    It differs between tenants, so that a tenant cannot learn about others' images from the ones it may leave out, or from how soon it is answered.
    """
    return blake2b(len(salt).to_bytes(8, "little") + salt + digest, digest_size=32).digest()


def images_name(images: SequenceOf[SequenceImage], start: int, end: int) -> bytes:
    """Return what distinguishes a block of these tokens from one with other images there.

    Returns b"" if the block has no image.
    """
    return b"".join(
        [
            image.name + (start - image.start).to_bytes(8, "little", signed=True)
            for image in images
            if image.start < end and image.end > start
        ]
    )
