"""The program `pilotlight`, which Ctrl-C ends without a traceback."""

import signal
import sys
from importlib import import_module

COMMANDS = "pilotlight.runtime.cli.commands"  # whose imports take half a second on a busy machine
SERVERS = ("up", "site", "router", "serve", "store", "dev")  # commands that SIGHUP does not end once they serve


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if len(sys.argv) > 1 and sys.argv[1] in SERVERS:
        import_module("pilotlight.support.signals").hold_signals()
    commands = import_module(COMMANDS)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        commands.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
