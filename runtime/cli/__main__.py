"""The program `pilotlight`, which Ctrl-C ends without a traceback while it is imported."""

import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pilotlight.runtime.cli.commands import main as run  # takes half a second on a busy machine

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
