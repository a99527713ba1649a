"""`pilotlight pull`: download a model's files to this machine before it is served."""

import asyncio
import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.fetching.hub import downloaded
from pilotlight.runtime.models.sources import Download, SourceError, directory_of, local_directory, source_of


def pull(model: str, download: Download = downloaded) -> None:
    """Download the model unless it is here, and print its directory. Raises CliError."""
    source = source_of(model)
    try:
        place = local_directory(source)
        if place is not None:
            print(f"{model} is here already: nothing to download.", file=sys.stderr)
        else:
            columns = TextColumn(model, markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            with Progress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task(model, total=None)
                place = asyncio.run(
                    directory_of(source, lambda done, total: bar.update(task, completed=done, total=total), download)
                )
    except SourceError as error:
        raise CliError(str(error)) from None
    print(place)
