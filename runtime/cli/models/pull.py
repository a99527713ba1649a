"""`pilotlight pull`: download a model's files to this machine before it is served."""

import asyncio

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.models.sources import SourceError, directory_of, local_directory, source_of


def pull(model: str) -> None:
    """Download the model unless it is here, and print its directory. Raises CliError."""
    source = source_of(model)
    console = Console(stderr=True)
    try:
        place = local_directory(source)
        if place is not None:
            console.print(
                f"{model} is here already: nothing to download.", highlight=False, markup=False, soft_wrap=True
            )
        else:
            with Progress(
                TextColumn(model, markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console
            ) as bar:
                task = bar.add_task(model, total=None)
                place = asyncio.run(
                    directory_of(source, lambda done, total: bar.update(task, completed=done, total=total))
                )
    except SourceError as error:
        raise CliError(str(error)) from None
    print(place)
