"""Checks in child processes whether clients' grammars can be enforced; results are cached.

They run before an engine host compiles the grammar. Grammars of one account are checked one at a time, so that large ones delay only its own
requests. Independent of how a grammar is checked (engine/grammar/grammar_check.py) and how a refusal is sent.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary

from pilotlight.engine.api.guarded_pool import GuardedPool, JobEndedError, JobError
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.grammar_check import GrammarVocabulary, check_job
from pilotlight.engine.grammar.grammar_compiler import TokenizerUnreadableError, refusal
from pilotlight.runtime.generation.admission import RETRY_AFTER_S
from pilotlight.support.time_limits import done_within
from pilotlight.wire.errors import ApiError

CHILDREN = 2  # number of child processes; each takes 40 MB and a tokenizer; they start with the first grammar
NICENESS = 5  # low priority of the children, so that grammars take no CPU time from other accounts' streams
WAIT_S = 10.0  # time limit of a request's grammar, including its wait for a child
MAX_VERDICTS = 4096  # cached results, of 100 to 700 bytes each
REFUSED_S = 600.0  # how long a refusal is cached if the check crashed: the grammar would crash the next child, too

log = logging.getLogger(__name__)


class _Verdict(NamedTuple):
    refusal: str | None  # reason; None if the grammar can be enforced
    until: float


class GrammarChecks:
    def __init__(
        self, pool: GuardedPool | None = None, clock: Callable[[], float] = time.monotonic, wait_s: float = WAIT_S
    ) -> None:
        self._pool = pool or GuardedPool(CHILDREN, NICENESS)
        self._clock = clock
        self._wait_s = wait_s
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # in LRU order, the newest last
        self._checks: set[asyncio.Task[_Verdict | ApiError]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def refusal(self, vocabulary: GrammarVocabulary, constraint: Constraint, owner: str) -> str | None:
        """Return why a grammar cannot be enforced; None if it can.

        `owner` is the account. Raises ApiError if the check does not end in time."""
        key = _digest(vocabulary, constraint)
        if (known := self._known(key)) is not None:
            return known.refusal
        started = asyncio.Event()  # a started check runs to its end, even if its request no longer waits
        check = asyncio.create_task(self._check(vocabulary, constraint, owner, key, started), name="grammar")
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        try:
            is_done = await done_within(self._wait_s, check)
        finally:
            if not started.is_set():
                check.cancel()
        if not is_done:
            raise _overloaded(f"its turn and its check took more than {self._wait_s:g} s")
        found = check.result()
        if isinstance(found, ApiError):
            raise found
        return found.refusal

    def close(self) -> None:
        self._pool.close()

    async def _check(
        self, vocabulary: GrammarVocabulary, constraint: Constraint, owner: str, key: bytes, started: asyncio.Event
    ) -> "_Verdict | ApiError":
        async with self._turns.setdefault(owner, asyncio.Lock()):
            if (known := self._known(key)) is not None:
                return known
            started.set()
            try:
                await asyncio.wrap_future(self._pool.submit(check_job(vocabulary, constraint)))
            except JobError as error:
                if error.name == TokenizerUnreadableError.__name__:
                    return _Verdict(str(error), 0.0)
                is_named = error.name == "ConstraintError"
                return self._keep(key, str(error) if is_named else refusal(constraint, f"{error.name}: {error}"))
            except JobEndedError as error:
                log.warning("a grammar of %s ended the process that checked it: %s", owner, error)
                if not error.is_jobs_fault:
                    return _overloaded(str(error))
                return self._keep(key, refusal(constraint, str(error)))
            return self._keep(key, None)

    def _known(self, key: bytes) -> _Verdict | None:
        known = self._verdicts.get(key)
        if known is None or known.until < self._clock():
            return None
        self._verdicts.move_to_end(key)
        return known

    def _keep(self, key: bytes, why: str | None) -> _Verdict:
        verdict = _Verdict(why, float("inf") if why is None else self._clock() + REFUSED_S)
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


def _digest(vocabulary: GrammarVocabulary, constraint: Constraint) -> bytes:
    named = f"{vocabulary.directory}\0{vocabulary.size}\0{vocabulary.eos_token_ids}\0{constraint.kind}\0"
    return hashlib.sha256(named.encode() + constraint.text.encode("utf-8", "surrogatepass")).digest()


def _overloaded(why: str) -> ApiError:
    message = f"the answer's grammar could not be checked in time: {why}; try again in a moment"
    return ApiError("overloaded", message, retry_after_s=RETRY_AFTER_S)
