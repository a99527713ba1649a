"""`python -m pilotlight.runtime SITE_FILE`: runs one site until a signal stops it."""

import argparse
import gc
import sys
from pathlib import Path

from pilotlight.support.signals import begin_server


def main() -> int:
    begin_server()
    parser = argparse.ArgumentParser("python -m pilotlight.runtime", description="Serve the site of a file.")
    parser.add_argument("file", type=Path, metavar="SITE_FILE")
    parser.add_argument("--model", metavar="SOURCE", help="model to serve instead of the models in the file")
    parser.add_argument(
        "--deployments",
        metavar="URL",
        help="URL of the router whose deployed functions are served, unless the file names one",
    )
    options = parser.parse_args()
    gc.disable()  # modules and their functions are never garbage: collections need not scan them
    from pilotlight.runtime.serve import serve_file

    gc.freeze()
    gc.enable()
    return serve_file(options.file, options.model, options.deployments)


if __name__ == "__main__":
    sys.exit(main())
