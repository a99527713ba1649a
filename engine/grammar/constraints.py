"""Grammars that answers must follow, each compiled once, in a thread, for all sequences.

This module is independent of logits, and of which sequence waits for a grammar (engine/scheduling/awaited.py).
"""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler, refusal
from pilotlight.engine.grammar.matcher import ConstraintError, Matcher
from pilotlight.engine.grammar.tenant_threads import TenantThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_GRAMMARS = 64  # limit of compiled grammars per model
COMPILE_S = 20.0  # limit of a sequence's wait: a child process has compiled the grammar in a few seconds, so a longer wait means overload


class Grammars:
    """The grammars of one model."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
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
            matcher = self._compiler.matcher(grammar.result(), is_optional=is_optional)
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
        compiler.matcher(grammar).mask()
    except ConstraintError as error:
        raise ConstraintError(refusal(constraint, f"nothing satisfies it ({error})")) from None
    return grammar


def _has_failed(compiled: "Future[LLMatcher]") -> bool:
    return compiled.done() and (compiled.cancelled() or compiled.exception() is not None)
