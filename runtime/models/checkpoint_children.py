"""Child processes for untrusted input: checkpoints' templates and tokenizers, clients' images.

All sites of this process share them. A child keeps only its compiled templates between jobs. A job that exceeds its limits ends only its own child;
the caller handles the failure.
"""

import asyncio
import atexit
from functools import cache
from typing import Any

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.guarded_pool import GuardedJob, GuardedPool, JobEndedError

NUM_CHILDREN = 4  # number of child processes: more than a single model or kind of job uses at once


async def run_guarded(job: GuardedJob) -> Any:
    """Return a job's result.

    Raises JobError for an exception of the job, JobEndedError if the job itself ends its child, and EngineError if the machine is too busy for it."""
    for is_last_try in (False, True):
        try:
            return await asyncio.wrap_future(children().submit(job))
        except JobEndedError as error:
            if error.is_jobs_fault:
                raise
            if is_last_try or error.reason == "deadline":
                raise EngineError("overloaded", f"a request could not be prepared: {error}; try again") from None
    raise AssertionError("a try returns or raises")


@cache
def children() -> GuardedPool:
    atexit.register(close_children)
    return GuardedPool(NUM_CHILDREN)


def close_children() -> None:
    """End the children and their jobs, if there are any."""
    if children.cache_info().currsize:
        children().close()
        children.cache_clear()
