"""Every operation of kernels/, with what it promises."""

from kernels.catalogue import (
    activations,
    adapters,
    attention,
    experts,
    heads,
    matrices,
    norms,
    pooling,
    sampling,
)
from kernels.catalogue.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *norms.OPERATIONS,
    *activations.OPERATIONS,
    *heads.OPERATIONS,
    *attention.OPERATIONS,
    *matrices.OPERATIONS,
    *experts.OPERATIONS,
    *adapters.OPERATIONS,
    *sampling.OPERATIONS,
    *pooling.OPERATIONS,
)
