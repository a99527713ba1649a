"""An answer as it comes, for readers that are written as if all of it were there.

A reader is a generator: where it needs more than has come it yields, and goes on there with the next token. What it has read and not put out yet is
held back, so all that is shown is a function of the tokens so far. Once the answer has ended, nothing yields any more. Characters are read once.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from pilotlight.engine.text.formats.markers import Markers, held_suffix
from pilotlight.engine.text.formats.parts import ArgumentsPart, CallEndPart, CallPart, Part, ReasoningPart, TextPart

T = TypeVar("T")
Reading = Generator[None, None, T]
TextKind = type[TextPart] | type[ReasoningPart]

MOST_AGAIN = 4096  # characters behind a marker that are read a second time, where they turn out to be no call


class Scanner:
    def __init__(self, markers: Markers, schemas: Mapping[str, dict[str, Any]]) -> None:
        """`schemas`: of the arguments of the tools that may be called, by name."""
        self.markers = markers
        self.schemas = schemas
        self.text = ""  # what has come and is not read
        self.has_ended = False
        self.is_cut = False  # when it ended, the model would have gone on
        self.is_reasoning = False
        self.out = PartWriter(markers)
        self._held: list[str] | None = None  # what was read of what may be a call
        self._num_kept = 0  # characters of it

    @classmethod
    def of_whole(cls, markers: Markers, text: str) -> "Scanner":
        """Return a scanner of a text to which nothing is added."""
        scanner = cls(markers, {})
        scanner.text = text
        scanner.has_ended = True
        return scanner

    @property
    def num_held(self) -> int:
        """Characters that have come and were not put out."""
        return self.out.num_held + self._num_kept + len(self.text)

    @property
    def was_cut(self) -> bool:
        """The answer has ended, and the model would have gone on."""
        return self.has_ended and self.is_cut

    # Reading

    def first(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end of the answer."""
        while not self.text and not self.has_ended:
            yield
        return self.text[:1]

    def beyond_space(self, put: Callable[[str], object] | None = None) -> Reading[str]:
        """Read white space, put it out where it is wanted, and return the character behind it without reading it."""
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
        """Return which of the words comes next, without reading it; the longest that does."""
        while True:
            if not self.has_ended and any(len(self.text) < len(word) and word.startswith(self.text) for word in words):
                yield
                continue
            return max((word for word in words if self.text.startswith(word)), key=len, default=None)

    def skip(self, *words: str) -> Reading[bool]:
        """Read one of the words, if one comes next."""
        word = yield from self.starts(*words)
        self.read(len(word or ""))
        return word is not None

    def run(self, pattern: re.Pattern[str], most: int = 512) -> Reading[str]:
        """Read as many characters as a pattern of one or more matches, up to the first that it does not."""
        text = ""
        while (yield from self.first()) and len(text) < most and (found := pattern.match(self.text)):
            text += self.read(found.end())
        return text

    def until(self, words: Sequence[str], put: Callable[[str], object]) -> Reading[str | None]:
        """Put out everything before the first of the words, and return that without reading it; None where the answer ends without."""
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
        """Put out text up to the first of the words, return it and read it; all from there on is held back until it is a call or none."""
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
        """Return how much of the unread end may still become one of the words. Of an answer that was cut, what may be the beginning of any marker is
        nothing else."""
        if self.has_ended:
            return held_suffix(self.text, (*words, *self.markers.all())) if self.is_cut else 0
        return held_suffix(self.text, words)

    # What may be a call

    def hold(self) -> None:
        """Keep what is read from here on, until `release` or `unread`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """What was held is part of a call."""
        self._held, self._num_kept = None, 0

    def give_back(self) -> None:
        """What was held is to be read once more."""
        text = "".join(self._held or ())
        self.release()
        self.text = text + self.text

    def unread(self, marker: str) -> None:
        """What was held is no call: the marker with which it began is text, and what follows is read anew, unless that is long. Of an answer that was
        cut there it is nothing."""
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
        """Put out the beginning of a call: what was held belongs to it."""
        self.release()
        self.out.begin_call(name, call_id)

    def end_call(self) -> None:
        """Put out the end of a call, unless the answer was cut in it."""
        if not self.was_cut:
            self.out.end_call()


class PartWriter:
    """The parts that a reader puts out, with the white space before a call held back until something else than a call follows."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._parts: list[Part] = []
        self._space: list[str] = []  # that belongs to a call, if one follows
        self._drops_space = False
        self.num_held = 0  # characters of that space
        self.num_calls = 0

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def show(self, text: str, kind: TextKind = TextPart) -> None:
        """Put out text, but not white space at its end before more of it has come."""
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
        """Put out text at once: nothing but text follows."""
        text = self._markers.as_text(text)
        if self._drops_space:
            text = text.lstrip()
        if text:
            self._drops_space = False
            self._parts.append(TextPart(text))

    def drop_space(self, *, is_before: bool = True) -> None:
        """White space before here is not text; nor is what follows, if it `is_before` something else than text."""
        self._space, self.num_held = [], 0
        self._drops_space = self._drops_space or is_before

    def show_space(self, kind: TextKind = TextPart) -> None:
        """The answer has ended: the white space at its end is text."""
        if self._space:
            self._parts.append(kind("".join(self._space)))
            self.drop_space(is_before=False)

    def begin_call(self, name: str, call_id: str | None) -> None:
        self.drop_space()
        self._parts.append(CallPart(self.num_calls, name, call_id))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Put out more of the call's arguments."""
        if text:
            self._parts.append(ArgumentsPart(self.num_calls - 1, text))

    def end_call(self) -> None:
        self._parts.append(CallEndPart(self.num_calls - 1))
