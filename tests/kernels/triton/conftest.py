"""Fixtures of the Triton tests.

The C library has no part in these tests, so each runs once.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def arithmetic() -> str:
    return "triton"


def run_compiling(script: str, **environment: str) -> str:
    """Return the output of a script in a process in which Triton compiles.

    Compiled kernels are stored by source in the user's cache, as in production, so all checkouts share them.
    """
    return _run("-c", script, **environment)


def run_module(module: str, *words: str, **environment: str) -> str:
    """Return the output of a module in such a process."""
    return _run("-m", module, *words, **environment)


def _run(*words: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *words],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=850,  # where nothing is cached, on a busy machine
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
