"""`pilotlight adapters`: the folder from which sites read adapters (`adapters_dir` of a model).

An adapter is added completely or not at all. A site looks into the folder at every request, so it needs no notice. An adapter that is removed during
an answer is already on the device, so the answer can finish.
"""

import shutil
import tempfile
from pathlib import Path

from rich.table import Table

from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS, AdapterDescription, AdapterError, check, describe
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.tables import print_table
from pilotlight.runtime.models.adapters import is_name


def add(name: str, directory: Path, folder: Path) -> None:
    """Copy an adapter into the folder. Raises CliError if a site would refuse the name or the adapter."""
    _require_name(name)
    place = folder / name
    if place.exists():
        raise CliError(f"{folder} has an adapter {name} already; remove it first, or choose another name.")
    described = _described(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
        try:
            for file in (CONFIG, WEIGHTS):
                shutil.copyfile(directory / file, partial / file)
            partial.chmod(0o755)
            partial.rename(place)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise CliError(f"{place} cannot be written: {error.strerror}.") from None
    print(f"{name}: {_size(described)}, in {place}")


def show(folder: Path) -> None:
    """List the folder's adapters, including those that a site would refuse, with the reason."""
    if not folder.is_dir():
        raise CliError(f"there is no folder {folder}.")
    table = Table("adapter", "what it is")
    for place in sorted(folder.iterdir()):
        if is_name(place.name) and (place / CONFIG).is_file():
            try:
                said = _size(describe(place))
            except AdapterError as error:
                said = f"cannot be used: {error}"
            table.add_row(place.name, said)
    print_table(table)


def remove(name: str, folder: Path) -> None:
    """Remove an adapter. Later requests that name it are refused."""
    _require_name(name)
    place = folder / name
    if not (place / CONFIG).is_file():
        raise CliError(f"{folder} has no adapter {name}.")
    try:
        gone = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
        try:
            place.rename(gone / name)  # a rename is atomic: the adapter is never half deleted
        finally:
            shutil.rmtree(gone, ignore_errors=True)
    except OSError as error:
        raise CliError(f"{place} cannot be removed: {error.strerror}.") from None
    print(f"{name} is removed")


def _described(directory: Path) -> AdapterDescription:
    try:
        return check(directory)
    except AdapterError as error:
        raise CliError(f"{directory} cannot be used as an adapter: {error}.") from None
    except OSError as error:
        raise CliError(f"{directory} cannot be read: {error.strerror}.") from None


def _require_name(name: str) -> None:
    if not is_name(name):
        raise CliError(
            f"{name!r} is not a valid name: use at most 100 letters, digits, '.', '_' and '-', with a letter or digit first."
        )


def _size(described: AdapterDescription) -> str:
    return f"rank {described.rank}, {len(described.projections)} projections, {described.num_bytes / 2**20:.1f} MiB"
