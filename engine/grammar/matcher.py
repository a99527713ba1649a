"""The state of one sequence in its grammar: the tokens that may come next.

This module knows token ids and their bytes, and is independent of how grammars are compiled.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_SPELLINGS = 32  # if more tokens are allowed, they are not just spellings of one forced text


class ConstraintError(Exception):
    """A grammar cannot be enforced, or a token does not follow it; the message has the reason."""


class Matcher:
    """The state of one sequence in its grammar."""

    def __init__(
        self, matcher: "LLMatcher", num_words: int, tokenizer: "LLTokenizer", *, is_optional: bool = False
    ) -> None:
        """`num_words`: the length of a mask, 32 tokens to a word.

        `is_optional`: the answer is unconstrained from the point at which the grammar can no longer be enforced.
        """
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._num_words = num_words
        self._is_optional = is_optional
        self._is_left = False

    @property
    def is_complete(self) -> bool:
        """True if the text is complete and no token can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> "array[int]":
        """Return a bit mask over the vocabulary as 32-bit words: a bit is set if its token may come next.

        The lowest bit is the first token. Raises ConstraintError.
        """
        bits = array("i", bytes(4 * self._num_words))
        address, _ = bits.buffer_info()
        self._matcher.unsafe_compute_mask_ptr(address, 4 * self._num_words)
        self._check()
        if not any(bits):
            raise ConstraintError("no token may follow the output so far")
        return bits

    def masks(self, drafts: SequenceOf[int]) -> "list[array[int]]":
        """Return the current mask, and the mask after each draft that follows the grammar.

        After the first draft that does not follow it, masks allow every token. Raises ConstraintError.
        """
        if not self._is_left:
            try:
                return self._masks(drafts)
            except ConstraintError:
                if not self._is_optional:
                    raise
                self._is_left = True
        return everything(32 * self._num_words, len(drafts) + 1)

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises ConstraintError if the token does not follow the grammar."""
        if self._is_left:
            return
        self._matcher.consume_token(token_id)
        try:
            self._check()
        except ConstraintError:
            if not self._is_optional:
                raise
            self._is_left = True

    def foreseen(self, ahead: SequenceOf[int], most: int) -> tuple[list[int], bool]:
        """Return tokens that must follow `ahead`, and whether they are certain.

        If the grammar forces a text, returns up to `most` of its tokens, and True; of several spellings the longest token is taken, as tokenizers do.
        Otherwise returns False, and the longest token that may follow if all others are its prefixes or white space, else no token. Returns no token
        if `ahead` does not follow the grammar, or the grammar is no longer enforced.
        """
        at = self._behind(ahead) if ahead else self
        if at is None or self._is_left or most < 1 or at.is_complete:
            return [], True
        tokens = at._forced()
        if not tokens:
            return at._longest_token(), False
        found: list[int] = []
        copy = self._copy() if at is self else at
        while tokens:
            tokens = tokens[: most - len(found)]
            num_taken = copy._matcher.try_consume_tokens(tokens)
            found += tokens[:num_taken]
            is_end = num_taken < len(tokens) or len(found) == most or copy.is_complete
            tokens = [] if is_end else copy._forced()
        return found, True

    def num_allowed(self, drafts: SequenceOf[int]) -> int:
        """Count the drafts that follow the grammar, up to the first that does not."""
        if self._is_left:
            return len(drafts)
        return 0 if self.is_complete else self._matcher.validate_tokens(list(drafts))

    def _masks(self, drafts: SequenceOf[int]) -> "list[array[int]]":
        found = [self.mask()]
        copy = self._copy() if drafts else self
        with suppress(ConstraintError):  # an error that drafts cause is ignored, because they may never be chosen
            for draft in drafts:
                if copy.is_complete or not copy._matcher.validate_tokens([draft]):
                    break
                copy._matcher.consume_token(draft)
                if copy.is_complete:
                    break
                found.append(copy.mask())
        return found + everything(32 * self._num_words, len(drafts) + 1 - len(found))

    def _behind(self, ahead: SequenceOf[int]) -> "Matcher | None":
        """Return a copy advanced by `ahead`, or None if `ahead` does not follow the grammar.

        This matcher does not change.
        """
        if self._is_left:
            return None
        copy = self._copy()
        return copy if copy._matcher.try_consume_tokens(list(ahead)) == len(ahead) else None

    def _copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self._num_words, self._tokenizer)

    def _forced(self) -> list[int]:
        """Return the tokens that are forced next; none if no text is forced."""
        return self._matcher.compute_ff_tokens() or (self._longest_token() if self._matcher.compute_ff_bytes() else [])

    def _longest_token(self) -> list[int]:
        """Return the longest token that may come next, if all others are prefixes of it or white space."""
        bits = int.from_bytes(self.mask().tobytes(), "little")
        if bits.bit_count() > _MOST_SPELLINGS:
            return []
        allowed: dict[int, bytes] = {}
        while bits:
            token_id = (bits & -bits).bit_length() - 1
            text = self._tokenizer.decode_bytes([token_id])
            if not text.isspace():
                allowed[token_id] = text
            bits &= bits - 1
        if not allowed:
            return []
        longest = max(allowed, key=lambda token_id: len(allowed[token_id]))
        return [longest] if all(allowed[longest].startswith(text) for text in allowed.values()) else []

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error().splitlines()[0])


def everything(vocab_size: int, count: int) -> "list[array[int]]":
    """Return `count` masks that allow every token."""
    return [array("i", [-1]) * -(-vocab_size // 32) for _ in range(count)]
