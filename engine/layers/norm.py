"""RMS normalisation with its weight, alone or behind the residual addition."""

import torch

from engine.layers.weights import WeightLoader
from kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    @classmethod
    def load(cls, loader: WeightLoader, name: str, size: int, eps: float) -> "RMSNorm":
        return cls(loader.tensor(f"{name}.weight", size), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)"""
        return add_rms_norm(x, residual, self.weight, self.eps)
