"""The C library as loaded into this process, or the fact that there is none.

Knows when it may be used; refuses to know tensors' shapes. Until `start` has found or built it, and for ever where it cannot be built, every
operation is torch's: slower, with the same results up to rounding.
"""

import logging
import threading
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.cpu import functions
from kernels.cpu.build import TORCH, BuildError, build_library, find_library, forced_kind
from kernels.cpu.crossover import UNLIMITED, Forms, Limits, keep_limits
from kernels.cpu.functions import Function

log = logging.getLogger(__name__)

_ENDINGS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Rows of a product that are ours while it is not known what torch's takes: a decode step of so many sequences can be recorded.
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
    """One function per operation and type; those of sampling and of programs."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError for one that is damaged."""
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
        self.decodes_fast = bool(functions.number(opened, "coded_is_fast_f32"))
        self.slow = [dtype for dtype in _ENDINGS if not functions.number(opened, f"gemm_is_fast_{_ENDINGS[dtype]}")]
        # of a product, up to which each row of a weight is summed for itself
        self.few_rows = {dtype: functions.number(opened, f"few_rows_{ending}") for dtype, ending in _ENDINGS.items()}
        # rows of a product; those of more are torch's
        self.most_rows = {dtype: _UNMEASURED_ROWS if dtype in self.slow else UNLIMITED for dtype in _ENDINGS}
        self.most_queries = dict.fromkeys(_ENDINGS, UNLIMITED)  # of a prompt; attention of those of more is torch's
        self.rows_of = _by_type(opened, "rows_of")
        self.rms_norm = _by_type(opened, "rms_norm")
        self.rotate_and_cache = _by_type(opened, "rotate_and_cache")
        self.gated_activation = _by_type(opened, "gated_activation")
        self.decode_attention = _by_type(opened, "decode_attention")
        self.verify_attention = _by_type(opened, "verify_attention")
        self.prefill_attention = _by_type(opened, "prefill_attention")
        self.add_lora = _by_type(opened, "add_lora")
        self.is_finite = _by_type(opened, "is_finite")
        self.sampling = SamplingFunctions(*(functions.find(opened, name) for name in SamplingFunctions._fields))
        self.programs = ProgramFunctions(*(functions.find(opened, name) for name in ProgramFunctions._fields))
        self.mask_logits = functions.find(opened, "mask_logits")
        self.sum_words = functions.find(opened, "sum_words")  # how fast memory can be read

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Compute x [rows, columns] times weight [outputs, columns], both contiguous, and drop it."""
        (rows, columns), (outputs, _), dtype = x.shape, weight.shape, x.dtype
        y = x.new_empty((rows, outputs))
        function = self.function_of(rows, dtype)
        addresses = (x.data_ptr(), weight.data_ptr(), None, y.data_ptr())
        function(*addresses, rows, outputs, columns, columns, 0, False, torch.get_num_threads())

    def function_of(self, rows: int, dtype: torch.dtype) -> Function:
        return self.linear[dtype] if rows <= self.few_rows[dtype] else self.gemm[dtype]


loaded: Library | None = None  # read at every call: it may appear while a model is already serving
_starting = threading.Lock()
_started = False
_building: threading.Thread | None = None


def start(*, wait: bool = False) -> None:
    """Use the library that is there, or build it in the background; with `wait`, before returning. The first call counts. Raises
    BuildError for a kind of CPU that cannot be had here."""
    global _started, _building
    with _starting:
        if _started or forced_kind() == TORCH:
            return
        _started = True
        if _use_existing():
            return
        if wait:
            _use_built()
        else:
            log.info("torch computes, more slowly, until the CPU kernels are compiled")
            _building = threading.Thread(target=_use_built, name="cpu-kernels", daemon=True)
            _building.start()


def takes_codes() -> bool:
    """True if products with weights in codes are faster here than with those that are unpacked. Waits for a build that `start` has begun."""
    if _building is not None:
        _building.join()
    return loaded is not None and loaded.decodes_fast


def _use_existing() -> bool:
    global loaded
    try:
        path = find_library()
    except BuildError:
        return False  # building will fail too, and say so
    if path is None:
        return False
    try:
        loaded = _opened(path)
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels in %s are damaged (%s) and are built again", path, error)
        path.unlink(missing_ok=True)
    return loaded is not None


def _use_built() -> None:
    global loaded
    try:
        loaded = _opened(build_library())
        log.info("the CPU kernels compute from now on")
    except (BuildError, OSError, AttributeError) as error:
        log.warning("the CPU kernels cannot be used, torch computes instead, more slowly: %s", error)


def _opened(path: Path) -> Library:
    """Load the library, and find out which products and prompts are better left to torch's."""
    library = Library(path)
    if library.slow:
        # which import this module
        from kernels.cpu import ops
        from kernels.prefill_attention import attend_by_torch

        ours = Forms(library.product, partial(ops.prefill_attention, library))
        torchs = Forms(torch.nn.functional.linear, attend_by_torch)
        limits = Limits(library.most_rows, library.most_queries)
        keep_limits(limits, library.slow, ours, torchs, path.with_suffix(".json"))
    return library


def _by_type(opened: functions.Opened, name: str) -> dict[torch.dtype, Function]:
    return {dtype: functions.find(opened, f"{name}_{ending}") for dtype, ending in _ENDINGS.items()}
