"""`pilotlight pack`: find or download the model, start the packing process, and show its progress.

Only the other process loads torch.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.fetching.listing import NAME, write_listing
from pilotlight.runtime.fetching.short_names import PREFIX
from pilotlight.runtime.models.sources import SourceError, directory_of, local_directory

Show = Callable[[int, int], None]  # arguments: bytes done, bytes in total
DTYPES = ("auto", "float32", "bfloat16")


def pack(model: str, dtype: str, out: Path | None, is_lossless: bool = False) -> None:
    if dtype not in DTYPES:
        raise CliError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype}")
    out = out or Path(f"{model.removeprefix(PREFIX).rstrip('/').rsplit('/', 1)[-1]}.packed")
    with progress_bar() as bar:
        directory = fetched(model, bar)
        how = ["--dtype", dtype, *(["--lossless"] if is_lossless else [])]
        done = work("pilotlight.engine.tools.packing", ["pack", str(directory), str(out), *how], shown(bar, "packing"))
        try:
            digest = write_listing(out, shown(bar, "listing"))
        except OSError as error:
            raise CliError(f"{out / NAME} cannot be written: {error.strerror}") from None
    mib = done["num_bytes"] / 2**20
    print(f"{done['path']} ({mib:.1f} MiB)")
    print(f'Use it in a site file as source = "{out.absolute()}", or, where a web server has the folder, as')
    print(f'source = "https://HOST/{out.name}#sha256={digest}".')


def verify(directory: str) -> None:
    with progress_bar() as bar:
        done = work("pilotlight.engine.tools.packing", ["verify", directory], shown(bar, "checking"))
    print(f"{done['path']} is whole.")


def fetched(model: str, bar: Progress) -> Path:
    """Return the directory of a model, after a download if necessary. Raises CliError."""
    try:
        return local_directory(model) or asyncio.run(directory_of(model, shown(bar, "fetching")))
    except SourceError as error:
        raise CliError(str(error)) from None


def work(module: str, arguments: list[str], show: Show) -> dict[str, Any]:
    """Run a process that reports its progress, and return its last report.

    The process ends when this one ends; a terminal's Ctrl-C reaches only this one."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said: dict[str, Any] = json.loads(line)
                if "error" in said:
                    raise CliError(said["error"])
                if "path" in said:
                    return said
                show(said["done"], said["total"])
        except BaseException:
            process.kill()
            raise
    raise CliError(f"the process of {module} ended with status {process.returncode} and no result")


def progress_bar() -> Progress:
    console = Console()
    return Progress(
        TextColumn("{task.description:<8}"), BarColumn(bar_width=30), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def shown(bar: Progress, what: str) -> Show:
    task = bar.add_task(what, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)
