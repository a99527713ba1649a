"""Descriptions of an author's error: text with traceback, failure, and exception for remote callers.

The traceback begins in the author's own code.
"""

import builtins
import logging
import re
import resource
import sys
import traceback
import warnings
from functools import cache
from pathlib import Path
from types import TracebackType

from pilotlight.functions.channel.failure import Failure

_ORIGINS = 3  # number of frames by which an unawaited coroutine remembers its origin: 0.2 us for each coroutine
_UNAWAITED = re.compile(r"(coroutine '.+' was never awaited)\nCoroutine created at ")
_ORIGIN = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_OURS = str(Path(__file__).parents[2])  # folder of the SDK and the isolate's other modules


def show_authors_lines() -> None:
    """Let the warning of a forgotten await name the author's line that made the coroutine.

    Python's hint at tracemalloc is left out."""
    sys.set_coroutine_origin_tracking_depth(_ORIGINS)
    formatted = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if unawaited := _UNAWAITED.match(str(message)):
            for file, number in _ORIGIN.findall(str(message)):  # the most recent one is the last
                if not file.startswith(_OURS):
                    message, filename, lineno, line = unawaited[1], file, int(number), None
        return formatted(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning


def text_of(error: BaseException) -> str:
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    _keep_authors_frames(told)
    text = "".join(told.format())
    for each in _chain(error):
        if isinstance(each, Failure):  # a Failure has the original error's name, not its class
            ours = f"{type(each).__module__}.{type(each).__qualname__}: "
            text = text.replace(ours, "" if each.message.startswith(f"{each.name}:") else f"{each.name}: ")
    return text


def print_trouble(where: str, error: BaseException) -> None:
    print(f"{where}: {text_of(error).rstrip()}", file=sys.stderr, flush=True)


def log_trouble(sentence: str, error: BaseException) -> None:
    """Log an application's error where the platform's SDK does, for the author's own logging.
    Without any, Python prints it."""
    logging.getLogger("asgi").error(sentence, exc_info=(type(error), error, _from_author(error.__traceback__)))


def _from_author(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the first frames, which are the SDK's."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames


def describe(error: BaseException) -> Failure:
    """Return an error as a failure for its author: name, message, and traceback from the author's code on."""
    if isinstance(error, Failure) and error.detail:
        return error
    code, status = getattr(error, "code", "exception"), getattr(error, "status", 500)
    if isinstance(error, MemoryError):
        sentence = f"a function may use {resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20} MiB of memory"
        return Failure(
            sentence, code="exception", name="MemoryError", detail=f"{text_of(error).rstrip()}: {sentence}\n"
        )
    return Failure(
        str(error) or type(error).__name__,
        code=code if isinstance(code, (str, int)) else "exception",
        status=status if isinstance(status, int) else 500,
        name=error.name if isinstance(error, Failure) else type(error).__name__,
        detail=text_of(error),
    )


def remote_error(failure: Failure) -> Failure:
    """Return the exception that a caller of a remote method gets.
    It is a Failure, and also an instance of Python's exception of that name."""
    remote = _remote_kind(failure.name) if type(failure) is Failure else None
    if remote is None:
        return failure
    return remote(failure.message, code=failure.code, status=failure.status, name=failure.name, detail=failure.detail)


@cache
def _remote_kind(name: str) -> type[Failure] | None:
    """Return a class that derives from Failure and from Python's exception `name`.
    None if there is no such exception, or its constructor needs more than a message."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        remote = type(kind.__name__, (Failure, kind), {"__str__": _sentence, "__module__": "builtins"})
        remote("")
    except TypeError:
        return None
    return remote


def _sentence(failure: Failure) -> str:
    return failure.message


def _keep_authors_frames(told: traceback.TracebackException | None) -> None:
    """Remove the frames of the SDK, of the isolate and of the import from a traceback.
    If no frame is left, the exception's text names the place."""
    if told is None:
        return
    kept = [frame for frame in told.stack or () if not frame.filename.startswith((_OURS, "<frozen importlib"))]
    told.stack = traceback.StackSummary.from_list(kept) if kept else None  # type: ignore[assignment]  # None: no traceback is printed
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        _keep_authors_frames(other)


def _chain(error: BaseException | None) -> list[BaseException]:
    if error is None:
        return []
    return [error, *_chain(error.__cause__ or (None if error.__suppress_context__ else error.__context__))]
