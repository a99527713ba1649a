"""The types of tensors in GGUF files that can be read: bytes and values per block.

From ggml's ggml.h and ggml-common.h (https://github.com/ggml-org/ggml). kernels/matrices/blocks.py reads the content of blocks.
"""

from typing import NamedTuple


class TensorKind(NamedTuple):
    name: str
    block: int  # values per block
    block_bytes: int
    plain: str | None = None  # name of the type in safetensors; None for a quantized type


KINDS = {
    0: TensorKind("F32", 1, 4, "F32"),
    1: TensorKind("F16", 1, 2, "F16"),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    20: TensorKind("IQ4_NL", 32, 18),
    30: TensorKind("BF16", 1, 2, "BF16"),
    39: TensorKind("MXFP4", 32, 17),
}  # by number of the type in ggml
UNREAD = {
    9: "Q8_1", 10: "Q2_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
