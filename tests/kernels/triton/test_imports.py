"""Where Triton is used, a public module imports its Triton form, which imports types back: every module can come first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[3]
SCRIPT = """
import importlib, pkgutil, sys
import torch
torch.cuda.is_available = lambda: True
import kernels
names = [f"kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
names += [f"kernels.triton.{name}" for name in ("moe", "routing", "linear", "fp8_linear")]
assert "kernels.moe" in names
for name in names:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "kernels"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name} cannot be imported first: {error}")
assert importlib.import_module("kernels.moe") and "kernels.triton.moe" in sys.modules
"""


def test_every_module_can_be_imported_first_where_triton_is_used() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PILOTLIGHT_TRITON"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
