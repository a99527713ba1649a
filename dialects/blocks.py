"""Answers as a sequence of blocks, shared by Anthropic's Messages and OpenAI's Responses.

A writer receives the model's output piece by piece and returns the stream's events. It stores the output, because some events and every answer that
is not streamed repeat it. A writer that replays another site's output reaches the same state, so another site can continue a stream. This module is
independent of tokens.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from pilotlight.dialects.requests import ValidGeneration
from pilotlight.wire.chat import FinishReason, TokenLogprob, Usage

Kind = Literal["reasoning", "text", "call"]


class Block:
    """A part of an answer: reasoning, text, or a call. The `text` of a call is its arguments."""

    __slots__ = ("_pieces", "call_id", "kind", "logprobs", "name")

    def __init__(self, kind: Kind, name: str = "", call_id: str = "") -> None:
        """Start a block. Only calls have `name` and `call_id`."""
        self.kind = kind
        self.name = name
        self.call_id = call_id
        self.logprobs: list[TokenLogprob] = []  # log-probabilities of the block's tokens, if requested
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class BlockWriter:
    """Writes an answer in one dialect; subclasses encode each step.

    `num_events` counts the events written so far, in dialects that number them."""

    call_prefix = "call_"

    def __init__(self, request: ValidGeneration) -> None:
        self.request = request
        self.blocks: list[Block] = []
        self.num_events = 0
        self.is_cut = False  # the answer ended because of its maximum length
        self._is_open = False  # the last block is open
        self._num_calls = 0

    def add(self, kind: Kind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Return the events for more reasoning, more text, or more arguments of the last call."""
        events = b""
        if not (self._is_open and self.blocks[-1].kind == kind):
            events = self._begin(Block(kind))
        self.blocks[-1].add(text)
        self.blocks[-1].logprobs += logprobs
        return events + self.grown(self.blocks[-1], text, logprobs)

    def add_call(self, name: str, call_id: str | None) -> bytes:
        """Return the events that begin a call."""
        call_id = call_id or f"{self.call_prefix}{self.request.answer_name.item_id(0, self._num_calls)}"
        self._num_calls += 1
        return self._begin(Block("call", name, call_id))

    def finish(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        """Return the events that end the answer."""
        self.is_cut = finish_reason == "length"
        return self._close() + self.ended(usage, finish_reason, stop_string)

    def finish_whole(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        """Return an answer that is not streamed."""
        self.is_cut = finish_reason == "length"
        return self.whole(usage, finish_reason, stop_string)

    def _close(self) -> bytes:
        """Return the events that end the last block."""
        if not self._is_open:
            return b""
        self._is_open = False
        return self.closed(self.blocks[-1])

    def _begin(self, block: Block) -> bytes:
        events = self._close()
        self.blocks.append(block)
        self._is_open = True
        return events + self.opened(block)

    # implemented by each dialect

    def started(self, usage: Usage) -> bytes:
        """Return the first events of a stream."""
        raise NotImplementedError

    def opened(self, block: Block) -> bytes:
        """Return the events that begin the last block."""
        raise NotImplementedError

    def grown(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return the events with more of the last block."""
        raise NotImplementedError

    def closed(self, block: Block) -> bytes:
        """Return the events that end the last block."""
        raise NotImplementedError

    def ended(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        """Return the last events of the answer."""
        raise NotImplementedError

    def whole(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        """Return an answer that is not streamed."""
        raise NotImplementedError


NewWriter = Callable[[ValidGeneration], BlockWriter]
