"""Layers' states, chunk by chunk and token by token, compared with their formulas in fp64."""

import pytest
import torch
import torch.nn.functional as F

from pilotlight.kernels.state.delta_rule import gated_delta_rule, gated_delta_step
from pilotlight.kernels.state.gated_norm import gate_then_norm, norm_then_gate
from pilotlight.kernels.state.short_conv import short_conv, short_conv_step
from pilotlight.kernels.state.ssd import ssd, ssd_step
from tests.closeness import assert_close

LENGTHS = (1, 5, 64, 131)


def delta_arguments(tokens: int, heads: int = 3, key: int = 6, value: int = 5) -> tuple[torch.Tensor, ...]:
    q, k = (F.normalize(torch.randn(tokens, heads, key), dim=-1) for _ in "qk")
    v, g, b = torch.randn(tokens, heads, value), -torch.rand(tokens, heads), torch.rand(tokens, heads)
    return q, k, v, g, b, torch.randn(heads, key, value)


def delta_formula(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, b, state = (x.double() for x in arguments)
    outputs = []
    for t in range(len(q)):
        state = g[t].exp()[:, None, None] * state
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], b[t][:, None] * (v[t] - seen))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_delta_rule_in_chunks_is_its_formula(tokens: int) -> None:
    arguments = delta_arguments(tokens)
    for name, expected, actual in zip("os", delta_formula(*arguments), gated_delta_rule(*arguments), strict=True):
        assert_close(name, expected.float(), actual, 1e-5)


def test_the_delta_rule_of_one_token_is_its_formula_for_each_sequence() -> None:
    each = [delta_arguments(1) for _ in range(4)]
    inputs = [torch.cat([one[i] for one in each]) for i in range(5)]
    outputs, states = gated_delta_step(*inputs, torch.stack([one[5] for one in each]))
    for i, arguments in enumerate(each):
        expected, state = delta_formula(*arguments)
        assert_close("o", expected.float()[0], outputs[i], 1e-5)
        assert_close("s", state.float(), states[i], 1e-5)


def ssd_arguments(
    tokens: int, heads: int = 6, groups: int = 2, size: int = 5, value: int = 4
) -> tuple[torch.Tensor, ...]:
    x, (b, c) = torch.randn(tokens, heads, value), torch.randn(2, tokens, groups, size)
    return x, b, c, -torch.rand(tokens, heads), torch.randn(heads, size, value)


def ssd_formula(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, b, c, g, state = (one.double() for one in arguments)
    of_group, outputs = x.shape[1] // b.shape[1], []
    b, c = (one.repeat_interleave(of_group, 1) for one in (b, c))
    for t in range(len(x)):
        state = g[t].exp()[:, None, None] * state + torch.einsum("hs,hv->hsv", b[t], x[t])
        outputs.append(torch.einsum("hsv,hs->hv", state, c[t]))
    return torch.stack(outputs), state


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_state_space_in_chunks_is_its_formula(tokens: int) -> None:
    arguments = ssd_arguments(tokens)
    for name, expected, actual in zip("ys", ssd_formula(*arguments), ssd(*arguments), strict=True):
        assert_close(name, expected.float(), actual, 1e-5)


def test_the_state_space_of_one_token_is_its_formula_for_each_sequence() -> None:
    each = [ssd_arguments(1) for _ in range(4)]
    inputs = [torch.cat([one[i] for one in each]) for i in range(4)]
    outputs, states = ssd_step(*inputs, torch.stack([one[4] for one in each]))
    for i, arguments in enumerate(each):
        expected, state = ssd_formula(*arguments)
        assert_close("y", expected.float()[0], outputs[i], 1e-5)
        assert_close("s", state.float(), states[i], 1e-5)


@pytest.mark.parametrize("bias", [None, torch.randn(7)])
def test_a_short_convolution_is_torchs_and_has_the_same_bits_token_by_token(bias: torch.Tensor | None) -> None:
    x, weight = torch.randn(3 + 11, 7), torch.randn(7, 4)
    y = short_conv(x, weight, bias, F.silu)
    expected = F.silu(F.conv1d(x.T[None], weight[:, None], bias, groups=7))[0].T
    assert_close("y", expected, y, 1e-6)
    windows = torch.stack([x[i : i + 4] for i in range(11)])
    assert torch.equal(short_conv_step(windows, weight, bias, F.silu), y)


def test_gated_norms_are_their_formulas() -> None:
    x, gate, weight = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(2, 8)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close("y", normed * weight[0] * F.silu(gate), norm_then_gate(x, gate, weight[0], 1e-5), 1e-6)
    gated = x * F.silu(gate)
    expected = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert_close("y", expected, gate_then_norm(x, gate, weight, 1e-5), 1e-6)
