import torch

from kernels.activation import silu_and_mul
from tests.closeness import assert_close


def test_the_first_half_gates_the_second() -> None:
    x = torch.randn(6, 2 * 123)
    gate, up = x[:, :123].double(), x[:, 123:].double()
    assert_close("gated", gate * torch.sigmoid(gate) * up, silu_and_mul(x), 1e-6)
