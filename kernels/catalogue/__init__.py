"""Every operation of kernels/, with what it promises."""

from kernels.catalogue import norms, pooling, sampling
from kernels.catalogue.operation import Operation

OPERATIONS: tuple[Operation, ...] = (*norms.OPERATIONS, *pooling.OPERATIONS, *sampling.OPERATIONS)
