"""Every operation of kernels/, with what it promises."""

from kernels.catalogue import experts, matrices, norms
from kernels.catalogue.operation import Operation

OPERATIONS: tuple[Operation, ...] = (*norms.OPERATIONS, *matrices.OPERATIONS, *experts.OPERATIONS)
