"""`pilotlight analytics query`: run SQL on Analytics Engine's data points, on a site's machine."""

import json
import sqlite3
from contextlib import closing
from typing import Annotated

import typer

from pilotlight.functions.cli.state import HERE, DirOption, SiteOption, State, print_rows
from pilotlight.runtime.cli.cli_error import CliError

analytics = typer.Typer(help="Data points of Analytics Engine.", no_args_is_help=True)


@analytics.callback()
def commands() -> None:
    """Group of one command: without this callback Typer would drop the name `query`."""


@analytics.command("query")
def query(
    dataset: Annotated[str, typer.Argument(help="The dataset, or the binding's name in the manifest.")],
    sql: Annotated[
        str,
        typer.Argument(
            help="SQL of SQLite. The table has the dataset's name and the columns timestamp, index1, blob1 to blob20, double1 to double20."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """Run a SELECT and print its rows."""
    from pilotlight.functions.bindings.analytics import dataset_file

    state = State(site, directory)
    name = str(state.declared("analytics_engine", dataset).options.get("dataset") or dataset)
    path = dataset_file(state.directory, name)
    if not path.is_file():
        raise CliError(f"{name} has no data points here: there is no {path}.")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        for table in {name, dataset}:
            quoted = '"' + table.replace('"', '""') + '"'
            connection.execute(f"CREATE TEMP VIEW {quoted} AS SELECT *, 1 AS _sample_interval FROM main.points")
        try:
            found = connection.execute(sql)
            columns, rows = [column[0] for column in found.description or ()], found.fetchall()
        except sqlite3.Error as error:
            raise CliError(f"{name}: {error}.") from None
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    print_rows(columns, rows)
