"""Converts an engine's tokens into text, reasoning, tool calls and log-probabilities for the client.

It uses no sockets or clocks: TokenOutput in, Delta out. Text is held back while it may become a stop string, a marker or a complete character. A
token counts as delivered once all of its text was sent. The held text is a function of the tokens so far, so a processor that replays the output of
another one continues with the next character. Stop strings are searched only in the client's text, not in reasoning, calls or markup.
"""

from collections import deque
from typing import NamedTuple

from pilotlight.engine.api.protocol import TokenLogprobs, TokenOutput
from pilotlight.engine.text.formats import (
    AnswerParser,
    ArgumentsPart,
    CallEndPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
    merged,
)
from pilotlight.engine.text.formats.markers import held_suffix
from pilotlight.wire.chat import FinishReason


class DeliveredToken(NamedTuple):
    token_id: int
    text_offset: int  # number of the answer's characters before this token
    is_shown: bool  # False for the token that ended the answer: it is counted but has no text
    logprobs: TokenLogprobs | None


class Delta(NamedTuple):
    """The content of one event, or of one whole answer."""

    parts: tuple[Part, ...]
    tokens: tuple[DeliveredToken, ...]  # tokens whose text is complete with this delta
    finish_reason: FinishReason | None
    choice: int = 0  # index among the request's choices
    new_token_ids: tuple[int, ...] = ()  # all tokens since the previous delta, even if their text is held back

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> tuple[tuple[CallPart, str], ...]:
        """Each call that starts in this delta, with its arguments so far."""
        arguments: dict[int, str] = {}
        for part in self.parts:
            if isinstance(part, ArgumentsPart):
                arguments[part.position] = arguments.get(part.position, "") + part.text
        started = (part for part in self.parts if isinstance(part, CallPart))
        return tuple((call, arguments.get(call.position, "")) for call in started)


def joined(deltas: list[Delta]) -> Delta:
    """Join all deltas of one choice, the last one included."""
    parts = merged(part for delta in deltas for part in delta.parts)
    return deltas[-1]._replace(parts=parts, tokens=tuple(token for delta in deltas for token in delta.tokens))


