"""Keeps track of encoded images, and of the sequences that wait for one.

A sequence with images is scheduled like any other. When its next chunk contains an image that is not encoded, the sequence gives back its blocks and
waits (engine/scheduling/awaited.py). Meanwhile a thread decodes its images, and each step encodes a few pieces. Then the sequence returns to its old
place, and its computed tokens are found in the prefix cache. The images that a sequence waited for stay until its prompt is computed past them; other
images are evicted, least recently used first, when memory is needed. Waiting sequences are served in order of arrival, so that no two wait for each
other's memory. This module is independent of tensors.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from pilotlight.engine.api.errors import ImageError, RankLostError
from pilotlight.engine.api.protocol import Submit
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.description.vision_config import ENCODED_BYTES
from pilotlight.engine.images.prompt import SequenceImage, tenants_name
from pilotlight.engine.scheduling.plan import Chunk

# Limits of encoding between two steps: time for a CPU, pieces for a GPU, where encoding is asynchronous.
_MOST_ENCODING_S = 0.2
_MOST_PIECES = 4
_PREPARED_AHEAD = 3  # limit of decoded images that are not encoded yet: one may take 38 MB
_MOST_FILE_BYTES = 128 << 20


class ImageFiles:
    """A cache of recently received image files: a request may name one without sending it again."""

    def __init__(self) -> None:
        self._files: OrderedDict[bytes, bytes] = OrderedDict()  # by name, least recently used first
        self._num_bytes = 0

    def found(self, name: bytes, data: bytes) -> bytes | None:
        """Return the file of an image, from `data` or the cache; None if `data` is empty and it is not cached."""
        if not data:
            if name in self._files:
                self._files.move_to_end(name)
            return self._files.get(name)
        if name not in self._files:
            self._files[name] = data
            self._num_bytes += len(data)
        self._files.move_to_end(name)
        while self._num_bytes > _MOST_FILE_BYTES:
            _, dropped = self._files.popitem(last=False)
            self._num_bytes -= len(dropped)
        return data


class Prepared(Protocol):
    """An image that has been read."""

    @property
    def pieces(self) -> SequenceOf[Any]: ...

    @property
    def num_tokens(self) -> int: ...


class ImageEncoder(Protocol):
    """A model's encoder, and the memory of its encoded images."""

    placeholder: int  # the token that is replaced by an embedding
    token_bytes: int  # size of one embedding

    def prepare(self, data: bytes) -> Prepared:
        """Decode a file and split the image into pieces, from any thread. Raises ImageError."""

    def encode(self, name: bytes, piece: Any) -> None:
        """Encode the next piece of an image, and keep its embeddings."""

    def drop(self, name: bytes) -> None:
        """Free an image's embeddings."""


