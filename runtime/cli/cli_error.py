"""CliError: the one way a command fails, with a sentence that says what to do."""


class CliError(Exception):
    """Printed after `pilotlight:` on standard error; the exit status is 1."""
