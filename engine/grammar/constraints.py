"""Grammars that answers must follow, and the state of each sequence in its grammar.

A grammar is compiled once for all sequences that request it, in a thread. A matcher then returns the mask of tokens that may come next, and advances
by each chosen token. This module knows token ids and their bytes, and is independent of logits, and of which sequence waits for a grammar
(engine/scheduling/awaited.py).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.grammar_compiler import ConstraintError, GrammarCompiler, refusal
from pilotlight.engine.grammar.tenant_threads import TenantThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_GRAMMARS = 64  # limit of compiled grammars per model
_MOST_SPELLINGS = 32  # if more tokens are allowed, they are not just spellings of one forced text
COMPILE_S = 20.0  # limit of a sequence's wait: a child process has compiled the grammar in a few seconds, so a longer wait means overload


def everything(vocab_size: int, count: int) -> "list[array[int]]":
    """Return `count` masks that allow every token."""
    return [array("i", [-1]) * -(-vocab_size // 32) for _ in range(count)]


def forbid(mask: "array[int]", token_ids: SequenceOf[int]) -> None:
    """Forbid tokens in a mask, in place, unless no token would be left.

    So an answer can end where its grammar allows nothing else.
    """
    words = array("i", mask)
    for token_id in token_ids:
        words[token_id // 32] &= ~(1 << token_id % 32) if token_id % 32 < 31 else 0x7FFFFFFF
    if any(words):
        mask[:] = words


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

    @classmethod
    def at_start(cls, grammar: "LLMatcher", compiler: GrammarCompiler, *, is_optional: bool = False) -> "Matcher":
        return cls(grammar.deep_copy(), compiler.num_words, compiler.tokenizer(), is_optional=is_optional)

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


class Grammars:
    """The grammars of one model."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: SequenceOf[int]) -> None:
        self._compiler = GrammarCompiler(directory, vocab_size, eos_token_ids)
        self._compiled: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()  # the newest last
        self._compiling = TenantThreads(2, "grammars")
        self._starting = ThreadPoolExecutor(
            1, "matchers"
        )  # separate threads, so that a compiled grammar does not wait for one that is being compiled

    def compile(
        self, constraint: Constraint, delivered: SequenceOf[int] = (), tenant: bytes = b""
    ) -> "Future[Matcher]":
        """Return the future of a matcher that has accepted the delivered tokens, without blocking.

        The future may fail with ConstraintError. `tenant`: the tenant that requests the grammar; tenants take turns at compilation.
        """
        known = self._compiled.pop(constraint, None)
        if known is None or _has_failed(known):  # try again after a failure
            known = self._compiling.submit(tenant, lambda: self._compile(constraint))
        self._compiled[constraint] = known
        if len(self._compiled) > MOST_GRAMMARS:
            self._compiled.popitem(last=False)
        started: Future[Matcher] = Future()

        def begin_soon(grammar: "Future[LLMatcher]") -> None:
            with suppress(RuntimeError):  # the model is being closed
                self._starting.submit(self._begin, grammar, delivered, started, is_optional=constraint.is_optional)

        known.add_done_callback(begin_soon)  # a callback, so that no thread waits for another
        return started

    def close(self) -> None:
        self._compiling.close()
        self._starting.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, grammar: "Future[LLMatcher]", delivered: SequenceOf[int], started: "Future[Matcher]", *, is_optional: bool
    ) -> None:
        if not started.set_running_or_notify_cancel():
            return
        try:
            matcher = Matcher.at_start(grammar.result(), self._compiler, is_optional=is_optional)
            for token_id in delivered:
                matcher.accept(token_id)
        except Exception as error:  # waiting sequences get the error from the future
            started.set_exception(error)
        else:
            started.set_result(matcher)

    def _compile(self, constraint: Constraint) -> "LLMatcher":
        return satisfiable(self._compiler, constraint)


def satisfiable(compiler: GrammarCompiler, constraint: Constraint) -> "LLMatcher":
    """Return a compiled grammar that allows some token. Raises ConstraintError."""
    grammar = compiler.compile(constraint)
    try:
        Matcher.at_start(grammar, compiler).mask()
    except ConstraintError as error:
        raise ConstraintError(refusal(constraint, f"nothing satisfies it ({error})")) from None
    return grammar


def _has_failed(compiled: "Future[LLMatcher]") -> bool:
    return compiled.done() and (compiled.cancelled() or compiled.exception() is not None)
