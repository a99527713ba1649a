"""The comparison of tensors in all tests: relative to the expected tensor's size. NaN fails, and the error names the tensor."""

import torch


def assert_close(name: str, expected: torch.Tensor, actual: torch.Tensor, ratio: float) -> None:
    """Check that the root-mean-square error is at most `ratio` of the expected root mean square."""
    assert expected.shape == actual.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    expected, actual = expected.double(), actual.double()
    assert bool(actual.isfinite().all()), f"{name}: not finite"
    error = (expected - actual).square().mean().sqrt().item()
    size = expected.square().mean().sqrt().item()
    assert error <= ratio * max(size, 1e-12), (
        f"{name}: error {error:.3g} is {error / max(size, 1e-12):.3g} of {size:.3g}"
    )