class StopMatcher:
    """Finds the first stop string in a growing text, and holds back text that may become one."""

    def __init__(self, stops: tuple[str, ...], *, shows_found: bool = False) -> None:
        """`shows_found` includes the stop string in the text."""
        self._stops = stops
        self._shows_found = shows_found
        self.held = ""  # text that may become a stop string
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to send, and whether a stop string has ended it.

        The stop string that is complete first wins, and among two that end together the longer one, so the result does not depend on how the text is
        split."""
        if not self._stops:
            return text, False
        text = self.held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.held = ""
            end, start = min(found)
            self.found = text[start:end]
            return text[: end if self._shows_found else start], True
        held = held_suffix(text, self._stops)
        self.held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        text, self.held = self.held, ""
        return text


class DivergedError(Exception):
    """The continuation of an answer differs from the tokens delivered so far."""


class OutputProcessor:
    """Processor of one choice.

    Push outputs as they arrive; take a delta when the client can receive it."""

    def __init__(
        self,
        parser: AnswerParser,
        *,
        stop: tuple[str, ...] = (),
        shows_stop: bool = False,
        hidden_token_ids: frozenset[int] = frozenset(),
        one_call_only: bool = False,
        whole_calls: bool = False,
    ) -> None:
        """`whole_calls` delays each tool call to its end, and drops an incomplete one."""
        self._parser = parser
        self._stop = StopMatcher(stop, shows_found=shows_stop)
        self._hidden_token_ids = hidden_token_ids
        self._calls = _Calls(one_only=one_call_only, whole=whole_calls)
        self._tokens = _PendingTokens()
        self._parts: list[Part] = []
        self._awaited: deque[int] = deque()  # tokens computed again whose text was shown already
        self.is_taken = False  # the last delta has been taken
        self.shown_before: tuple[Part, ...] = ()  # parts that another site has sent
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # part of `completion_tokens`
        self.finish_reason: FinishReason | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop.found

    def end_with(self, token_ids: tuple[int, ...], reason: FinishReason) -> None:
        """Record an answer that another site has sent completely."""
        self._replay(token_ids)
        self.finish_reason, self.is_taken = reason, True

    def resume(self, token_ids: tuple[int, ...], again: tuple[int, ...] = ()) -> int:
        """Restore the state of a processor that was pushed these tokens and whose output was taken.

        The tokens in `again` were processed too, but the engine computes them once more for their log-probabilities. Returns the number of tokens
        that count as delivered."""
        self._replay(token_ids)
        if self.finish_reason is not None:
            raise DivergedError("the tokens delivered so far are a whole answer already")
        self._awaited.extend(again)
        return len(token_ids) - len(self._tokens)

    def push(self, output: TokenOutput) -> None:
        """Process an output.

        If a stop string ends the answer inside this output, the tokens after it are dropped.
        """
        for position, token_id in enumerate(output.token_ids):
            if self.finish_reason is not None:
                return
            is_last = position == len(output.token_ids) - 1
            is_end = is_last and output.finish_reason == "stop" and token_id in self._hidden_token_ids
            self._add(token_id, output.logprobs[position] if output.logprobs else None, is_shown=not is_end)
            if self._awaited:
                self._meet(token_id)
        if self.finish_reason is None and output.finish_reason in ("stop", "length"):
            if self._awaited:
                raise DivergedError(f"it ended where token {self._awaited[0]} had been shown")
            self._finish("length" if output.finish_reason == "length" else "stop")

    def take(self) -> Delta | None:
        """Return all that can be shown now; None if there is nothing."""
        is_ending = self.finish_reason is not None and not self.is_taken
        if not self._parts and not is_ending:
            return None
        parts, self._parts = merged(self._parts), []
        tokens, new_token_ids = self._tokens.take(is_ended=is_ending)
        self.is_taken = is_ending
        return Delta(parts, tokens, self.finish_reason if is_ending else None, new_token_ids=new_token_ids)

    def _replay(self, token_ids: tuple[int, ...]) -> None:
        """Process tokens whose text another site has sent."""
        for token_id in token_ids:
            self._add(token_id, None, is_shown=True)
        self.shown_before = merged(self._parts)
        self._forget_shown()

    def _add(self, token_id: int, logprobs: TokenLogprobs | None, *, is_shown: bool) -> None:
        before, start = self._parser.num_pushed, self._parser.start_of(token_id)
        self.completion_tokens += 1
        self.reasoning_tokens += self._parser.is_reasoning
        parts = self._parser.push(token_id) if is_shown else []
        end = self._parser.num_pushed
        if end > before:
            self._tokens.complete(end)
        is_whole = not (self._parser.is_pending and is_shown)
        self._tokens.add(DeliveredToken(token_id, start, is_shown, logprobs), end if is_whole else None)
        self._accept(parts)

    def _meet(self, token_id: int) -> None:
        expected = self._awaited.popleft()
        if token_id != expected or self.finish_reason is not None:
            raise DivergedError(f"token {token_id} came where token {expected} had been shown")
        self._parts.clear()
        if not self._awaited:
            self._forget_shown()

    def _forget_shown(self) -> None:
        self._tokens.take(is_ended=self.finish_reason is not None)
        self._parts.clear()

    def _accept(self, parts: list[Part]) -> None:
        has_text = False
        for part in parts:
            if self.finish_reason is not None:
                return
            if isinstance(part, TextPart):
                has_text = True
                shown, is_stopped = self._stop.push(part.text)
                self._put(shown)
                if is_stopped:
                    self._end("stop")
            else:
                self._put(self._stop.finish())
                self._parts += self._calls.push(part)
                if self._calls.are_enough:
                    self._end("stop")
        if has_text or not self._stop.held:
            self._tokens.num_shown = self._parser.num_settled - len(self._stop.held)

    def _put(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def _finish(self, reason: FinishReason) -> None:
        """End the answer: release all text that was held back, because no more tokens follow."""
        self._accept(self._parser.finish(is_cut=reason == "length"))
        if self.finish_reason is None:
            self._put(self._stop.finish())
            self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = "tool_calls" if self._calls.have_ended and reason == "stop" else reason


class _Calls:
    """The answer's tool calls."""

    def __init__(self, *, one_only: bool, whole: bool) -> None:
        """`whole` delays each call to its end."""
        self.have_ended = False  # at least one call has ended
        self._one_only = one_only
        self._whole = whole
        self._held: list[Part] = []  # parts of the open call

    @property
    def are_enough(self) -> bool:
        return self._one_only and self.have_ended

    def push(self, part: Part) -> list[Part]:
        """Return the parts that can be emitted now."""
        if isinstance(part, CallEndPart):
            self.have_ended = True
            held, self._held = self._held, []
            return held
        if self._whole and isinstance(part, CallPart | ArgumentsPart):
            self._held.append(part)
            return []
        return [part]


class _PendingTokens:
    """Tokens that no delta has yet, in order. A delta takes a token if it has the end of the token's text."""

    def __init__(self) -> None:
        self.num_shown = 0  # characters of the answer that were emitted or belong to markup
        self._tokens: deque[DeliveredToken] = deque()
        # For each token, the number of characters that are parsed up to its end; None while its last character is incomplete.
        self._ends: deque[int | None] = deque()
        self._new_ids: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: DeliveredToken, end: int | None) -> None:
        self._new_ids.append(token.token_id)
        self._tokens.append(token)
        self._ends.append(end)

    def complete(self, end: int) -> None:
        """Set the ends of the tokens that have just completed a character."""
        position = len(self._ends)
        while position and self._ends[position - 1] is None:
            position -= 1
            self._ends[position] = end

    def take(self, *, is_ended: bool) -> tuple[tuple[DeliveredToken, ...], tuple[int, ...]]:
        """Return the tokens whose text was emitted (all if `is_ended`), and the ids added since the last call."""
        tokens: list[DeliveredToken] = []
        while self._ends:
            end = self._ends[0]
            if not is_ended and (end is None or end > self.num_shown):
                break
            self._ends.popleft()
            tokens.append(self._tokens.popleft())
        new_ids, self._new_ids = tuple(self._new_ids), []
        return tuple(tokens), new_ids
