"""A scanner of a growing answer, for parsers that are written as if the answer were complete.

A parser (`Reader`) is a generator: it yields if it needs more text than has arrived, and continues there with the next token. Consumed text that it
cannot classify yet is held back, so the output is a function of the tokens so far. After the answer has ended, nothing yields any more. Each
character is consumed once, except for short texts that turn out to be no call (`unread`).
"""

import re
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import Any, TypeVar

from pilotlight.engine.text.formats.markers import Markers, held_suffix
from pilotlight.engine.text.formats.parts import ArgumentsPart, CallEndPart, CallPart, Part, ReasoningPart, TextPart

T = TypeVar("T")
Reading = Generator[None, None, T]
TextKind = type[TextPart] | type[ReasoningPart]

MOST_AGAIN = 4096  # most characters that are parsed a second time, if a marker turns out not to start a call


class Scanner:
    def __init__(self, markers: Markers, schemas: Mapping[str, dict[str, Any]], unmarked: Container[str] = ()) -> None:
        """Make a scanner.

        `schemas`: JSON schema of each available tool's arguments, by name. `unmarked`: tools that may be called without the format's markers.
        """
        self.markers = markers
        self.schemas = schemas
        self.unmarked = unmarked
        self.text = ""  # text that has arrived and is not consumed
        self.has_ended = False
        self.is_cut = False  # True if the answer ended because the model was interrupted
        self.is_reasoning = False
        self.out = PartWriter(markers)
        self._held: list[str] | None = None  # consumed text that may be part of a call; None if no text is held back
        self._num_kept = 0  # number of characters held back

    @classmethod
    def of_whole(cls, markers: Markers, text: str) -> "Scanner":
        """Make a scanner of a complete text."""
        scanner = cls(markers, {})
        scanner.text = text
        scanner.has_ended = True
        return scanner

    @property
    def num_held(self) -> int:
        """The number of characters that have arrived and were not output."""
        return self.out.num_held + self._num_kept + len(self.text)

    @property
    def was_cut(self) -> bool:
        """True if the answer has ended because the model was interrupted."""
        return self.has_ended and self.is_cut

    # Consuming text

    def first(self) -> Reading[str]:
        """Return the next character without consuming it; "" at the end of the answer."""
        while not self.text and not self.has_ended:
            yield
        return self.text[:1]

    def beyond_space(self, put: Callable[[str], object] | None = None) -> Reading[str]:
        """Consume white space, pass it to `put` if given, and return the next character."""
        while True:
            space = self.read(len(self.text) - len(self.text.lstrip()))
            if put is not None and space:
                put(space)
            if self.text or self.has_ended:
                return self.text[:1]
            yield

    def read(self, count: int) -> str:
        text, self.text = self.text[:count], self.text[count:]
        if self._held is not None:
            self._held.append(text)
            self._num_kept += len(text)
        return text

    def starts(self, *words: str) -> Reading[str | None]:
        """Return the longest of `words` that comes next, without consuming it, or None."""
        while True:
            if not self.has_ended and any(len(self.text) < len(word) and word.startswith(self.text) for word in words):
                yield
                continue
            return max((word for word in words if self.text.startswith(word)), key=len, default=None)

    def skip(self, *words: str) -> Reading[bool]:
        """Consume one of `words` if it comes next, and return True; else return False."""
        word = yield from self.starts(*words)
        self.read(len(word or ""))
        return word is not None

    def run(self, pattern: re.Pattern[str], most: int = 512) -> Reading[str]:
        """Consume and return the longest text that matches `pattern`; stop at `most` characters."""
        text = ""
        while (yield from self.first()) and len(text) < most and (found := pattern.match(self.text)):
            text += self.read(found.end())
        return text

    def until(self, words: Sequence[str], put: Callable[[str], object]) -> Reading[str | None]:
        """Output all text before the first of `words`, and return that word without consuming it.

        Returns None if the answer ends without one of them.
        """
        while True:
            found = [(start, -len(word), word) for word in words if (start := self.text.find(word)) >= 0]
            if found:
                start, _, word = min(found)
                if start:
                    put(self.read(start))
                return word
            end = len(self.text) - self._undecided(words)
            if end:
                put(self.read(end))
            if self.has_ended:
                self.text = ""
                return None
            yield

    def text_until(self, words: Sequence[str], kind: TextKind = TextPart) -> Reading[str | None]:
        """Output text up to the first of `words`, then consume and return that word; None at the answer's end.

        The word and all text after it are held back until they turn out to be a call or not.
        """
        while True:
            word = next((word for word in words if self.text.startswith(word)), None)
            if word is not None:
                self.hold()
                self.read(len(word))
                return word
            starts = [start for word in words if (start := self.text.find(word)) >= 0]
            end = min(starts) if starts else len(self.text) - self._undecided(words)
            self.out.show(self.read(end), kind)
            if starts:
                continue
            if self.has_ended:
                self.text = ""
                self.out.show_space(kind)
                return None
            yield

    def _undecided(self, words: Sequence[str]) -> int:
        """Return how many characters at the end of the unconsumed text may be a prefix of one of `words`.

        After an interrupted answer, they may also be a prefix of any marker.
        """
        if self.has_ended:
            return held_suffix(self.text, (*words, *self.markers.all())) if self.is_cut else 0
        return held_suffix(self.text, words)

    # Possible calls

    def hold(self) -> None:
        """Hold back text that is consumed from here on, until `release`, `give_back` or `unread`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Drop the held text, because it is part of a call."""
        self._held, self._num_kept = None, 0

    def give_back(self) -> None:
        """Put the held text back before the unconsumed text."""
        text = "".join(self._held or ())
        self.release()
        self.text = text + self.text

    def unread(self, marker: str) -> None:
        """Output the held text as text, because the marker at its start did not start a call.

        If the held text is short, only the marker is output, and the rest is parsed again. If the answer was interrupted, drop all text instead.
        """
        text = "".join(self._held or ())
        self.release()
        if self.was_cut:
            self.text = ""
            self.out.drop_space()
            return
        if len(text) <= MOST_AGAIN:
            text, self.text = marker, text[len(marker) :] + self.text
        self.out.show(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Output the start of a call, and drop the held text, which belongs to the call."""
        self.release()
        self.out.begin_call(name, call_id)

    def end_call(self) -> None:
        """Output the end of a call, unless the answer was interrupted within the call."""
        if not self.was_cut:
            self.out.end_call()


class PartWriter:
    """The parts that a parser outputs.

    White space at the end of text is held back until more text follows; before a call it is dropped.
    """

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._parts: list[Part] = []
        self._space: list[str] = []  # white space held back, which is dropped if a call follows
        self._drops_space = False
        self.num_held = 0  # number of characters of held white space
        self.num_calls = 0

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def show(self, text: str, kind: TextKind = TextPart) -> None:
        """Output text, but hold back white space at its end until more text follows."""
        text = self._markers.as_text(text)
        if self._drops_space:
            text = text.lstrip()
        core = text.rstrip()
        if core:
            self._drops_space = False
            self._parts.append(kind("".join(self._space) + core))
            self.drop_space(is_before=False)
        if len(text) > len(core):
            self._space.append(text[len(core) :])
            self.num_held += len(text) - len(core)

    def put_text(self, text: str) -> None:
        """Output text at once, including white space at its end, because only text can follow."""
        text = self._markers.as_text(text)
        if self._drops_space:
            text = text.lstrip()
        if text:
            self._drops_space = False
            self._parts.append(TextPart(text))

    def drop_space(self, *, is_before: bool = True) -> None:
        """Drop the held white space; with `is_before`, also drop white space that follows."""
        self._space, self.num_held = [], 0
        self._drops_space = self._drops_space or is_before

    def show_space(self, kind: TextKind = TextPart) -> None:
        """Output the held white space as text, because the answer has ended."""
        if self._space:
            self._parts.append(kind("".join(self._space)))
            self.drop_space(is_before=False)

    def begin_call(self, name: str, call_id: str | None) -> None:
        self.drop_space()
        self._parts.append(CallPart(self.num_calls, name, call_id))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Output a fragment of the call's arguments."""
        if text:
            self._parts.append(ArgumentsPart(self.num_calls - 1, text))

    def end_call(self) -> None:
        self._parts.append(CallEndPart(self.num_calls - 1))
