"""`python -m pilotlight.runtime SITE_FILE`: one site."""

import gc
import sys
from pathlib import Path


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m pilotlight.runtime SITE_FILE", file=sys.stderr)
        return 2
    gc.disable()  # what modules are made of is never garbage
    from pilotlight.runtime.serve import serve_file

    gc.freeze()
    gc.enable()
    return serve_file(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
