"""Checks in a child process that a client's grammar can be compiled and followed.

A grammar library reads untrusted input: some of it overflows the library's stack, takes gigabytes, or fails in the middle of an answer. An engine
host compiles only what a child process survived: compiling it and drawing a few answers (engine/api/guarded_pool.py). Knows the limits that an honest
grammar keeps; does not know who asks.
"""

import random
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pilotlight.engine.api.guarded_pool import GuardedJob, JobCall
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.constraints import Matcher, satisfiable
from pilotlight.engine.grammar.grammar_compiler import (
    ConstraintError,
    GrammarCompiler,
    TokenizerUnreadableError,
    refusal,
)

CPU_S = 3.0  # a schema of 3,000 optional keys takes 0.7 s, one of ten 1 ms
MEMORY_BYTES = 256 << 20  # the schema above takes 20 MiB
_WALKS, _WALK_TOKENS = 3, 10  # 0.4 ms, or 3 with a vocabulary of 128,000 tokens


class GrammarVocabulary(NamedTuple):
    """The tokens over which grammars of one model are compiled."""

    directory: Path  # of the tokenizer
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
    """Keep a tokenizer for the checks after this; one that cannot be read is for the check to name."""
    with suppress(TokenizerUnreadableError):
        _compiler(directory, size, tuple(eos_token_ids)).tokenizer()


def check(directory: str, size: int, eos_token_ids: list[int], kind: str, text: str) -> None:
    """Raises ConstraintError."""
    compiler = _compiler(directory, size, tuple(eos_token_ids))
    constraint = Constraint(kind, text)  # type: ignore[arg-type]
    grammar = satisfiable(compiler, constraint)
    for seed in range(_WALKS):
        draw, matcher = random.Random(seed), Matcher.at_start(grammar, compiler)
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
        following = bits >> skipped  # never 0: its highest bit is one of the mask's
        matcher.accept(skipped + (following & -following).bit_length() - 1)


@lru_cache(4)  # of a site's models, in each child
def _compiler(directory: str, size: int, eos_token_ids: tuple[int, ...]) -> GrammarCompiler:
    return GrammarCompiler(Path(directory), size, eos_token_ids)
