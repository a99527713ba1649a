"""As much of Pyodide's module as functions import that were written for it. Here Python's values need no conversion: there is no JavaScript."""

__version__ = "0.28.0"  # packages that were ported to it look
