"""The import path of a function's processes."""

import os
import sys
from contextlib import suppress


def extend(layers: list[str]) -> None:
    """Put layers at the start of the import path.
    Their `.pth` files are processed, as for installed packages."""
    sys.path[:0] = layers
    for layer in layers:
        with suppress(BaseException):  # of code in a `.pth` file; Python has printed ordinary exceptions
            if any(name.endswith(".pth") for name in os.listdir(layer)):
                import site  # imported late: few layers need it, and it delays a cold start

                site.addsitedir(layer)
