"""Every module of kernels can be imported first, although public modules and their Triton forms import each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = [pytest.mark.process, pytest.mark.cpu_only]

ROOT = Path(__file__).parents[3]
SCRIPT = """
import importlib, pkgutil, sys
import torch
torch.cuda.is_available = lambda: True
import pilotlight.kernels as kernels
KERNELS = "pilotlight.kernels"
names = [module.name for module in pkgutil.walk_packages(kernels.__path__, f"{KERNELS}.")]
names = [name for name in names if ".triton." not in name and ".tuned" not in name]
names += [f"{KERNELS}.triton.{name}" for name in ("moe", "routing", "matrices.linear", "matrices.fp8_linear")]
assert f"{KERNELS}.moe" in names and f"{KERNELS}.matrices.linear" in names
for name in names:
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(KERNELS)]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name} cannot be imported first: {error}")
assert importlib.import_module(f"{KERNELS}.moe") and f"{KERNELS}.triton.moe" in sys.modules
"""


def test_every_module_can_be_imported_first_where_triton_is_used() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PILOTLIGHT_TRITON"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
