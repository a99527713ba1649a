"""Child processes for untrusted input: checkpoints' templates and tokenizers, clients' images.

All sites of this process share them. A child keeps only its compiled templates between jobs. A job that exceeds its limits ends only its own child;
the caller handles the failure.
"""

import asyncio
import atexit
import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.errors import TokenizerError
from pilotlight.engine.api.guarded_pool import GuardedJob, GuardedPool, JobCall, JobEndedError, JobError
from pilotlight.engine.tokenizer.tokenizer import check_tokenizer
from pilotlight.engine.tokenizer.tokenizer_files import READERS

NUM_CHILDREN = 4  # number of child processes: more than a single model or kind of job uses at once
TOKENIZER_BYTES = 4 << 30  # limit of a tokenizer's check; the largest take 1 GiB
NOTED_FROM_BYTES = 1 << 20  # a smaller tokenizer is checked at each start, in milliseconds
_TOKENIZER_FILES = (*READERS, "tokenizer_config.json", "special_tokens_map.json")


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


async def require_safe_tokenizer(directory: Path, cpu_s: float) -> None:
    """Check in a child process that a checkpoint's tokenizer is safe to load. Raises TokenizerError.

    A large one that has passed is not checked again on this machine, because reading it takes up to a second.
    """
    note = await asyncio.to_thread(_note_of, directory)
    if note is not None and await asyncio.to_thread(os.path.exists, note):
        return
    try:
        await run_guarded(GuardedJob(JobCall(check_tokenizer, (str(directory),)), cpu_s, TOKENIZER_BYTES))
    except JobError as error:
        raise TokenizerError(str(error)) from None
    except JobEndedError as error:
        raise TokenizerError(f"{directory} has a tokenizer that cannot be used: {error}") from None
    if note is not None:
        with contextlib.suppress(OSError):  # a store that cannot be written costs only the next check
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            note.touch()


def _note_of(directory: Path) -> Path | None:
    """Return the file that exists if this tokenizer has passed; None if none is kept."""
    # Imported here because a site that starts needs neither yet.
    from tokenizers import __version__

    from pilotlight.runtime.fetching.store import store

    try:
        place = store() / "tokenizers"
        files = {name: path.read_bytes() for name in _TOKENIZER_FILES if (path := directory / name).is_file()}
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    if sum(map(len, files.values())) < NOTED_FROM_BYTES:
        return None
    digest = hashlib.sha256(__version__.encode())
    for name, content in files.items():
        digest.update(f"\0{name}\0".encode())
        digest.update(content)
    return place / digest.hexdigest()[:32]


@cache
def children() -> GuardedPool:
    atexit.register(close_children)
    return GuardedPool(NUM_CHILDREN)


def close_children() -> None:
    """End the children and their jobs, if there are any."""
    if children.cache_info().currsize:
        children().close()
        children.cache_clear()
