"""The Triton form of the operations in kernels/: the same names and signatures, for CUDA devices."""
