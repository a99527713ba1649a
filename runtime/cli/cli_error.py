"""CliError: the failure of a command; its sentence names the change to make."""


class CliError(Exception):
    """Failure of a command. It is printed after `pilotlight:` on standard error; the exit status is 1."""
