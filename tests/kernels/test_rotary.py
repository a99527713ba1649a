import torch

from kernels.rotary import rotary
from tests.closeness import assert_close


def test_pairs_are_rotated_as_complex_numbers() -> None:
    tokens, heads, head_dim = 7, 3, 10
    x, angles = torch.randn(tokens, heads, head_dim), torch.randn(tokens, head_dim // 2) * 10
    as_complex = torch.complex(x[..., :5].double(), x[..., 5:].double())
    turned = as_complex * torch.polar(torch.ones_like(angles).double(), angles.double()).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert_close("rotated", expected, rotary(x, angles.cos(), angles.sin()), 1e-5)


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
        a, b = (q_position * frequencies)[None], (k_position * frequencies)[None]
        return (rotary(q, a.cos(), a.sin()) * rotary(k, b.cos(), b.sin())).sum()

    assert_close("score", score(5, 2), score(105, 102), 1e-4)


def test_the_type_of_the_input_is_kept() -> None:
    x = torch.randn(2, 1, 4).bfloat16()
    assert rotary(x, torch.ones(2, 2), torch.zeros(2, 2)).dtype == torch.bfloat16