class _Encoded:
    """An image of which some or all pieces are encoded."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_pieces = 0
        self.is_whole = False
        self.users = 0  # number of sequences that will compute its tokens


class ImageResidency:
    def __init__(self, encoder: ImageEncoder) -> None:
        self.num_encoded = 0
        self.num_found = 0
        self._files = ImageFiles()
        self._encoder = encoder
        self.most_bytes = ENCODED_BYTES
        self._encoded: OrderedDict[bytes, _Encoded] = OrderedDict()  # by name, least recently used first
        self._held: dict[Sequence, list[SequenceImage]] = {}
        self._waiting: list[AwaitedImages] = []
        self._has_cancelled = False  # a wait was cancelled since unwanted images were last dropped
        self._prepared: dict[bytes, Future[Prepared]] = {}
        self._threads = ThreadPoolExecutor(1, "images")

    def of(self, submit: Submit) -> tuple[SequenceImage, ...] | None:
        """Return a request's images, or None if a file was not sent and is not cached."""
        found: list[SequenceImage] = []
        for image in submit.images:
            name = tenants_name(submit.salt, image.digest)
            data = self._files.found(name, image.data)
            if data is None:
                return None
            found.append(SequenceImage.of(image, name, data, submit.prompt_token_ids, self._encoder.placeholder))
        return tuple(found)

    def computable(self, chunks: list[Chunk], defer: "Callable[[AwaitedImages], None]") -> list[Chunk]:
        """Return the chunks whose images are encoded; let the sequences of other chunks wait."""
        return [chunk for chunk in chunks if not chunk.sequence.images or self._can_compute(chunk, defer)]

    def encode(self, clock: Callable[[], float], most_s: float, sequences: OpenSequences) -> bool:
        """Encode missing images of the first waiting sequences. Return whether anything was encoded.

        Encodes a piece if its image is decoded, and more until `most_s` have passed, up to a limit. Ends sequences whose images fail.
        """
        for sequence in [one for one in self._held if one.num_completed_tokens >= one.images[-1].end]:
            self.release(sequence)
        if self._has_cancelled:
            self._forget_unwanted()
        until, num_pieces = clock() + min(most_s, _MOST_ENCODING_S), 0
        while self._waiting and num_pieces < _MOST_PIECES and (not num_pieces or clock() < until):
            awaited = self._waiting[0]
            lacking = next((image for image in awaited.images if not self._is_whole(image.name)), None)
            try:
                if lacking is None:
                    self._let_go_on(awaited)
                elif self._encode_piece(lacking, awaited):
                    num_pieces += 1
                else:
                    break
            except RankLostError:
                raise
            except Exception as error:  # any error of a decoder or a device for one image ends only its sequence
                self._fail(awaited, error, sequences)
        return num_pieces > 0

    def release(self, sequence: Sequence) -> None:
        """Allow eviction of a sequence's images."""
        for image in self._held.pop(sequence, ()):
            self._encoded[image.name].users -= 1

    def release_all(self) -> None:
        """Allow eviction of all images: all sequences have ended."""
        for sequence in list(self._held):
            self.release(sequence)

    def cancel(self, awaited: "AwaitedImages") -> None:
        if awaited in self._waiting:
            self._waiting.remove(awaited)
            # While others wait, the next `encode` drops its images: when hundreds are cancelled at once, each image would be prepared in vain.
            self._has_cancelled = True
            if not self._waiting:
                self._forget_unwanted()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _can_compute(self, chunk: Chunk, defer: "Callable[[AwaitedImages], None]") -> bool:
        sequence, held = chunk.sequence, self._held.get(chunk.sequence, [])
        if all([image in held or not image.between(chunk.start, chunk.end)[1] for image in sequence.images]):
            return True
        awaited = AwaitedImages(sequence, self, [image for image in sequence.images if image.end > chunk.start])
        self.release(sequence)
        found = [image for image in awaited.images if self._is_whole(image.name)]
        self.num_found += len(found)
        if len(found) == len(awaited.images) and all(map(self._fits, found)):
            self._hold(awaited)
            return True
        self._waiting.append(awaited)
        self._prepare_ahead()
        defer(awaited)
        return False

    def _let_go_on(self, awaited: "AwaitedImages") -> None:
        """End the wait of a sequence whose images are all encoded, and hold them for it."""
        self._waiting.remove(awaited)
        for image in awaited.images:
            self._require_fit(image, self._encoded[image.name].num_tokens)
        self._hold(awaited)
        self._forget_unwanted()

    def _encode_piece(self, lacking: SequenceImage, awaited: "AwaitedImages") -> bool:
        """Encode an image's next piece; return False if it is not read yet or there is no memory now."""
        name = lacking.name
        prepared = self._prepared.get(name)
        if prepared is None:  # the image was encoded and has been evicted since
            prepared = self._prepared[name] = self._threads.submit(self._encoder.prepare, lacking.data)
        if not prepared.done():
            return False
        content = prepared.result()
        encoded = self._encoded.get(name)
        if encoded is None:
            self._require_fit(lacking, content.num_tokens)
            if not self._make_room(content.num_tokens, awaited):
                return False
            encoded = self._encoded[name] = _Encoded(content.num_tokens)
        self._encoder.encode(name, content.pieces[encoded.num_pieces])
        encoded.num_pieces += 1
        if encoded.num_pieces == len(content.pieces):
            encoded.is_whole = True
            self.num_encoded += 1
            del self._prepared[name]
            self._prepare_ahead()
        return True

    def _fail(self, awaited: "AwaitedImages", error: Exception, sequences: OpenSequences) -> None:
        if awaited in self._waiting:
            self._waiting.remove(awaited)
        lacking = next((image for image in awaited.images if not self._is_whole(image.name)), awaited.images[-1])
        number = 1 + awaited.sequence.images.index(lacking)
        self._forget_unwanted()
        if isinstance(error, ImageError):
            sequences.fail(awaited.sequence, "invalid_request", f"image {number} of the prompt: {error}")
        else:
            why = f"{type(error).__name__}: {error}"
            message = f"image {number} of the prompt could not be encoded: {why}"
            sequences.fail(awaited.sequence, "engine_error", message)

    def _make_room(self, num_tokens: int, awaited: "AwaitedImages") -> bool:
        """Evict images without users until one more image fits; return whether it does.

        If no image has users, one sequence may exceed the limit.
        """
        kept = {image.name for image in awaited.images}
        for name in [name for name, one in self._encoded.items() if not one.users and name not in kept]:
            if self._num_bytes(num_tokens) <= self.most_bytes:
                return True
            self._drop(name)
        return self._num_bytes(num_tokens) <= self.most_bytes or not self._held

    def _num_bytes(self, more_tokens: int) -> int:
        return self._encoder.token_bytes * (more_tokens + sum(one.num_tokens for one in self._encoded.values()))

    def _prepare_ahead(self) -> None:
        for image in [image for awaited in self._waiting for image in awaited.images]:
            if len(self._prepared) >= _PREPARED_AHEAD:
                return
            if not self._is_whole(image.name) and image.name not in self._prepared:
                self._prepared[image.name] = self._threads.submit(self._encoder.prepare, image.data)

    def _forget_unwanted(self) -> None:
        """Drop unfinished images for which no sequence waits any more."""
        self._has_cancelled = False
        wanted = {image.name for awaited in self._waiting for image in awaited.images}
        for name in [name for name in self._prepared if name not in wanted]:
            self._prepared.pop(name).cancel()
        for name in [name for name, one in self._encoded.items() if not one.is_whole and name not in wanted]:
            self._drop(name)
        self._prepare_ahead()

    def _hold(self, awaited: "AwaitedImages") -> None:
        self._held[awaited.sequence] = awaited.images
        for image in awaited.images:
            self._encoded[image.name].users += 1
            self._encoded.move_to_end(image.name)
        awaited.is_done = True

    def _drop(self, name: bytes) -> None:
        del self._encoded[name]
        self._encoder.drop(name)

    def _is_whole(self, name: bytes) -> bool:
        return name in self._encoded and self._encoded[name].is_whole

    def _fits(self, image: SequenceImage) -> bool:
        num_places, num_tokens = len(image.places), self._encoded[image.name].num_tokens
        return num_places <= num_tokens if image.is_cut else num_places == num_tokens

    @staticmethod
    def _require_fit(image: SequenceImage, num_tokens: int) -> None:
        num_places = len(image.places)
        if num_places > num_tokens or (num_places < num_tokens and not image.is_cut):
            raise ImageError(f"the prompt has {num_places} placeholders for its {num_tokens} embeddings")


class AwaitedImages:
    """Images that a sequence waits for while other sequences run."""

    is_admitted = False
    deadline = math.inf  # no limit: the host's own encoding either ends or fails

    def __init__(self, sequence: Sequence, residency: ImageResidency, images: list[SequenceImage]) -> None:
        self.sequence = sequence
        self.images = images
        self.num_tokens = len(sequence.token_ids)
        self.is_done = False
        self._residency = residency

    def cancel(self) -> None:
        self._residency.cancel(self)

    def take(self) -> None:
        """Do nothing: the images are already held for the sequence."""
