"""An author's mistake as it is told: as text, the traceback from the author's own code on, as what crosses a channel, and as what the caller of
another function's method catches.
"""

import builtins
import resource
import sys
import traceback
from functools import cache
from pathlib import Path
from types import TracebackType

from runtime.functions.channel import Failure

_OURS = str(Path(__file__).parents[2])  # the SDK and what serves it


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _from_author(error.__traceback__)))


def print_trouble(where: str, error: BaseException) -> None:
    print(f"{where}: {text_of(error)}", file=sys.stderr, flush=True)


def describe(error: BaseException) -> Failure:
    """Describe an error to the author: the name, the message and the traceback from the author's own code on."""
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
    """Return what a caller catches for a failure of a method elsewhere: a Failure that is, too, the exception of Python's that it is named after."""
    remote = _remote_kind(failure.name) if type(failure) is Failure else None
    if remote is None:
        return failure
    return remote(failure.message, code=failure.code, status=failure.status, name=failure.name, detail=failure.detail)


@cache
def _remote_kind(name: str) -> type[Failure] | None:
    """Return the class; None where there is no such exception, or it is not made of a sentence, as a UnicodeDecodeError."""
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


def _from_author(trace: TracebackType | None) -> TracebackType | None:
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename.startswith((_OURS, "<frozen importlib")):
        start = start.tb_next
    return start  # None, a mistake of syntax: the exception itself says where
