"""Every operation of kernels/, with what it promises."""

from kernels.catalogue import activations, attention, experts, heads, matrices, norms
from kernels.catalogue.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *norms.OPERATIONS,
    *activations.OPERATIONS,
    *heads.OPERATIONS,
    *attention.OPERATIONS,
    *matrices.OPERATIONS,
    *experts.OPERATIONS,
)
