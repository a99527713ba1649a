"""`pilotlight quantize`: find or download the model, and start the process that rounds it.

Only the other process loads torch."""

from pathlib import Path

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.models.pack import fetched, progress_bar, shown, work
from pilotlight.runtime.fetching.short_names import PREFIX

BITS = ("int8", "int4")


def quantize(model: str, to: str, group: int, out: Path | None, calibrate: Path | None = None) -> None:
    if to not in BITS:
        raise CliError(f"--to must be one of {', '.join(BITS)}, not {to}")
    if group % 32:
        raise CliError(f"--group {group} is no multiple of 32, nor 0 for whole rows")
    out = out or Path(f"{model.removeprefix(PREFIX).rstrip('/').rsplit('/', 1)[-1]}.{to}")
    with progress_bar() as bar:
        directory = fetched(model, bar)
        arguments = [str(directory), str(out), "--to", to, "--group", str(group)]
        if calibrate is not None:
            arguments += ["--calibrate", str(calibrate)]
        done = work("pilotlight.engine.tools.quantizing", arguments, shown(bar, "rounding"))
    mib = done["num_bytes"] / 2**20
    print(f"{done['path']} ({mib:.1f} MiB)")
    print(f"pilotlight serve {done['path']}")
