"""An engine host on a CPU computes without the parts of torch that it does not import."""

import json
import subprocess
import sys

import pytest

from pilotlight.engine.host import torch_parts

pytestmark = pytest.mark.process

PROGRAM = """
import json, sys
from pilotlight.engine.host import torch_parts
torch_parts.TRIED = {tried!r}
torch_parts.leave_out()
from pilotlight.engine.host.model_loader import import_libraries
import_libraries()
import torch
places = torch.empty(6, 4, device="meta")
assert [tuple(part.shape) for part in torch.split(places, [2, 4])] == [(2, 4), (4, 4)]
with torch.inference_mode():
    rows = torch.nn.functional.linear(torch.ones(3, 4).bfloat16(), torch.ones(5, 4).bfloat16())
    assert torch.softmax(rows.float(), -1).topk(2).values.sum().isclose(torch.tensor(1.2))
try:
    torch.optim.SGD([])
    error = None
except Exception as raised:
    error = str(raised)
print(json.dumps({{"modules": len([name for name in sys.modules if name.startswith("torch.")]), "error": error}}))
"""


def imported(tried: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(tried=tried)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_host_on_a_cpu_computes_without_them_and_names_one_that_is_called() -> None:
    whole, part = imported("another version"), imported(torch_parts.TRIED)
    assert "torch.optim.SGD is left out" in str(part["error"])
    assert "left out" not in str(whole["error"]), "versions with which this was not tried are imported whole"
    assert part["modules"] < 0.7 * whole["modules"]  # type: ignore[operator]


LOSSLESS_SPEED = """
from pilotlight.engine.host import torch_parts
torch_parts.leave_out()
from pilotlight.engine.host.model_loader import import_libraries
import_libraries()
from pilotlight.kernels.matrices.lossless_speed import speed_here
assert speed_here()._gain(1) > 0
"""


def test_a_host_can_measure_whether_weights_in_12_bits_are_faster() -> None:
    done = subprocess.run([sys.executable, "-c", LOSSLESS_SPEED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
