"""The part of Pyodide's module that functions import.
Python values need no conversion here, because there is no JavaScript."""

__version__ = "0.28.0"  # read by packages that were ported to Pyodide
