"""Checks in a child process that a client's grammar can be compiled and followed.

Grammars are untrusted input: some overflow the library's stack, take gigabytes, or fail in the middle of an answer. So a child process first compiles
a grammar and draws a few answers (engine/api/guarded_pool.py); an engine host compiles the grammar only if the child survives. This module knows the
limits of a reasonable grammar, and is independent of who sent it.
"""

import random
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pilotlight.engine.api.guarded_pool import GuardedJob, JobCall
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.constraints import satisfiable
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler, TokenizerUnreadableError, refusal
from pilotlight.engine.grammar.matcher import ConstraintError, Matcher

CPU_S = 3.0  # limit of one check; a schema of 3,000 optional keys takes 0.7 s, one of ten keys takes 1 ms
MEMORY_BYTES = 256 << 20  # limit of one check; a schema of 3,000 optional keys takes 20 MiB
# Number of drawn answers, and most tokens of each: takes 0.4 ms, or 3 ms with a vocabulary of 128,000 tokens.
_WALKS, _WALK_TOKENS = 3, 10


class GrammarVocabulary(NamedTuple):
    """The tokens of one model, for which grammars are compiled."""

    directory: Path  # directory of the tokenizer
    size: int
    eos_token_ids: tuple[int, ...]


def check_job(vocabulary: GrammarVocabulary, constraint: Constraint) -> GuardedJob:
    """Return the job that checks a grammar.

    Its result is the name of an error (TokenizerUnreadableError if the tokenizer cannot be read), or None if there is no error.
    """
    known = (str(vocabulary.directory), vocabulary.size, vocabulary.eos_token_ids)
    call = JobCall(check, (*known, constraint.kind, constraint.text))
    return GuardedJob(call, CPU_S, MEMORY_BYTES, JobCall(read_tokenizer, known))


def read_tokenizer(directory: str, size: int, eos_token_ids: list[int]) -> None:
    """Load a tokenizer for later checks. If it cannot be read, the checks report the error."""
    with suppress(TokenizerUnreadableError):
        _compiler(directory, size, tuple(eos_token_ids)).tokenizer()


def check(directory: str, size: int, eos_token_ids: list[int], kind: str, text: str) -> None:
    """Check a grammar. Raises ConstraintError if it cannot be compiled or followed."""
    compiler = _compiler(directory, size, tuple(eos_token_ids))
    constraint = Constraint(kind, text)  # type: ignore[arg-type]
    grammar = satisfiable(compiler, constraint)
    for seed in range(_WALKS):
        draw, matcher = random.Random(seed), compiler.matcher(grammar)
        try:
            matcher.foreseen((), _WALK_TOKENS)
            _walk(matcher, draw)
        except ConstraintError as error:
            raise ConstraintError(refusal(constraint, f"it fails in the middle of an answer ({error})")) from None


def _walk(matcher: Matcher, draw: random.Random) -> None:
    """Draw allowed tokens until the answer is complete or long enough. Raises ConstraintError."""
    for _ in range(_WALK_TOKENS):
        if matcher.is_complete:
            return
        bits = int.from_bytes(matcher.mask().tobytes(), "little")
        skipped = draw.randrange(bits.bit_length())
        following = bits >> skipped  # never 0, because it contains the highest bit of the mask
        matcher.accept(skipped + (following & -following).bit_length() - 1)


@lru_cache(4)  # one entry per model, in each child process
def _compiler(directory: str, size: int, eos_token_ids: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(Path(directory), size, eos_token_ids)
