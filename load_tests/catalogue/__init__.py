"""Every operation of kernels/ with its formula, cases, cost and tolerance."""

from load_tests.catalogue import (
    activations,
    adapters,
    attention,
    experts,
    heads,
    matrices,
    norms,
    pooling_cases,
    sampling_cases,
    states,
)
from load_tests.catalogue.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *norms.OPERATIONS,
    *activations.OPERATIONS,
    *heads.OPERATIONS,
    *attention.OPERATIONS,
    *matrices.OPERATIONS,
    *experts.OPERATIONS,
    *adapters.OPERATIONS,
    *sampling_cases.OPERATIONS,
    *pooling_cases.OPERATIONS,
    *states.OPERATIONS,
)
