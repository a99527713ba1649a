import torch

from pilotlight.kernels.elementwise.activation import clamped_swiglu
from tests.closeness import assert_close


def halves(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 2 * 123) * scale
    return x, x[:, :123].double(), x[:, 123:].double()


def test_the_clamped_gate_has_no_lower_bound() -> None:
    x, gate, up = halves(scale=20.0)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    assert float(gate.min()) < -7.0
    expected = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    assert_close("gated", expected, clamped_swiglu(x, alpha=1.702, limit=7.0), 1e-6)
