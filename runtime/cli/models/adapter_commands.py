"""`pilotlight adapters`: names, options and help.

The work is in adapter_folder.py, imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

adapters = typer.Typer(help="Adapters of a model, in the folder that its adapters_dir names.", no_args_is_help=True)
AdapterName = Annotated[str, typer.Argument(help="Name of the adapter in requests: MODEL:NAME, or lora = NAME.")]
FolderOption = Annotated[Path, typer.Option("--dir", help="The model's adapters_dir.")]


@adapters.command("add")
def add_adapter(
    name: AdapterName,
    directory: Annotated[Path, typer.Argument(help="PEFT directory: adapter_config.json, adapter_model.safetensors.")],
    folder: FolderOption,
) -> None:
    """Check an adapter and copy it into the folder. It is served from then on."""
    from pilotlight.runtime.cli.models.adapter_folder import add as run

    run(name, directory, folder)


@adapters.command("list")
def list_adapters(folder: FolderOption) -> None:
    """List the adapters in the folder, with their ranks and sizes."""
    from pilotlight.runtime.cli.models.adapter_folder import show as run

    run(folder)


@adapters.command("remove")
def remove_adapter(name: AdapterName, folder: FolderOption) -> None:
    """Remove an adapter; answers in progress are finished."""
    from pilotlight.runtime.cli.models.adapter_folder import remove as run

    run(name, folder)
