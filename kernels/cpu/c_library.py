"""The C library's functions by operation and dtype.

This module knows ctypes' functions and torch's types, and is independent of shapes, and of when the library is used.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from pilotlight.kernels.cpu import functions
from pilotlight.kernels.cpu.crossover import UNLIMITED
from pilotlight.kernels.cpu.functions import Function

_ENDINGS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Until torch's speed is measured, this library computes products of up to so many rows, and decode steps of up to so many sequences are recorded.
_UNMEASURED_ROWS = 24


class SamplingFunctions(NamedTuple):
    sampling_sums: Function
    argmax: Function
    philox_uniform: Function


class ProgramFunctions(NamedTuple):
    workspace_new: Function
    workspace_free: Function
    program_begin: Function
    program_end: Function
    program_run: Function
    program_free: Function


class Library:
    """The functions of the loaded library: by operation and dtype, or as groups for sampling and programs."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises OSError or AttributeError if it is damaged."""
        self.path = path
        opened = functions.open_library(path)
        self.linear = _by_type(opened, "linear")
        self.gemm = _by_type(opened, "gemm")
        self.lossless_linear = _by_type(opened, "lossless_linear")
        self.lossless_gemm = _by_type(opened, "lossless_gemm")
        self.lossless_rows = _by_type(opened, "lossless_rows")
        self.lossless_survey = functions.find(opened, "lossless_survey")
        self.lossless_encode = functions.find(opened, "lossless_encode")
        self.join_planes = functions.find(opened, "join_planes")
        self.coded_linear = _by_type(opened, "coded_linear")
        self.block_linear = _by_type(opened, "block_linear")
        self.block_rows = _by_type(opened, "block_rows")
        self.decodes_fast = bool(functions.number(opened, "coded_is_fast_f32"))
        self.slow = [dtype for dtype in _ENDINGS if not functions.number(opened, f"gemm_is_fast_{_ENDINGS[dtype]}")]
        # most rows of a product for which each row of a weight is summed separately
        self.few_rows = {dtype: functions.number(opened, f"few_rows_{ending}") for dtype, ending in _ENDINGS.items()}
        # most rows of a product that this library computes; torch computes larger ones
        self.most_rows = {dtype: _UNMEASURED_ROWS if dtype in self.slow else UNLIMITED for dtype in _ENDINGS}
        # most tokens of a prompt whose attention this library computes; torch takes longer ones
        self.most_queries = dict.fromkeys(_ENDINGS, UNLIMITED)
        self.rows_of = _by_type(opened, "rows_of")
        self.rms_norm = _by_type(opened, "rms_norm")
        self.rotate_and_cache = _by_type(opened, "rotate_and_cache")
        self.apply_gate = _by_type(opened, "apply_gate")
        self.gated_activation = _by_type(opened, "gated_activation")
        self.decode_attention = _by_type(opened, "decode_attention")
        self.verify_attention = _by_type(opened, "verify_attention")
        self.prefill_attention = _by_type(opened, "prefill_attention")
        self.latent_attention = _by_type(opened, "latent_attention")
        self.add_lora = _by_type(opened, "add_lora")
        self.is_finite = _by_type(opened, "is_finite")
        self.short_conv = _by_type(opened, "short_conv")
        self.gated_delta_rule = _by_type(opened, "gated_delta_rule")
        self.ssd = _by_type(opened, "ssd")
        self.gated_norm = _by_type(opened, "gated_norm")
        self.sampling = SamplingFunctions(*(functions.find(opened, name) for name in SamplingFunctions._fields))
        self.programs = ProgramFunctions(*(functions.find(opened, name) for name in ProgramFunctions._fields))
        self.mask_logits = functions.find(opened, "mask_logits")
        self.sum_words = functions.find(opened, "sum_words")  # measures how fast memory can be read

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Compute x [rows, columns] times weight [outputs, columns], contiguous, only to measure its time."""
        (rows, columns), (outputs, _), dtype = x.shape, weight.shape, x.dtype
        y = x.new_empty((rows, outputs))
        function = self.function_of(rows, dtype)
        addresses = (x.data_ptr(), weight.data_ptr(), None, y.data_ptr())
        function(*addresses, rows, outputs, columns, columns, 0, False, torch.get_num_threads())

    def function_of(self, rows: int, dtype: torch.dtype) -> Function:
        return self.linear[dtype] if rows <= self.few_rows[dtype] else self.gemm[dtype]


def _by_type(opened: functions.Opened, name: str) -> dict[torch.dtype, Function]:
    return {dtype: functions.find(opened, f"{name}_{ending}") for dtype, ending in _ENDINGS.items()}
