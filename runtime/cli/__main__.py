"""The program `pilotlight`, which Ctrl-C ends without a traceback while it is imported."""

import signal
from importlib import import_module

COMMANDS = "pilotlight.runtime.cli.commands"  # whose imports take half a second on a busy machine


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    commands = import_module(COMMANDS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    commands.main()


if __name__ == "__main__":
    main()
