"""The part of the `pyodide` package that functions import.

Values need no conversion, because there is no JavaScript.
"""

__version__ = "0.28.0"  # packages that were ported to Pyodide look at it
