"""Sequences that wait for the embeddings of an image, and when they continue."""

import math
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import pytest

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.images.image_residency import AwaitedImages, ImageResidency
from pilotlight.engine.images.prompt import SequenceImage
from pilotlight.engine.scheduling.plan import Chunk

pytestmark = pytest.mark.long


class OnePiece(NamedTuple):
    pieces: tuple[str, ...] = ("all",)
    num_tokens: int = 1


class FakeEncoder:
    placeholder = 1
    token_bytes = 4

    def __init__(self) -> None:
        self.num_asked = 0  # number of images whose preparation was requested

    @property
    def prepare(self) -> Callable[[bytes], OnePiece]:
        self.num_asked += 1
        return lambda data: OnePiece()

    def encode(self, name: bytes, piece: object) -> None:
        pass

    def drop(self, name: bytes) -> None:
        pass


def encode_until_done(
    residency: ImageResidency,
    waiting: list[AwaitedImages],
    open_sequences: OpenSequences = OpenSequences(lambda sequence: None),  # noqa: B008 - it stays empty
) -> None:
    until = time.monotonic() + 10
    while not all([awaited.is_done for awaited in waiting]) and time.monotonic() < until:
        residency.encode(time.monotonic, math.inf, open_sequences)
    assert all([awaited.is_done for awaited in waiting])


def test_no_image_is_prepared_for_sequences_that_end_together() -> None:
    encoder = FakeEncoder()
    residency, waiting = ImageResidency(encoder), list[AwaitedImages]()
    for name in [b"%d" % number for number in range(20)]:
        image = SequenceImage(name, name, 0, 1, array("q", [0]), is_cut=False)
        sequence = Sequence(name.decode(), [1, 2], SamplingParams(max_tokens=1), images=(image,))
        residency.computable([Chunk.next_of(sequence, 2)], waiting.append)
    num_ahead = encoder.num_asked
    for awaited in waiting[:-1]:
        awaited.cancel()
    encode_until_done(residency, waiting[-1:])
    assert encoder.num_asked == num_ahead + 1
    residency.close()


def test_all_that_wait_for_one_image_continue_when_it_is_encoded_however_many_they_are() -> None:
    residency, open_sequences = ImageResidency(FakeEncoder()), OpenSequences(lambda sequence: None)
    image, waiting = SequenceImage(b"image", b"", 0, 1, array("q", [0]), is_cut=False), list[AwaitedImages]()
    for number in range(2000):
        sequence = Sequence(str(number), [1, 2], SamplingParams(max_tokens=1), images=(image,))
        open_sequences.add(sequence)
        assert residency.computable([Chunk.next_of(sequence, 2)], waiting.append) == []
    encode_until_done(residency, waiting, open_sequences)
    assert not open_sequences.has_outputs, "none has failed"
    residency.close()


def test_an_image_gets_the_memory_of_another_once_its_prompt_is_computed() -> None:
    residency, waiting = ImageResidency(FakeEncoder()), list[AwaitedImages]()
    residency.most_bytes = FakeEncoder.token_bytes
    sequences = []
    for name in (b"first", b"second"):
        image = SequenceImage(name, b"", 0, 1, array("q", [0]), is_cut=False)
        sequences.append(Sequence(name.decode(), [1, 2], SamplingParams(max_tokens=9), images=(image,)))
        residency.computable([Chunk.next_of(sequences[-1], 2)], waiting.append)
        encode_until_done(residency, waiting[:1])
    sequences[0].num_completed_tokens = 2  # from now on it decodes
    encode_until_done(residency, waiting)
    residency.close()
