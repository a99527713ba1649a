"""torch without its meta device's formulas: the engine's own kind of use works, and they come when they are asked for."""

import subprocess
import sys

PROGRAM = """
import sys
from kernels import meta_formulas
meta_formulas.postpone()
import torch
planned = torch.empty(6, 4, device="meta")
assert [tuple(part.shape) for part in torch.split(planned, [2, 4])] == [(2, 4), (4, 4)]
with torch.inference_mode():
    x = torch.ones(3, 4).bfloat16()
    assert torch.nn.functional.linear(x, torch.ones(5, 4).bfloat16()).sum() == 60
    assert torch.topk(torch.arange(5.0), 2).indices.tolist() == [4, 3]
meta_formulas.load()
real = sys.modules["torch._meta_registrations"]
assert hasattr(real, "activate_meta")
product = torch.nn.functional.scaled_dot_product_attention(*(torch.empty(1, 2, 3, 8, device="meta") for _ in range(3)))
assert product.shape == (1, 2, 3, 8)
meta_formulas.load()
assert sys.modules["torch._meta_registrations"] is real
meta_formulas.postpone()
assert sys.modules["torch._meta_registrations"] is real
"""


def test_torch_works_without_them_and_gets_them_on_demand() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
