"""A scanner of a growing answer, for readers that are written as if the answer were complete.

A reader is a generator: if it needs more than has arrived it yields, and continues there with the next token. Text that it has read but not decided
about is held back, so the output is a function of the tokens so far. After the answer has ended, nothing yields any more. Characters are read once.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from pilotlight.engine.text.formats.markers import Markers, held_suffix
from pilotlight.engine.text.formats.parts import ArgumentsPart, CallEndPart, CallPart, Part, ReasoningPart, TextPart

T = TypeVar("T")
Reading = Generator[None, None, T]
TextKind = type[TextPart] | type[ReasoningPart]

MOST_AGAIN = 4096  # characters after a marker that are read a second time if they turn out not to be a call


class Scanner:
    def __init__(self, markers: Markers, schemas: Mapping[str, dict[str, Any]]) -> None:
        """`schemas`: of the arguments of available tools, by name."""
        self.markers = markers
        self.schemas = schemas
        self.text = ""  # has arrived and is not read
        self.has_ended = False
        self.is_cut = False  # the model was interrupted when it ended
        self.is_reasoning = False
        self.out = PartWriter(markers)
        self._held: list[str] | None = None  # text that was read and may be a call
        self._num_kept = 0  # number of its characters

    @classmethod
    def of_whole(cls, markers: Markers, text: str) -> "Scanner":
        """Return a scanner of a complete text."""
        scanner = cls(markers, {})
        scanner.text = text
        scanner.has_ended = True
        return scanner

    @property
    def num_held(self) -> int:
        """Return the number of characters that have arrived and were not output."""
        return self.out.num_held + self._num_kept + len(self.text)

    @property
    def was_cut(self) -> bool:
        """True if the answer has ended because the model was interrupted."""
        return self.has_ended and self.is_cut

    # Reading

    def first(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end of the answer."""
        while not self.text and not self.has_ended:
            yield
        return self.text[:1]

    def beyond_space(self, put: Callable[[str], object] | None = None) -> Reading[str]:
        """Read white space, pass it to `put` if given, and return the next character without reading it."""
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
        """Return which of the words comes next, the longest of several, without reading it."""
        while True:
            if not self.has_ended and any(len(self.text) < len(word) and word.startswith(self.text) for word in words):
                yield
                continue
            return max((word for word in words if self.text.startswith(word)), key=len, default=None)

    def skip(self, *words: str) -> Reading[bool]:
        """Read one of the words if one comes next; return True if so."""
        word = yield from self.starts(*words)
        self.read(len(word or ""))
        return word is not None

    def run(self, pattern: re.Pattern[str], most: int = 512) -> Reading[str]:
        """Read up to `most` characters that match a pattern of one or more characters."""
        text = ""
        while (yield from self.first()) and len(text) < most and (found := pattern.match(self.text)):
            text += self.read(found.end())
        return text

    def until(self, words: Sequence[str], put: Callable[[str], object]) -> Reading[str | None]:
        """Output everything before the first of the words, and return that word without reading it.

        Returns None if the answer ends without one.
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
        """Output text up to the first of the words, read and return it, and hold back what follows.

        It is held until it turns out to be a call or not.
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
        """Return how much of the unread end may still become one of the words.

        In an interrupted answer, a possible start of any marker counts as one.
        """
        if self.has_ended:
            return held_suffix(self.text, (*words, *self.markers.all())) if self.is_cut else 0
        return held_suffix(self.text, words)

    # Possible calls

    def hold(self) -> None:
        """Keep text that is read from here on, until `release` or `unread`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Drop the held text: it is part of a call."""
        self._held, self._num_kept = None, 0

    def give_back(self) -> None:
        """Return the held text to the unread text."""
        text = "".join(self._held or ())
        self.release()
        self.text = text + self.text

    def unread(self, marker: str) -> None:
        """Treat the held text's marker as text: it started no call. Read the rest again if it is short.

        If the answer was interrupted there, drop all of the held text.

        In an answer that was interrupted there, drop all of it.
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
        """Output the start of a call, to which the held text belongs."""
        self.release()
        self.out.begin_call(name, call_id)

    def end_call(self) -> None:
        """Output the end of a call, unless the answer was interrupted in it."""
        if not self.was_cut:
            self.out.end_call()


class PartWriter:
    """The parts that a reader outputs.

    White space before a call is held back until something else follows.
    """

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._parts: list[Part] = []
        self._space: list[str] = []  # white space that belongs to a call, if one follows
        self._drops_space = False
        self.num_held = 0  # number of its characters
        self.num_calls = 0

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def show(self, text: str, kind: TextKind = TextPart) -> None:
        """Output text, but hold white space at its end until more follows."""
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
        """Output text at once: nothing but text follows."""
        text = self._markers.as_text(text)
        if self._drops_space:
            text = text.lstrip()
        if text:
            self._drops_space = False
            self._parts.append(TextPart(text))

    def drop_space(self, *, is_before: bool = True) -> None:
        """Drop white space before this point, and also after it if `is_before` something other than text."""
        self._space, self.num_held = [], 0
        self._drops_space = self._drops_space or is_before

    def show_space(self, kind: TextKind = TextPart) -> None:
        """Output the held white space: the answer has ended, so it is text."""
        if self._space:
            self._parts.append(kind("".join(self._space)))
            self.drop_space(is_before=False)

    def begin_call(self, name: str, call_id: str | None) -> None:
        self.drop_space()
        self._parts.append(CallPart(self.num_calls, name, call_id))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Output more of the call's arguments."""
        if text:
            self._parts.append(ArgumentsPart(self.num_calls - 1, text))

    def end_call(self) -> None:
        self._parts.append(CallEndPart(self.num_calls - 1))
