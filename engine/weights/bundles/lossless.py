"""Matrices in 12 bits in a bundle: four tensors per matrix, and the conversion from plain weights.

How much coding saves depends on a matrix's content, so matrices are coded after the plain weights are loaded: while a model serves from them
(relocation.py), or while a bundle in memory is written (load.py). The bundle's layout follows from the result. This module knows names and pieces,
and is independent of files.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from pilotlight.engine.weights.bundles.bundle import Bundle, TensorSpec, WeightBundleError
from pilotlight.engine.weights.tensor_bytes import NAMES, Write, as_bytes
from pilotlight.kernels.matrices.lossless import MOST_COLUMNS, PALETTE_ROWS, LosslessWeight, Survey, encode_lossless

CODED = ", matrices in 12 bits"  # suffix of `BundleIdentity.dtype`
CODES, PALETTES, STARTS, ESCAPES = PARTS = ("~codes", "~palettes", "~starts", "~escapes")
PIECE_BYTES = 4 << 20

Pieces = Callable[[], Iterator[torch.Tensor]]


class Matrix(NamedTuple):
    """The sizes of a tensor that can be coded: a matrix, or the stacked matrices of all experts."""

    columns: int
    experts: int = 1

    def takes(self, plain: torch.Tensor) -> bool:
        rows = plain.numel() // self.columns
        shares_no_palette = self.experts == 1 or rows // self.experts % PALETTE_ROWS == 0
        return plain.dtype == torch.bfloat16 and 0 < self.columns <= MOST_COLUMNS and shares_no_palette


class CodedTensors:
    """A model's tensors, with matrices coded where that saves enough.

    Call `survey` first. Then `specs` lists the bundle's tensors, in order, and `pieces` yields their bytes. Request a matrix's codes before its
    escapes, because coding fills both.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        matrices: Mapping[str, Matrix],
        coded_share: float,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`coded_share`: a matrix is coded if that takes at most this share of its plain bytes.

        `piece_bytes`: most plain bytes of a piece, about.
        """
        self.specs: list[TensorSpec] = []
        self._tensors = tensors
        self._matrices = matrices
        self._coded_share = coded_share
        self._piece_bytes = piece_bytes
        self._pieces: dict[str, Pieces] = {}

    def survey(self) -> Iterator[str]:
        """Decide for one tensor after another whether it is coded, and yield its name."""
        piece_bytes = self._piece_bytes  # a piece that held this object would keep the tensors after it
        for name, tensor in self._tensors.items():
            matrix = self._matrices.get(name)
            if matrix is None or not matrix.takes(tensor) or not self._add_coded(name, tensor.view(-1, matrix.columns)):
                self._add(name, tensor, lambda tensor=tensor: _cut(tensor, piece_bytes))  # type: ignore[misc]
            yield name

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the consecutive parts of a tensor of the bundle."""
        return self._pieces[name]()

    def write(self, bundle: Bundle, write: Write) -> Iterator[int]:
        """Write all tensors to their places in the bundle; yield the end offset of each written piece."""
        for placed in bundle.tensors:
            at = placed.start
            for piece in self.pieces(placed.spec.name):
                content = as_bytes(piece)
                write(at, content)
                at += len(content)
                yield at

    def _add(self, name: str, tensor: torch.Tensor, pieces: Pieces) -> None:
        self.specs.append(TensorSpec(name, NAMES[tensor.dtype], tuple(tensor.shape)))
        self._pieces[name] = pieces

    def _add_coded(self, name: str, plain: torch.Tensor) -> bool:
        survey = Survey.of(plain)
        if survey.num_bytes > self._coded_share * plain.nbytes:
            return False
        weight = survey.empty(on=torch.device("meta"))
        escapes, piece_bytes = torch.zeros_like(weight.escapes, device="cpu"), self._piece_bytes
        self._add(name + CODES, weight.codes, lambda: _encode(plain, survey, escapes, piece_bytes))
        for ending, part in ((PALETTES, survey.palettes), (STARTS, survey.starts), (ESCAPES, escapes)):
            self._add(name + ending, part, lambda part=part: iter([part]))  # type: ignore[misc]
        return True


def plain_bytes(tensors: Mapping[str, torch.Tensor], matrices: Mapping[str, Matrix]) -> int:
    """Return the size in bytes that a bundle's tensors would have if none were coded."""
    total = 0
    for name, tensor in tensors.items():
        if name.endswith(CODES):
            total += tensor.shape[0] * matrices[name.removesuffix(CODES)].columns * 2
        elif not name.endswith(PARTS):
            total += tensor.nbytes
    return total


def check_coded(name: str, weight: LosslessWeight) -> None:
    """Raise WeightBundleError for offsets with which the C kernel would read outside a weight's escapes."""
    starts = weight.starts
    if int(starts[0]) or int(starts[-1]) > len(weight.escapes) or not bool((starts[1:] >= starts[:-1]).all()):
        raise WeightBundleError(f"its {name}{STARTS} and {name}{ESCAPES} do not match")


def _encode(plain: torch.Tensor, survey: Survey, escapes: torch.Tensor, piece_bytes: int) -> Iterator[torch.Tensor]:
    step = max(1, piece_bytes // (PALETTE_ROWS * plain.shape[1])) * PALETTE_ROWS
    for begin in range(0, plain.shape[0], step):
        rows = plain[begin : begin + step]
        groups = slice(begin // PALETTE_ROWS, -(-(begin + len(rows)) // PALETTE_ROWS))
        starts = survey.starts[groups.start : groups.stop + 1]
        part = Survey(survey.palettes[groups], starts, *rows.shape)
        weight = part.empty(escapes=escapes)
        encode_lossless(rows, weight)
        yield weight.codes


def _cut(tensor: torch.Tensor, piece_bytes: int) -> Iterator[torch.Tensor]:
    flat = tensor.view(-1)
    yield from torch.split(flat, max(1, piece_bytes // tensor.itemsize)) if tensor.numel() else ()
