"""`python -m pilotlight.runtime SITE_FILE [MODEL]`: runs one site, with its file's models or the given one."""

import gc
import sys
from pathlib import Path


def main() -> int:
    if not 2 <= len(sys.argv) <= 3:
        print("usage: python -m pilotlight.runtime SITE_FILE [MODEL]", file=sys.stderr)
        return 2
    gc.disable()  # what modules are made of is never garbage
    from pilotlight.runtime.serve import serve_file

    gc.freeze()
    gc.enable()
    return serve_file(Path(sys.argv[1]), *sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
