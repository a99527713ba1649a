"""`python -m pilotlight.runtime SITE_FILE`: one site, until a signal stops it."""

import argparse
import gc
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser("python -m pilotlight.runtime", description="Serve the site of a file.")
    parser.add_argument("file", type=Path, metavar="SITE_FILE")
    parser.add_argument("--model", metavar="SOURCE", help="served in place of the file's models")
    parser.add_argument(
        "--deployments",
        metavar="URL",
        help="of the router whose deployed functions are served, unless the file has one",
    )
    options = parser.parse_args()
    gc.disable()  # what modules are made of is never garbage
    from pilotlight.runtime.serve import serve_file

    gc.freeze()
    gc.enable()
    return serve_file(options.file, options.model, options.deployments)


if __name__ == "__main__":
    sys.exit(main())
