"""The parser of an answer's tokens. The parts do not depend on how the tokens arrive."""

from collections.abc import Callable, Container, Mapping
from typing import Any

from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import Part
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.tokenizer.tokenizer import Detokenizer

Reader = Callable[[Scanner], Reading[None]]


class AnswerParser:
    """An incremental parser: `push` takes a token and returns the parts that are now certain."""

    def __init__(
        self,
        markers: Markers,
        detokenizer: Detokenizer,
        reader: Reader,
        schemas: Mapping[str, dict[str, Any]],
        unmarked: Container[str] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = Scanner(markers, schemas, unmarked)
        self._reading = reader(self._scanner)
        next(self._reading, None)
        self.num_pushed = 0  # characters pushed; a marker that is a token counts as one

    @property
    def num_settled(self) -> int:
        """The number of characters whose parts have been returned."""
        return self.num_pushed - self._scanner.num_held

    @property
    def is_pending(self) -> bool:
        """True if the last token ends within a character."""
        return self._detokenizer.is_pending

    def start_of(self, token_id: int) -> int:
        """Return how many characters precede this token if it is pushed next."""
        return self.num_pushed + self._detokenizer.held_before(token_id)

    @property
    def is_reasoning(self) -> bool:
        return self._scanner.is_reasoning

    def push(self, token_id: int) -> list[Part]:
        return self._read(self._scanner.markers.push(self._detokenizer, token_id))

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Return the remaining parts.

        `is_cut`: the model was interrupted, so a prefix of a marker at the end is taken for a marker.
        """
        self._scanner.is_cut = is_cut
        parts = self._read(self._detokenizer.finish())
        self._scanner.has_ended = True
        return parts + self._read("")

    def _read(self, text: str) -> list[Part]:
        self.num_pushed += len(text)
        self._scanner.text += text
        next(self._reading, None)
        return self._scanner.out.take()


def plain(s: Scanner) -> Reading[None]:
    """Parse an answer that consists of text only."""
    while True:
        s.out.put_text(s.read(len(s.text)))
        if s.has_ended:
            return
        yield
