"""`python -m pilotlight.edge_router NETWORK_FILE`: runs one router until a signal stops it."""

import sys

from pilotlight.support.signals import begin_server


def main() -> int:
    begin_server()
    from pilotlight.edge_router import serve  # imported here: it takes half a second, in which signals may come

    return serve.main()


if __name__ == "__main__":
    sys.exit(main())
