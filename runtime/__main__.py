"""`python -m runtime SITE_FILE`: one site. Starts its engine host's process first, and imports the rest of the site beside that one's imports."""

import gc
import sys

from runtime.engines.early_host import start_early


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m runtime SITE_FILE", file=sys.stderr)
        return 2
    early = start_early()
    gc.disable()  # what modules are made of is never garbage
    from pathlib import Path

    from runtime.engines.likely import likely_work

    file = Path(sys.argv[1])
    if early is not None:
        early.tell(likely_work(file))
    from runtime.serve import serve_file

    gc.freeze()
    gc.enable()
    return serve_file(file, early)


if __name__ == "__main__":
    sys.exit(main())
