"""Every operation of kernels/, with what it promises."""

from kernels.catalogue import block_copies, norms, pooling, sampling
from kernels.catalogue.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *block_copies.OPERATIONS,
    *norms.OPERATIONS,
    *pooling.OPERATIONS,
    *sampling.OPERATIONS,
)
