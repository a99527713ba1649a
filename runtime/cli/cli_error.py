"""CliError: the failure of a command, with a sentence that names the correction."""


class CliError(Exception):
    """Printed after `pilotlight:` on standard error; the exit status is 1."""
